"""Micro-batches: gradients that add up, and what would lose them."""

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
    flat_grad,
    optimizer_of,
    problem,
    refused,
    sgd_of,
    started_problem,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop


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
        x, targets = x[:6], {task: target[:6] for task, target in targets.items()}
        for n, rows in enumerate(torch.arange(6).chunk(parts)):
            features = model.trunk(x[rows])
            losses = {
                task: (model.heads[task](features) - targets[task][rows]).square().mean() / parts
                for task in AB
            }
            opt.backward(losses, update=n + 1 == parts)
            if n + 1 < parts:
                waiting = sum(p.grad is not None for p in model.trunk.parameters())
                assert waiting == (4 if isinstance(method, cs.Sum) else 1)  # A mark.
        assert opt.state_dict()["steps"] == 1
    assert_same_gradients(whole[0], thirds[0], rtol=1e-9)


def test_micro_batches_of_different_tasks() -> None:
    (model, loss, opt), (twin, other, whole) = (started_problem(cs.PCGrad()) for _ in range(2))
    opt.backward({"b": loss("b")}, update=False)
    opt.backward({"a": loss("a")})
    whole.backward({t: other(t) for t in AB})
    assert_same_gradients(model, twin, rtol=1e-9)


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)
def test_heads_accumulate_on_a_frozen_trunk(method: cs.Method) -> None:
    grads = []
    for parts in (1, 3):
        model, loss, *_ = problem()
        opt = cs.MultiTaskOptimizer(model.trunk, sgd_of(model.trunk, model.heads), AB, method)
        opt.backward({task: loss(task) for task in AB}, update=False)
        opt.optimizer.zero_grad()
        model.trunk.requires_grad_(False)
        for n in range(parts):
            opt.backward({task: loss(task) / parts for task in AB}, update=n + 1 == parts)
        grads.append(flat_grad(model.heads))
    torch.testing.assert_close(*grads)


def test_an_update_that_would_be_lost_is_refused() -> None:
    """A loop that takes a second backward for accumulation."""
    model, loss, opt = started_problem(cs.PCGrad())

    def losses() -> dict[str, Tensor]:
        return {task: loss(task) for task in AB}

    opt.backward(losses())
    for call in (lambda: opt.backward(losses()), lambda: opt.step(loss)):
        with refused(
            lambda: flat_grad(model.trunk), RuntimeError, r"still in \.grad.*update=False"
        ):
            call()
    opt.optimizer.step()
    opt.backward(losses())
    opt.optimizer.zero_grad(set_to_none=False)
    opt.backward(losses())
    opt.optimizer.zero_grad()
    opt.backward({task: value * torch.inf for task, value in losses().items()})
    opt.backward(losses())  # A scaler skips the step of an overflow.
    opt.optimizer.step()
    opt.backward(losses(), update=False)
    with pytest.raises(RuntimeError, match=r"step would forget.*update=False"):
        opt.step(loss)
    opt.backward(losses())


@pytest.mark.parametrize("forgotten", range(3))
def test_one_of_several_optimizers_is_forgotten(forgotten: int) -> None:
    """Only that of the heads, which get no update, may step when it likes."""
    torch.manual_seed(0)
    trunk, heads = nn.Linear(3, 4), nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
    parts = [trunk.weight], [trunk.bias], [*heads.parameters()]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    opt = cs.MultiTaskOptimizer(trunk, optimizers, AB, cs.PCGrad())
    lost = pytest.raises(RuntimeError, match=r"still in \.grad")

    def train() -> None:
        y = trunk(torch.randn(8, 3))
        opt.backward({task: heads[task](y).square().mean() for task in AB})
        for n, optimizer in enumerate(optimizers):
            if n != forgotten:
                optimizer.step()

    train()
    with nullcontext() if forgotten == 2 else lost:
        train()
    if forgotten != 2:
        optimizers[forgotten].zero_grad()  # Dropped on purpose.
    for _ in range(2):
        y = trunk(torch.randn(8, 3))
        opt.backward({task: heads[task](y).square().mean() for task in AB})
        optimizers[0].param_groups[0]["params"][0].grad[0] = torch.nan  # The loop skips all steps.


