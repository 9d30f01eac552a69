"""The mistakes in docs/errors.md raise the messages that the page quotes."""

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import AB, Injects, optimizer_of, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.docs

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()


def test_reasons_of_the_coverage_report_match_the_package() -> None:
    section = PAGE[PAGE.index("## The coverage report") :]
    blocks = re.findall(r"^```text\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    source = (Path(cs.__file__).parent / "trunk" / "pairing.py").read_text()
    for reason in (text for block in blocks for text in block.strip().split("\n\n")):
        words = max(re.split(r"\{\w+\}", reason), key=len).strip()
        assert words in source, reason


class Loop:
    """A minimal training loop."""

    def __init__(self, *, converted: bool = True, **options: Any) -> None:
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        if converted:
            cs.nn.convert_task_batchnorm(self.trunk, AB)
        self.heads = nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
        self.sgd = sgd_of(self.trunk, self.heads)
        self.x = torch.randn(8, 3)
        given = {"trunk": self.trunk, "optimizer": self.sgd, "tasks": AB, **options}
        self.opt = cs.MultiTaskOptimizer(**given)

    def loss(self, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(self.x)).square().mean()
        return result

    def backward(self, **options: bool) -> None:
        self.opt.backward({task: self.loss(task) for task in AB}, **options)


def _after_backward(then: Callable[[Loop], object], **options: bool) -> None:
    # Not converted: `backward` is for networks without task-specific normalization.
    loop = Loop(converted=False, method=cs.PCGrad())
    loop.backward(**options)
    then(loop)


def _optimizer_before_the_conversion() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    sgd = sgd_of(trunk)
    cs.nn.convert_task_batchnorm(trunk, AB)
    cs.MultiTaskOptimizer(trunk, sgd, AB)


def _a_frozen_copy_of_the_trunk() -> None:
    loop = Loop()
    twin = copy.deepcopy(loop.trunk).requires_grad_(False)
    cs.nn.set_task(twin, "a")
    loop.opt.step(lambda task: loop.heads[task](twin(loop.x)).mean())


def _an_activation_in_between() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    opt = optimizer_of(cs.nn.convert_task_batchnorm(trunk, AB))
    opt.step(lambda task: trunk(torch.randn(8, 3)).square().mean())


def _a_closure_with_a_backward_pass() -> None:
    loop = Loop()

    def closure(task: str) -> Tensor:
        loss = loop.loss(task)
        loss.backward()
        return loss

    loop.opt.step(closure)


def _a_failed_micro_batch(loop: Loop) -> None:
    with pytest.raises(ValueError, match="among"):
        loop.opt.backward({"c": loop.loss("a")})
    loop.backward()


def _a_second_step() -> None:
    loop = Loop()
    loop.opt.step(loop.loss)
    loop.sgd.step()


def _a_penalty_before() -> None:
    loop = Loop()
    sum(p.square().sum() for p in loop.trunk.parameters()).backward()
    loop.opt.step(loop.loss)


def _an_injected_loss() -> None:
    trunk = nn.Linear(3, 4)
    opt = optimizer_of(trunk, cs.PCGrad())
    y = trunk(torch.randn(8, 3))
    y = Injects.apply(y, y.square().mean())
    opt.backward({"a": y.mean(), "b": y.square().mean()})


def _a_penalty_in_a_hook() -> None:
    loop = Loop()
    weight = loop.trunk[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad + p.detach()))
    loop.opt.step(loop.loss)


MISTAKES: dict[str, Callable[[], object]] = {
    "module must have batch norm": lambda: cs.nn.convert_task_batchnorm(nn.LayerNorm(3), AB),
    "trunk must have task-specific": lambda: Loop(converted=False),
    "optimizer must hold every parameter of trunk": _optimizer_before_the_conversion,
    "no active task": lambda: Loop().trunk(torch.ones(8, 3)),
    "closure must return a tensor": lambda: Loop().opt.step(print),
    "closure must return a floating-point scalar": lambda: (o := Loop()).opt.step(
        lambda task: o.loss(task).expand(2)
    ),
    "closure must return a loss with a graph": lambda: (o := Loop()).opt.step(
        lambda task: o.loss(task).detach()
    ),
    "optimizer must hold every parameter that a loss": lambda: Loop().opt.step(
        lambda task: nn.Linear(3, 1)(torch.ones(1, 3)).sum()
    ),
    "a loss must depend on": _a_frozen_copy_of_the_trunk,
    "trunk must have a layer": _an_activation_in_between,
    "closure must leave gradients alone": _a_closure_with_a_backward_pass,
    "{schedule} depends on the epoch": lambda: (o := Loop(schedule=cs.Mixed(3))).opt.step(o.loss),
    "trunk must have no task-specific": lambda: (o := Loop()).opt.backward(
        {"a": o.x.mean() * o.trunk[0].bias.sum()}
    ),
    "the update of the last backward": lambda: _after_backward(Loop.backward),
    "the gradients of backward(..., update=False) wait": lambda: _after_backward(
        lambda loop: loop.sgd.step(), update=False
    ),
    "{error} in backward has dropped": lambda: _after_backward(_a_failed_micro_batch, update=False),
    "optimizer has already used the update": _a_second_step,
    "gradients must be None or used": _a_penalty_before,
    "backward makes a pass per task": _an_injected_loss,
    "gradients in .grad must stay as": _a_penalty_in_a_hook,
}
"""The mistake that raises a quoted message, by the message's first words."""

OF_RANKS = "process_group= is missing", "rank {rank} "
"""The first words of messages that occur only with more than one rank."""


def _quoted_messages() -> list[str]:
    section = PAGE[: PAGE.index("## The coverage report")]
    blocks = re.findall(r"^```text\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    quoted = (" ".join(text.split()) for block in blocks for text in block.split("\n\n"))
    return [text for text in quoted if not text.startswith(OF_RANKS)]


@pytest.mark.parametrize("text", _quoted_messages())
def test_a_quoted_message_is_raised_by_its_mistake(text: str) -> None:
    (mistake,) = (mistake for words, mistake in MISTAKES.items() if text.startswith(words))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, TypeError, RuntimeError, UserWarning)) as raised:
            mistake()
    # Values replace the names in braces.
    pattern = ".*".join(map(re.escape, re.split(r"\{\w+\}", text)))
    assert re.fullmatch(pattern, " ".join(str(raised.value).split()))


def test_every_mistake_is_quoted() -> None:
    assert len(_quoted_messages()) == len(MISTAKES)
