"""Micro-batches: gradients add up, and calls that would lose them are refused."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    GRAMIAN_METHODS,
    TASKS,
    Setup,
    Whole,
    assert_equal,
    assert_same_gradients,
    optimizer_of,
    problem,
    sgd_of,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

PCGRAD_AND_SUM = pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)


@BOTH_PHASES
@pytest.mark.parametrize("method", [cs.Sum(), cs.ConnectionStrength()], ids=repr)
def test_micro_batches_add_up(method: cs.Method, schedule: cs.Schedule) -> None:
    """In evaluation mode, where samples do not interact, two halves equal the whole."""
    results = []
    for parts in (1, 2):
        setup = Setup()
        setup.trunk.eval()

        def loss(rows: Tensor, task: str) -> Tensor:
            x, targets = (of[..., rows, :, :, :] for of in setup.batches[0])
            y = setup.heads[task](setup.trunk(x))
            return (y - targets[TASKS.index(task)]).square().mean() / parts

        closures = [partial(loss, rows) for rows in torch.arange(4).chunk(parts)]
        losses = setup.start(method, schedule).step(closures if parts > 1 else closures[0])
        results.append([*losses.values(), *setup.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("method", [*GRAMIAN_METHODS, cs.GradDrop(0.1), cs.Sum()], ids=repr)
def test_micro_batches_of_backward_add_up(backend: str, method: cs.Method) -> None:
    """Samples do not interact here, so three thirds equal the whole; surgery happens once."""
    whole, thirds = problem(), problem()
    for (model, _, x, targets), parts in ((whole, 1), (thirds, 3)):
        opt = optimizer_of(model, copy.deepcopy(method))
        for n, rows in enumerate(torch.arange(6).chunk(parts), 1):
            z = model.trunk(x[rows])
            errors = {task: model.heads[task](z) - targets[task][rows] for task in AB}
            losses = {task: error.square().mean() / parts for task, error in errors.items()}
            opt.backward(losses, update=n == parts)
            if n < parts:
                waiting = sum(p.grad is not None for p in model.trunk.parameters())
                # Rows wait elsewhere, with a placeholder in one `.grad`.
                assert waiting == (4 if isinstance(method, cs.Sum) else 1)
        assert opt.state_dict()["steps"] == 1
    assert_same_gradients(whole[0], thirds[0], rtol=1e-9)


class Changing(cs.Schedule):
    now = 2

    def phase(self, epoch: int | None, step: int) -> int:
        return self.now


class Loop:
    """A training loop written as letters, one per call."""

    def __init__(self, method: cs.Method, *, several: bool = False) -> None:
        self.model, self.loss, *_ = problem()
        self.schedule = Changing()
        trunk, heads = [self.model.trunk, self.model.unused], [self.model.heads]
        self.sgd = [sgd_of(*of) for of in ([trunk, heads] if several else [[*trunk, *heads]])]
        arguments = AB, copy.deepcopy(method), self.schedule
        self.opt = cs.MultiTaskOptimizer(self.model.trunk, self.sgd, *arguments)

    def losses(self, tasks: str = "ab", factor: float = 1.0) -> dict[str, Tensor]:
        return {task: factor * self.loss(task) for task in tasks}

    def backward(self, *arguments: Any, update: bool = True) -> None:
        self.opt.backward(self.losses(*arguments), update=update)

    def play(self, letters: str) -> "Loop":
        for letter in letters:
            LETTERS[letter](self)
        return self

    def state(self) -> Any:
        """Parameters, gradients, and the losses of the last step."""
        parameters = [*self.model.parameters()]
        losses = self.opt.report().losses if self.opt.state_dict()["steps"] else {}
        return parameters, [None if p.grad is None else p.grad.clone() for p in parameters], losses


def _load_a_part(loop: Loop) -> None:
    with pytest.raises(ValueError, match="complete state_dict"):
        loop.opt.load_state_dict({**loop.opt.state_dict(), "steps": None})


def _fail(loop: Loop) -> None:
    with pytest.raises(TypeError):
        loop.opt.backward(None, update=False)


LETTERS: dict[str, Callable[[Loop], object]] = {
    "L": Loop.backward,
    "w": lambda loop: loop.backward(update=False),
    "a": lambda loop: loop.backward("a"),
    "b": lambda loop: loop.backward("b", update=False),
    "t": lambda loop: loop.backward("ab", 1 / 3, update=False),
    "T": lambda loop: loop.backward("ab", 1 / 3),
    "i": lambda loop: loop.backward("ab", torch.inf),
    "f": _fail,
    "s": lambda loop: [one.step() for one in loop.sgd],
    "S": lambda loop: loop.opt.step(loop.loss),
    "z": lambda loop: [one.zero_grad() for one in loop.sgd],
    "Z": lambda loop: [one.zero_grad(set_to_none=False) for one in loop.sgd],
    "o": lambda loop: sum(loop.losses().values()).backward(),
    "F": lambda loop: loop.model.trunk.requires_grad_(False),
    **{n: lambda loop, n=n: setattr(loop.schedule, "now", int(n)) for n in "123"},
    "r": lambda loop: loop.opt.load_state_dict(loop.opt.state_dict()),
    "R": _load_a_part,
    "c": lambda loop: copy.deepcopy((loop.model, loop.opt)),
    "p": lambda loop: pickle.dumps(loop.opt),
}
LEFT = r"still in \.grad.*update=False"
WAIT = r"update=False\) wait for their update"
REFUSED = {
    # Loops that mistake a second backward for accumulation.
    **dict.fromkeys(("LL", "LS", "wLL", "LsLL"), LEFT),
    **dict.fromkeys(("wS", "w1S"), "step would drop.*update=False"),
    **dict.fromkeys(("ws", "wws"), WAIT),
    **dict.fromkeys(("wc", "wp"), "cannot be copied or pickled"),
    "3S": "schedule must give phase 1 or 2, got 3",
}


@pytest.mark.parametrize("letters", REFUSED)
def test_refused_calls(letters: str) -> None:
    """A refused call changes nothing; the loop can go on once the gradients are dropped."""
    loop = Loop(cs.PCGrad()).play(letters[:-1])
    before = loop.state()
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match=REFUSED[letters]):
            loop.play(letters[-1])
        assert_equal(before, loop.state())
    loop.play("2zLszS")


EQUAL = {
    **dict.fromkeys(("wzL", "wZL", "ba", "wrL", "w1z2L", "wfrL", "wzfL"), "L"),
    **dict.fromkeys(("wRL", "wLc", "w1L"), "wL"),  # An update keeps the phase in which it began.
    **dict.fromkeys(("wr", "wzs"), ""),
    **dict.fromkeys(("FttT", "wzFttT"), "FL"),
    **dict.fromkeys(("LZL", "iL"), "LzL"),  # A scaler skips the step after an overflow.
    **dict.fromkeys(("wzS", "wZS"), "S"),
    # A step cancels the warning about dropped gradients.
    "wfsL": "sL",
    "wfSL": "SL",
    # After `zero_grad` and an optimizer step, plain backward passes may follow.
    "wzsos": "os",
    "wZsoswZS": "osS",
    "FwzsoswzS": "FosS",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "several"),
    [(cs.PCGrad(), False), (cs.PCGrad(), True), (cs.GradDrop(), False), (cs.Sum(), True)],
)
def test_equal_loops(method: cs.Method, several: bool) -> None:
    """Dropping the gradients in `.grad` also drops those that wait elsewhere."""
    for letters, others in EQUAL.items():
        first, second = (Loop(method, several=several).play(x) for x in (letters, others))
        torch.testing.assert_close(first.state(), second.state(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("forgotten", range(3))
def test_one_of_several_optimizers_is_forgotten(forgotten: int) -> None:
    """Only the optimizer of the heads, which surgery leaves out, may skip a step."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(3, 4), nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
    parts = [trunk.weight], [trunk.bias], [*heads.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    opt = cs.MultiTaskOptimizer(trunk, optimizers, AB, cs.PCGrad())

    def backward() -> None:
        y = trunk(torch.randn(8, 3))
        opt.backward({task: heads[task](y).square().mean() for task in AB})

    backward()
    for n, optimizer in enumerate(optimizers):
        if n != forgotten:
            optimizer.step()
    lost = pytest.raises(RuntimeError, match=r"still in \.grad")
    with nullcontext() if forgotten == 2 else lost:
        backward()
    for optimizer in optimizers:
        optimizer.zero_grad()  # Dropped on purpose.
    for _ in range(2):
        backward()
        trunk.weight.grad[0] = torch.nan  # The loop skips all steps because of NaN.


class Old:
    """An optimizer without hooks that writes to `.data`, unseen by version counters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: dict[Any, Any] = {}

    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)


class OldWithHooks(Old, torch.optim.SGD):
    __init__ = torch.optim.SGD.__init__


class WithoutHooks(Old):
    def step(self, closure: None = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1)


def test_an_update_that_one_optimizer_without_hooks_has_not_used() -> None:
    """The parameters' version counters reveal the optimizer's steps."""
    model, loss, *_ = problem()
    optimizer = WithoutHooks([*model.trunk.parameters(), *model.heads.parameters()])
    opt = cs.MultiTaskOptimizer(model.trunk, optimizer, AB, cs.PCGrad())
    for _ in range(2):
        opt.backward({task: loss(task) for task in AB})
        optimizer.step()
    opt.backward({task: loss(task) for task in AB})
    with pytest.raises(RuntimeError, match="the update of the last backward"):
        opt.backward({task: loss(task) for task in AB})


@pytest.mark.parametrize("kind", [Old, OldWithHooks])
def test_an_optimizer_that_writes_behind_versions(kind: Any) -> None:
    """The optimizer's steps cannot be detected, but the loop must be able to continue."""
    model, loss, *_ = problem()
    optimizers = [kind([*model.trunk.parameters()]), sgd_of(model.heads)]
    opt = cs.MultiTaskOptimizer(model.trunk, optimizers, AB, cs.PCGrad())
    for _ in range(3):
        opt.backward({task: loss(task) for task in AB})
        for one in optimizers:
            one.step()


def _freed(loop: Loop) -> dict[str, Tensor]:
    broken = loop.loss("a")
    torch.autograd.grad(broken, [*loop.model.trunk.parameters()])  # Frees its graph.
    return {"a": broken}


@PCGRAD_AND_SUM
@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (_freed, RuntimeError),
        (lambda loop: {"c": loop.loss("a")}, ValueError),
        (lambda loop: {"a": loop.loss("a").detach()}, ValueError),
        (lambda loop: [loop.loss("a")], TypeError),
    ],
    ids=["autograd", "unknown task", "no graph", "no mapping"],
)
def test_a_failed_micro_batch_ends_the_update(
    method: cs.Method, failing: Callable[..., Any], error: type[Exception]
) -> None:
    """Any failure drops the waiting gradients; the next call warns about it, once."""
    loop = Loop(method).play("ww")
    with pytest.raises(error):
        loop.opt.backward(failing(loop), update=False)
    assert all(p.grad is None for p in loop.model.parameters())
    said = rf"{error.__name__} in backward has dropped the gradients of 2 calls"
    with pytest.warns(UserWarning, match=said) as caught:
        loop.opt.backward(loop.losses(), update=False)
    assert [warning.filename for warning in caught] == [__file__]
    torch.testing.assert_close(loop.play("L").state(), Loop(method).play("wL").state())


