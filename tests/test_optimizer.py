"""The training loop: each phase against an independent step, and the events of a long run."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    PRIORITIZED,
    TASKS,
    Setup,
    Trunk,
    assert_equal,
    optimizer_of,
    problem,
    started,
    stem_priority,
)
from plain_training import Batch, PlainTraining, largest_difference
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

SGD = torch.optim.SGD


def _steps(setup: Setup, opt: cs.MultiTaskOptimizer) -> Setup:
    for batch in range(3):
        opt.step(setup.closure(batch))
    return setup


def _independent(setup: Setup, layers: dict[str, str]) -> PlainTraining:
    """A plain loop with other initial weights, which are copied to the trunk."""

    def loss(network: nn.ModuleDict, batch: Batch, task: str) -> Tensor:
        return (network["heads"][task](network["trunk"](batch[0])) - batch[1][task]).square().mean()

    network = nn.ModuleDict({"trunk": Trunk(), "heads": copy.deepcopy(setup.heads)}).double()
    prioritized = {f"trunk.{layer}": f"trunk.{norm}" for layer, norm in layers.items()}
    training = PlainTraining(network, TASKS, loss, torch.optim.Adam, prioritized or None, lr=1e-2)
    for n, (task, of_task) in enumerate(training.networks.items()):
        for name in training.norms:
            norm = of_task.get_submodule(name)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            norm.eps = _whole(setup).get_submodule(name).of(task).eps = 0.1 ** (n + 1)
    _whole(setup).load_state_dict(training.state())
    return training


def _whole(setup: Setup) -> nn.ModuleDict:
    return nn.ModuleDict({"trunk": setup.trunk, "heads": setup.heads})


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.Sum()], ids=repr)
def test_mixed_equals_an_independent_step(backend: str, method: cs.Method) -> None:
    """Five steps of Mixed in both phases, with Adam on a residual network, in float64."""
    setup, opt = started(method, schedule=cs.Mixed(epochs=5, seed=2))
    prioritized = PRIORITIZED if method.prioritizes else {}
    training, phases = _independent(setup, prioritized), set()
    for epoch in range(5):
        opt.start_epoch(epoch)
        phases.add(opt.phase)
        losses = opt.step(setup.closure(epoch))
        assert list(losses) == TASKS
        assert not any(loss.requires_grad for loss in losses.values())
        x, targets = setup.batches[epoch]
        training.step(opt.phase, [(x, dict(zip(TASKS, targets, strict=True)))])
        assert largest_difference(_whole(setup).state_dict(), training.state()) < 1e-10
    assert phases == {1, 2}
    assert dict(opt.coverage().prioritized) == PRIORITIZED
    assert bool(training.conflicts) == method.prioritizes
    assert not method.prioritizes or opt.report().conflicts.any()


@BOTH_PHASES
@pytest.mark.parametrize("method", [cs.Sum, cs.ConnectionStrength])
def test_a_subset_leaves_other_tasks_alone(method: type[cs.Method], schedule: cs.Schedule) -> None:
    """Other tasks' statistics and parameters do not change, even by momentum or weight decay."""
    setup = Setup(optimizer=torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    opt = setup.start(method(), schedule)
    opt.step(setup.closure(0))
    before = copy.deepcopy(_whole(setup).state_dict())
    assert list(opt.step(setup.closure(1), tasks=["edges", "depth"])) == ["edges", "depth"]
    for name, tensor in _whole(setup).state_dict().items():
        assert torch.equal(tensor, before[name]) == ("normals" in name), name


def test_phase1_follows_the_order_of_the_call() -> None:
    states = []
    for order in (["depth", "edges"], ["edges", "depth"]):
        setup, opt = started(schedule=cs.Sequential())
        opt.step(setup.closure(0), tasks=order)
        states.append(setup.trunk.stem.weight.detach())
    assert not torch.equal(*states)


def test_weighting_scales_gradients_not_the_report() -> None:
    plain, weighted = Setup(optimizer=SGD), Setup(optimizer=SGD)
    first = plain.start()
    second = weighted.start(weighting=cs.FixedWeights(dict.fromkeys(TASKS, 2.0)))
    assert first.step(plain.closure(0)) == second.step(weighted.closure(0))
    doubled = [None if p.grad is None else 2 * p.grad for p in plain.parameters()]
    torch.testing.assert_close([p.grad for p in weighted.parameters()], doubled)


def _channels_last(last: bool) -> Setup:
    setup = Setup(optimizer=SGD)
    setup.trunk.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    return _steps(setup, setup.start())


def _one_task(phase1: bool) -> Setup:
    setup = Setup(tasks=["depth"])
    return _steps(setup, setup.start(schedule=cs.Sequential() if phase1 else cs.Joint()))


@pytest.mark.parametrize("train", [_channels_last, _one_task])
def test_equal_trainings(backend: str, train: Callable[[bool], Setup]) -> None:
    """Neither the memory format nor, with one task, the schedule makes a difference."""
    states = [train(other).state() for other in (False, True)]
    torch.testing.assert_close(*states, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("trains", [["bare.weight"], []], ids=["a plain one", "none"])
def test_every_prioritized_layer_is_frozen_later(backend: str, trains: list[str]) -> None:
    setup, opt = started()
    opt.step(setup.closure(0))
    for name in {*PRIORITIZED, *opt.coverage().plain} - set(trains):
        setup.trunk.get_parameter(name).requires_grad_(False)
    before = setup.trunk.bare.weight.detach().clone()
    opt.step(setup.closure(1))
    assert torch.equal(setup.trunk.bare.weight, before) == (not trains)


@BOTH_PHASES
def test_nan_loss_reaches_grad(backend: str, schedule: cs.Schedule) -> None:
    setup = Setup(optimizer=SGD)
    opt = setup.start(schedule=schedule)
    opt.step(lambda task: setup.closure(0)(task) * (float("nan") if task == "edges" else 1.0))
    for name, p in setup.trunk.named_parameters():
        if not any(f".{task}." in name for task in TASKS):
            assert p.grad.isnan().all(), name


@BOTH_PHASES
def test_grad_scaler_skips_an_overflow(schedule: cs.Schedule) -> None:
    setup = Setup(dtype=torch.float32, optimizer=SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = setup.start(schedule=schedule, scaler=scaler)
    before = copy.deepcopy(setup.parameters())
    losses = opt.step(lambda task: setup.closure(0)(task) * float("inf"))
    assert all(loss.isinf() for loss in losses.values())
    assert_equal(before, setup.parameters())
    assert scaler.get_scale() < 8.0
    opt.step(setup.closure(0))
    assert not torch.equal(before[0], setup.parameters()[0])


def test_priority_is_current() -> None:
    """The priority uses the current scales, variances and epsilons."""
    setup, opt = started()
    opt.trace(setup.closure(0))
    norms = [setup.trunk.stem_norm.of(task) for task in TASKS]
    for norm, variance in zip(norms, torch.rand(len(TASKS), 8), strict=True):
        norm.running_var.copy_(variance)
    seen = []
    for eps in (1e-5, 10.0):
        norms[0].eps = eps
        priority = opt.priority()
        assert list(priority) == [name.removesuffix(".weight") for name in PRIORITIZED]
        assert priority["up"].shape == (6,)
        assert torch.equal(priority["stem"], stem_priority(setup))
        seen.append(priority["stem"])
    assert not torch.equal(*seen)


def test_tasks_may_be_any_ordered_iterable() -> None:
    model, loss, *_ = problem()
    for tasks in (dict.fromkeys(AB), dict.fromkeys(AB).keys(), iter(AB), tuple(AB)):
        opt = optimizer_of(model, cs.PCGrad(), tasks=tasks)
        assert opt.tasks == ("a", "b")
        opt.step(loss, tasks=dict.fromkeys(["b"]).keys())


def test_a_frozen_backbone_keeps_its_statistics_until_it_thaws() -> None:
    setup, opt = started()
    frozen = nn.ModuleList([setup.trunk.stem, setup.trunk.stem_norm]).requires_grad_(False).eval()
    before = copy.deepcopy(frozen.state_dict())
    opt.step(setup.closure(0))
    assert_equal(frozen.state_dict(), before)
    assert setup.trunk.stem.weight.grad is None
    setup.trunk.stem.requires_grad_(True)
    opt.step(setup.closure(1))
    assert not torch.equal(setup.trunk.stem.weight, before["0.weight"])