def test_an_optimizer_without_hooks_that_writes_behind_versions() -> None:
    """Beside another one; it cannot be noticed."""

    class Old:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.param_groups = [{"params": parameters}]
            self.state: dict[Any, Any] = {}

        def step(self) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-0.1)

        def zero_grad(self, set_to_none: bool = True) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = None

    trunk, heads = nn.Linear(3, 4), nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
    sgd, old = sgd_of(heads), Old([*trunk.parameters()])
    opt = cs.MultiTaskOptimizer(trunk, [sgd, old], AB, cs.PCGrad())
    for _ in range(3):
        y = trunk(torch.randn(8, 3))
        opt.backward({task: heads[task](y).square().mean() for task in AB})
        sgd.step()
        old.step()


def test_an_optimizer_that_writes_behind_versions() -> None:
    """Old ones update `.data`."""

    class Old(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for p in model.trunk.parameters():
                p.data.add_(p.grad, alpha=-0.1)

    model, loss, *_ = problem()
    opt = cs.MultiTaskOptimizer(model, Old(model.parameters()), AB, cs.PCGrad())
    for _ in range(2):
        opt.backward({task: loss(task) for task in AB})
        opt.optimizer.step()


def test_an_optimizer_step_before_the_update_is_refused() -> None:
    model, loss, opt = started_problem(cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    with refused(model.state_dict, RuntimeError, r"update=False\) wait for their update"):
        opt.optimizer.step()
    opt.backward({task: loss(task) for task in AB})
    opt.optimizer.step()


def test_an_update_that_phase_1_interrupts() -> None:
    """The phase is that in which it began; an unfinished one can be forgotten."""

    class Changing(cs.Schedule):
        now = 2

        def phase(self, epoch: int | None, step: int) -> int:
            return self.now

    schedule = Changing()
    _, loss, opt = started_problem(cs.PCGrad(), schedule)
    for finish in (True, False):
        schedule.now = 2
        opt.backward({task: loss(task) for task in AB}, update=False)
        schedule.now = 1
        with pytest.raises(RuntimeError, match="step would forget"):
            opt.step(loss)
        if finish:
            opt.backward({task: loss(task) for task in AB})
            opt.optimizer.step()
        else:
            opt.optimizer.zero_grad()
        opt.step(loss)
    schedule.now = 3
    with pytest.raises(ValueError, match="schedule must give phase 1 or 2, got 3"):
        opt.step(loss)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("method", [cs.PCGrad(), cs.GradDrop(), cs.Sum()], ids=repr)
def test_zero_grad_forgets_what_has_added_up(method: cs.Method, set_to_none: bool) -> None:
    """The trunk's gradients too, which wait outside `.grad`."""
    model, loss, *_ = problem()
    twin, other, straight = started_problem(method)
    sgd = [sgd_of(model.trunk, model.unused), sgd_of(model.heads)]
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, method)
    opt.backward({task: loss(task) for task in AB}, update=False)
    for one in sgd:
        one.zero_grad(set_to_none=set_to_none)
    opt.backward({task: loss(task) for task in AB})
    straight.backward({task: other(task) for task in AB})
    assert_same_gradients(model, twin)


def _freed(loss: Callable[[str], Tensor], parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    broken = loss("a")
    torch.autograd.grad(broken, parameters)  # Frees its graph.
    return {"a": broken}


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)
@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (_freed, RuntimeError),
        (lambda loss, _: {"c": loss("a")}, ValueError),
        (lambda loss, _: {"a": loss("a").detach()}, ValueError),
        (lambda loss, _: [loss("a")], TypeError),
    ],
    ids=["autograd", "unknown task", "no graph", "no mapping"],
)
def test_a_failed_micro_batch_ends_the_update(
    method: cs.Method, failing: Callable[..., Any], error: type[Exception]
) -> None:
    """One rule for all causes: what has added up is dropped, and the next call says so, once."""
    model, loss, opt = started_problem(method)
    shared = [*model.trunk.parameters()]
    for _ in range(2):
        opt.backward({task: loss(task) for task in AB}, update=False)
    with pytest.raises(error):
        opt.backward(failing(loss, shared), update=False)
    assert all(p.grad is None for p in model.parameters())
    twin, other, straight = started_problem(method)
    straight.backward({task: other(task) for task in AB})
    said = rf"{error.__name__} in backward has dropped the gradients of 2 calls"
    with pytest.warns(UserWarning, match=said) as caught:
        opt.backward({task: loss(task) for task in AB}, update=False)
    assert [warning.filename for warning in caught] == [__file__]
    opt.optimizer.zero_grad()
    opt.backward({task: loss(task) for task in AB})
    assert_same_gradients(model.trunk, twin.trunk)