@PCGRAD_AND_SUM
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.heads.zero_grad(),
        lambda model: nn.utils.clip_grad_norm_(model.heads.parameters(), 1e-3),
        lambda model: model.heads["a"](torch.ones(1, 6).double()).sum().backward(),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: model.trunk[2](torch.ones(1, 8).double()).sum().backward(),
    ],
    ids=["zero_grad of heads", "clipped heads", "backward", "clipped", "backward of a layer"],
)
def test_every_gradient_must_stay_unchanged(
    method: cs.Method, change: Callable[[Whole], object]
) -> None:
    """The heads' gradients must, too, and so must all gradients of methods that keep no rows."""
    loop = Loop(method).play("w")
    change(loop.model)
    match = "must stay unchanged until the update.*clip, unscale or add"
    with pytest.raises(RuntimeError, match=match):
        loop.backward()
    assert all(p.grad is None for p in loop.model.parameters())
    with pytest.warns(UserWarning, match="RuntimeError in backward has dropped the gradients"):
        loop.backward()


def test_an_update_with_sparse_gradients_that_was_not_used() -> None:
    embedding, trunk = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 4)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, embedding), AB, cs.PCGrad())
    for refusal in (nullcontext(), pytest.raises(RuntimeError, match="the last backward")):
        y = trunk(embedding(torch.arange(2)))
        with refusal:
            opt.backward({"a": y.square().mean(), "b": y.mean()})
