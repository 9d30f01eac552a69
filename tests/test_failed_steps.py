"""A failed step leaves everything unchanged."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from networks import (
    BOTH_PHASES,
    TASKS,
    Setup,
    assert_equal,
    refused,
    sgd_of,
    started,
    stem_priority,
)
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.trunk.statistics import RunningStatistics

pytestmark = pytest.mark.loop


class HeadWithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 1, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # A new tensor, not an in-place change.
        result: Tensor = self.layers(x)
        return result


def failing_in(
    setup: Setup, failing: str = TASKS[0], change: Callable[[], object] = lambda: None
) -> Callable[[str], Tensor]:
    """A closure that raises in the pass of a task, after a change."""

    def closure(task: str) -> Tensor:
        loss = setup.closure(1)(task)
        if task == failing:
            change()
            raise KeyError(task)
        return loss

    return closure


def buffers_of(setup: Setup) -> Callable[[], dict[str, Tensor]]:
    return lambda: dict(setup.trunk.named_buffers())


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@BOTH_PHASES
def test_statistics_of_heads_are_restored(schedule: cs.Schedule, warm: bool, shared: bool) -> None:
    """A shared head's buffers are copied before each task's pass; the first copy is restored."""
    setup = Setup()
    head = HeadWithStatistics()
    heads = {task: head if shared else HeadWithStatistics() for task in TASKS}
    setup.heads = nn.ModuleDict(heads).double()
    setup.optimizer = torch.optim.Adam(setup.parameters())
    opt = setup.start(schedule=schedule)
    if warm:
        opt.step(setup.closure(0))
    failing = TASKS[0] if isinstance(schedule, cs.Sequential) else TASKS[-1]

    def states() -> list[dict[str, Tensor]]:
        return [setup.trunk.state_dict(), setup.heads.state_dict()]

    before = copy.deepcopy(states())
    with refused(states, KeyError, failing):
        opt.step(failing_in(setup, failing))
    opt.trace(setup.closure(1))
    assert_equal(states(), before)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:1].expand(8, 3), Tensor.to_sparse_csr, Tensor.to_sparse_coo],
    ids=["expanded", "sparse_csr", "sparse_coo"],
)
def test_buffers_that_are_not_dense(change: Callable[[Tensor], Tensor]) -> None:
    setup = Setup()
    setup.trunk.register_buffer("buffer", change(torch.eye(3)))
    opt = setup.start()
    opt.trace(setup.closure(0))
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: setup.closure(0)(task) / (1 // 0))
    opt.step(setup.closure(0))


def _retyped(buffer: Tensor) -> None:
    buffer.data = buffer.data.double() + 1e-9


def _bigger(buffer: Tensor) -> None:
    buffer.data = torch.cat([buffer.data, buffer.data])


BETWEEN: dict[str, Callable[[nn.Module], object]] = {
    "same": lambda trunk: trunk.seen.add_(1),
    "size": lambda trunk: trunk.seen.resize_(7).fill_(1),
    "type": lambda trunk: _retyped(trunk.seen),
    "shared": lambda trunk: trunk.bare.register_buffer("seen", trunk.seen),
    "renamed": lambda trunk: trunk.register_buffer("found", trunk._buffers.pop("seen")),
    "absent": lambda trunk: setattr(trunk, "seen", None),
    "large": lambda trunk: setattr(trunk, "seen", torch.ones(1 << 15)),
    "every second": lambda trunk: setattr(trunk, "seen", torch.ones(8)[::2]),
    "another": lambda trunk: trunk.register_buffer("other", torch.ones(3, dtype=torch.bool)),
    "conj": lambda trunk: setattr(trunk, "seen", torch.ones(4, dtype=torch.complex128).conj()),
    "neg": lambda trunk: setattr(trunk, "seen", torch._neg_view(torch.ones(4))),
}
IN_STEP: dict[str, Callable[[nn.Module], object]] = {
    "zeros": lambda trunk: [buffer.zero_() for buffer in trunk.buffers()],
    "resized": lambda trunk: trunk.seen.resize_(7),
    "retyped": lambda trunk: _retyped(trunk.seen),
    "rebound": lambda trunk: _bigger(trunk.seen),
}


@pytest.mark.parametrize(
    ("between", "inside"),
    [*((name, "zeros") for name in BETWEEN), *(("same", name) for name in IN_STEP)],
)
def test_buffers_that_change(between: str, inside: str) -> None:
    """A failed step restores all buffers: their values, names and identities."""
    setup, opt = started()
    setup.trunk.register_buffer("seen", torch.arange(4.0))
    opt.step(setup.closure(0))
    BETWEEN[between](setup.trunk)
    before = {name: id(buffer) for name, buffer in setup.trunk.named_buffers()}
    for _ in range(2):
        with refused(buffers_of(setup), KeyError, TASKS[0]):
            opt.step(failing_in(setup, change=lambda: IN_STEP[inside](setup.trunk)))
        assert {name: id(buffer) for name, buffer in setup.trunk.named_buffers()} == before
    opt.trace(setup.closure(0))
    opt.step(setup.closure(0))


def test_statistics_that_exchange_their_sizes() -> None:
    """Two tensors exchange their sizes, so their total number of elements does not change."""
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(5))
    statistics = RunningStatistics(norms)
    with statistics.restored_on_error([], always=True):
        pass
    for norm, size in zip(norms, (5, 3), strict=True):
        norm.running_mean.data = torch.full((size,), float(size))
    with statistics.restored_on_error([], always=True):
        for norm in norms:
            norm.running_mean.zero_()
    assert [norm.running_mean.tolist() for norm in norms] == [[5.0] * 5, [3.0] * 3]


def test_a_normalization_that_is_replaced() -> None:
    """The new normalization's statistics and epsilon are used, although its parameters are old."""
    setup, opt = started()
    opt.step(setup.closure(0))
    old, new = setup.trunk.stem_norm.depth, nn.BatchNorm2d(8, eps=0.5).double()
    new.weight, new.bias = old.weight, old.bias
    new.running_var.uniform_(1, 9)
    setup.trunk.stem_norm.depth = new
    assert torch.equal(opt.priority()["stem"], stem_priority(setup))
    with refused(buffers_of(setup), KeyError, TASKS[0]):
        opt.step(failing_in(setup))
    opt.step(setup.closure(0))
    norms = {norm for layer in opt._engine.trunk.layout().layers for norm in layer.norms}
    assert new in norms
    assert old not in norms