@pytest.mark.parametrize(
    "restart",
    [
        lambda opt, loss: opt.step(loss),
        lambda opt, loss: opt.optimizer.step(),
        lambda opt, loss: opt.load_state_dict(opt.state_dict()),
        None,
    ],
    ids=["step", "optimizer.step", "load_state_dict", "none waited"],
)
def test_what_was_dropped_is_not_said_after_a_new_start(
    restart: Callable[..., object] | None,
) -> None:
    (model, loss, opt), (twin, other, straight) = (started_problem(cs.PCGrad()) for _ in range(2))
    opt.backward({task: loss(task) for task in AB}, update=False)
    if not restart:
        opt.optimizer.zero_grad()
    with pytest.raises(TypeError):
        opt.backward(loss, update=False)
    if restart:
        restart(opt, loss)
        restart(straight, other)
    opt.backward({task: loss(task) for task in AB})
    straight.backward({task: other(task) for task in AB})
    assert_same_gradients(model.trunk, twin.trunk)


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)
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
def test_every_gradient_must_stay_as_it_is(
    method: cs.Method, change: Callable[[Whole], object]
) -> None:
    """Also a head's, and with methods that keep no rows."""
    model, loss, *_ = problem()
    opt = cs.MultiTaskOptimizer(
        model.trunk, sgd_of(model.trunk, model.heads), AB, copy.deepcopy(method)
    )
    opt.backward({task: loss(task) for task in AB}, update=False)
    change(model)
    match = "must stay as they are until their update.*clip, unscale, or add"
    with pytest.raises(RuntimeError, match=match):
        opt.backward({task: loss(task) for task in AB})
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(UserWarning, match="RuntimeError in backward has dropped the gradients"):
        opt.backward({task: loss(task) for task in AB})


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_copy_would_lose_gradients_that_wait(copied: Callable[[object], object]) -> None:
    model, loss, opt = started_problem(cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    with pytest.raises(RuntimeError, match="when it is copied or pickled"):
        copied((model, opt))
    opt.backward({task: loss(task) for task in AB})
    copied((model, opt))


def test_a_refused_checkpoint_leaves_micro_batches_alone() -> None:
    updates = []
    for interrupted in (False, True):
        model, loss, opt = started_problem(cs.PCGrad())
        opt.backward({task: loss(task) for task in AB}, update=False)
        if interrupted:
            with pytest.raises(ValueError, match="whole state_dict"):
                opt.load_state_dict({**opt.state_dict(), "steps": None})
        opt.backward({task: loss(task) for task in AB})
        updates.append(flat_grad(model.trunk))
    assert torch.equal(*updates)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("method", [cs.UPGrad(), cs.Sum()], ids=repr)
def test_zero_grad_frees_the_optimizer(method: cs.Method, set_to_none: bool, frozen: bool) -> None:
    """The next optimizer step and the next step of our own begin anew, with their own losses."""

    class Recorded(cs.EqualWeights):
        def observe(self, step: cs.Step) -> None:
            seen.append(dict(step.losses))

    seen: list[dict[str, Tensor]] = []
    model, loss, *_ = problem()
    model.trunk.requires_grad_(not frozen)
    opt = optimizer_of(model, method, weighting=Recorded())
    opt.backward({task: loss(task) for task in AB}, update=False)
    with pytest.raises(RuntimeError, match="wait for their update"):
        opt.optimizer.step()
    opt.optimizer.zero_grad(set_to_none=set_to_none)
    opt.optimizer.step()
    sum(loss(task) for task in AB).backward()
    opt.optimizer.step()
    opt.backward({task: loss(task) for task in AB}, update=False)
    opt.optimizer.zero_grad(set_to_none=set_to_none)
    before = {task: loss(task).detach() for task in AB}
    opt.step(loss)
    assert seen == [before]


def test_a_checkpoint_drops_gradients_that_wait() -> None:
    """Else the next optimizer step would use them, silently."""
    model, loss, opt = started_problem(cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    opt.load_state_dict(opt.state_dict())
    assert all(p.grad is None for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    opt.optimizer.step()
    assert_equal(before, model.state_dict())


def test_an_update_with_sparse_gradients_that_was_not_used() -> None:
    embedding, trunk = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 4)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, embedding), AB, cs.PCGrad())
    for refusal in (nullcontext(), pytest.raises(RuntimeError, match="the last backward")):
        y = trunk(embedding(torch.arange(2)))
        with refusal:
            opt.backward({"a": y.square().mean(), "b": y.mean()})
