"""A step that fails leaves everything as it was."""

import copy

import pytest
import torch
from networks import BOTH_PHASES, TASKS, Setup, assert_equal
from torch import Tensor, nn

import cs_kernels as cs


class HeadWithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 1, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # Another tensor, not the same one changed.
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("warm", [False, True])
@BOTH_PHASES
def test_statistics_of_heads_are_restored(schedule: cs.Schedule, warm: bool) -> None:
    setup = Setup()
    setup.heads = nn.ModuleDict({task: HeadWithStatistics() for task in TASKS}).double()
    adam = torch.optim.Adam([*setup.trunk.parameters(), *setup.heads.parameters()])
    opt = cs.MultiTaskOptimizer(setup.trunk, adam, TASKS, schedule=schedule)
    if warm:
        opt.step(setup.closure(0))
    failing = TASKS[0] if isinstance(schedule, cs.Sequential) else TASKS[-1]
    before = copy.deepcopy([setup.trunk.state_dict(), setup.heads.state_dict()])

    def fails(task: str) -> Tensor:
        loss = setup.closure(1)(task)
        if task == failing:
            raise KeyError(task)
        return loss

    with pytest.raises(KeyError):
        opt.step(fails)
    for ours, expected in zip([setup.trunk, setup.heads], before, strict=True):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    opt.trace(setup.closure(1))
    for name, tensor in setup.heads.state_dict().items():
        assert torch.equal(tensor, before[1][name]), name


def test_an_expanded_buffer() -> None:
    setup = Setup()
    setup.trunk.register_buffer("table", torch.ones(1, 3).expand(8, 3))
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    opt.trace(setup.closure(0))
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: setup.closure(0)(task) / (1 // 0))
    opt.step(setup.closure(0))


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer() -> None:
    setup = Setup()
    setup.trunk.register_buffer("graph", torch.eye(3).to_sparse_csr())
    setup.trunk.register_buffer("other_graph", torch.eye(3).to_sparse_coo())
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: setup.closure(0)(task) / (1 // 0))
    opt.step(setup.closure(0))


def test_statistics_of_another_size_or_type_between_steps() -> None:
    """A failing step restores their current size and type, not earlier ones."""
    setup = Setup(optimizer=torch.optim.SGD)
    setup.trunk.register_buffer("seen", torch.zeros(2))
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    opt.step(setup.closure(0))
    setup.trunk.seen.resize_(4).fill_(1)
    mean = setup.trunk.stem_norm.depth.running_mean
    mean.data = mean.data.double() + 1e-9
    before = mean.clone()

    def fails(task: str) -> Tensor:
        setup.trunk.seen.zero_()
        mean.zero_()
        raise KeyError(task)

    with pytest.raises(KeyError):
        opt.step(fails)
    assert setup.trunk.seen.eq(1).all()
    assert torch.equal(mean, before)


def test_snapshots_do_not_pile_up() -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    for tasks in (TASKS, TASKS[::-1], TASKS[:2], TASKS[1:], TASKS[:1], TASKS[2:], TASKS[1::-1]):
        opt.step(setup.closure(0), tasks=tasks)
    assert len(opt._statistics._snapshots) == len(TASKS) + 1


@BOTH_PHASES
def test_an_optimizer_step_that_fails(schedule: cs.Schedule) -> None:
    """For example, it runs out of memory for its first state."""
    setup = Setup()

    def fails(*_: object) -> None:
        raise MemoryError

    hook = setup.optimizer.register_step_pre_hook(fails)
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)
    before = setup.state()
    with pytest.raises(MemoryError):
        opt.step(setup.closure(0))
    assert_equal(before, setup.state())
    assert opt.state_dict()["steps"] == 0
    hook.remove()
    opt.step(setup.closure(0))
