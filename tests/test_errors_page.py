"""docs/errors.md: the messages that it quotes are those that the mistakes raise."""

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import AB, optimizer_of, sgd_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.docs

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()


def _quoted() -> list[str]:
    """The messages in the page's blocks, without line breaks."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(text.split()) for block in blocks for text in block.split("\n\n")]


def _fits(quoted: str, message: str) -> bool:
    """Whether a message is a quoted one, with values in place of the names in braces."""
    literals = re.split(r"\{\w+\}", quoted)
    pattern = ".*".join(map(re.escape, literals))
    return re.fullmatch(pattern, " ".join(message.split())) is not None


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)
    slugs = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
    links = re.findall(r"\]\(#([^)]*)\)", PAGE)
    assert links
    assert set(links) <= slugs


def test_reasons_of_the_coverage_report_are_those_of_the_package() -> None:
    section = PAGE[PAGE.index("## The coverage report") : PAGE.index("## Questions")]
    blocks = re.findall(r"^```text\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    source = (Path(cs.__file__).parent / "trunk" / "pairing.py").read_text()
    for reason in (text for block in blocks for text in block.strip().split("\n\n")):
        words = max(re.split(r"\{\w+\}", reason), key=len).strip()
        assert words in source, reason


class Loop:
    """A training loop, as small as it can be."""

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

    def losses(self) -> dict[str, Tensor]:
        return {task: self.loss(task) for task in AB}


def _dense(**options: Any) -> Loop:
    """A loop with one forward pass for all tasks."""
    return Loop(converted=False, method=cs.PCGrad(), **options)


def _optimizer_before_the_conversion() -> None:
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    sgd = sgd_of(trunk)
    cs.nn.convert_task_batchnorm(trunk, AB)
    cs.MultiTaskOptimizer(trunk, sgd, AB)


def _a_copy_of_the_trunk(*, frozen: bool) -> None:
    loop = Loop()
    twin = copy.deepcopy(loop.trunk).requires_grad_(not frozen)
    cs.nn.set_task(twin, "a")
    loop.opt.step(lambda task: loop.heads[task](twin(loop.x)).mean())


def _two_backward_calls() -> None:
    loop = _dense()
    loop.opt.backward(loop.losses())
    loop.opt.backward(loop.losses())


def _after_the_first_micro_batch(then: Callable[[Loop], object]) -> None:
    loop = _dense()
    loop.opt.backward(loop.losses(), update=False)
    then(loop)


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
    loop.opt.backward(loop.losses())


MISTAKES: list[Callable[[], object]] = [
    lambda: cs.nn.convert_task_batchnorm(nn.LayerNorm(3), AB),
    lambda: Loop(converted=False),
    _optimizer_before_the_conversion,
    lambda: Loop().trunk(torch.ones(8, 3)),
    lambda: Loop().opt.step(print),
    lambda: (o := Loop()).opt.step(lambda task: o.loss(task).expand(2)),
    lambda: (o := Loop()).opt.step(lambda task: o.loss(task).detach()),
    lambda: Loop().opt.step(lambda task: nn.Linear(3, 1)(torch.ones(1, 3)).sum()),
    lambda: _a_copy_of_the_trunk(frozen=True),
    _an_activation_in_between,
    _a_closure_with_a_backward_pass,
    lambda: (o := Loop(schedule=cs.Mixed(3))).opt.step(o.loss),
    lambda: (o := Loop()).opt.backward({"a": o.x.mean() * o.trunk[0].bias.sum()}),
    _two_backward_calls,
    lambda: _after_the_first_micro_batch(lambda loop: loop.sgd.step()),
    lambda: _after_the_first_micro_batch(_a_failed_micro_batch),
]
"""One for each message of the page outside many ranks, in its order."""


def test_every_quoted_message_is_raised_by_its_mistake() -> None:
    quoted = _quoted()[: len(MISTAKES)]
    for mistake, text in zip(MISTAKES, quoted, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((ValueError, TypeError, RuntimeError, UserWarning)) as raised:
                mistake()
        assert _fits(text, str(raised.value)), (text, str(raised.value))
    assert _quoted()[len(MISTAKES)].startswith("process_group= is missing")