def test_a_normalization_that_is_added_to_an_empty_module() -> None:
    """The new normalization's statistics are restored if the next step fails."""
    trunk, x = nn.Sequential(nn.Linear(3, 4), nn.Sequential()), torch.randn(8, 3)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk), TASKS, cs.PCGrad())
    opt.step(lambda task: trunk(x).square().mean())
    trunk[1].append(nn.BatchNorm1d(4, affine=False))
    with refused(lambda: dict(trunk.named_buffers()), ZeroDivisionError, "by zero"):
        opt.step(lambda task: trunk(x).square().mean() * (1 // 0))
    opt.step(lambda task: trunk(x).square().mean())


def test_snapshots_do_not_pile_up() -> None:
    setup, opt = started()
    for tasks in (TASKS, TASKS[::-1], TASKS[:2], TASKS[1:], TASKS[:1], TASKS[2:], TASKS[1::-1]):
        opt.step(setup.closure(0), tasks=tasks)
    assert len(opt._engine.trunk.statistics._snapshots) == len(TASKS) + 1


def test_phase_1_keeps_the_updates_of_earlier_tasks() -> None:
    """Each task's update is a separate step; a note on the error names the updated tasks."""
    (setup, opt), (twin, other) = (started(schedule=cs.Sequential()) for _ in range(2))
    with pytest.raises(KeyError) as caught:
        opt.step(failing_in(setup, TASKS[2]))
    other.step(twin.closure(1), tasks=TASKS[:2])
    assert_equal(setup.state(grads=False), twin.state(grads=False))
    assert all(p.grad is None for p in setup.parameters())
    said = f"in Phase 1, the updates of {TASKS[:2]} have been made"
    assert caught.value.__notes__ == [said]
    # A mistake in the first task's pass, or one that shows without a pass, prevents all updates.
    for call in (
        lambda: opt.step(lambda task: setup.closure(0)(task).detach()),
        lambda: opt.step([setup.closure(0), None]),
        lambda: opt.step(setup.closure(0), tasks=[TASKS[0], "flow"]),
    ):
        with refused(partial(setup.state, False), (TypeError, ValueError), "closure|tasks"):
            call()


@BOTH_PHASES
def test_an_optimizer_step_that_fails(schedule: cs.Schedule) -> None:
    """The optimizer may run out of memory for its state, for example."""
    setup = Setup()

    def fails(*_: object) -> None:
        raise MemoryError("for the state")

    hook = setup.optimizer.register_step_pre_hook(fails)
    opt = setup.start(schedule=schedule)
    with refused(setup.state, MemoryError, "for the state"):
        opt.step(setup.closure(0))
    assert opt.state_dict()["steps"] == 0
    hook.remove()
    opt.step(setup.closure(0))
