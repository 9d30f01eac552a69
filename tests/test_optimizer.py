"""The training loop: each phase against an independent step, and the events of a long run."""

import copy

import pytest
import torch
from layers import Kind
from networks import (
    AB,
    BOTH_PHASES,
    PRIORITIZED,
    TASKS,
    Setup,
    assert_equal,
    assert_same_gradients,
    optimizer_of,
    problem,
    projected_update,
    started,
    stem_priority,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

METHODS = [cs.Sum, cs.ConnectionStrength]


def _grads_of(
    setup: Setup, batch: int, task: str, parameters: list[nn.Parameter]
) -> tuple[Tensor, ...]:
    for norm in cs.nn.task_norms(setup.trunk):
        norm.active = task
    return torch.autograd.grad(setup.closure(batch)(task), parameters)


def _independent_phase2(setup: Setup, batch: int) -> None:
    """A joint step with torch.autograd.grad and the paper's formulas, nothing of the package."""
    norm_names = set(PRIORITIZED.values())
    shared = {
        n: p
        for n, p in setup.trunk.named_parameters()
        if not any(n.startswith(f"{norm}.") for norm in norm_names)
    }
    grads: dict[str, list[Tensor]] = {name: [] for name in shared}
    for task in TASKS:
        norms = [setup.trunk.get_submodule(norm) for norm in norm_names]
        own = [p for norm in norms for p in norm.of(task).parameters()]
        own += setup.heads[task].parameters()
        results = _grads_of(setup, batch, task, [*shared.values(), *own])
        for name, grad in zip(shared, results, strict=False):
            grads[name].append(grad)
        for p, grad in zip(own, results[len(shared) :], strict=True):
            p.grad = grad
    for name, p in shared.items():
        if name not in PRIORITIZED:
            p.grad = sum(grads[name][1:], grads[name][0])
            continue
        kind = Kind(name, tuple(p.shape), int(name == "up.weight"))
        norm = setup.trunk.get_submodule(PRIORITIZED[name])
        p.grad = projected_update(p.detach(), norm, grads[name], kind)
    setup.optimizer.step()


def _independent_phase1(setup: Setup, batch: int) -> None:
    for task in TASKS:
        own = [
            p
            for n, p in [*setup.trunk.named_parameters(), *setup.heads.named_parameters()]
            if not any(f".{other}." in f".{n}" for other in TASKS if other != task)
        ]
        setup.optimizer.zero_grad()
        for p, grad in zip(own, _grads_of(setup, batch, task, own), strict=True):
            p.grad = grad
        setup.optimizer.step()


def _steps(setup: Setup, opt: cs.MultiTaskOptimizer) -> None:
    for batch in range(3):
        opt.step(setup.closure(batch))


def test_mixed_equals_an_independent_step(backend: str) -> None:
    """Five steps of Mixed in both phases, with Adam on a residual network, in float64."""
    (ours, opt), theirs = started(schedule=cs.Mixed(epochs=5, seed=2)), Setup()
    phases = []
    for epoch in range(5):
        opt.start_epoch(epoch)
        phases.append(opt.phase)
        losses = opt.step(ours.closure(epoch))
        assert list(losses) == TASKS
        assert all(not loss.requires_grad for loss in losses.values())
        (_independent_phase1 if opt.phase == 1 else _independent_phase2)(theirs, epoch)
        torch.testing.assert_close(ours.state(), theirs.state(), rtol=1e-10, atol=1e-12)
    assert {1, 2} == set(phases)
    assert dict(opt.coverage().prioritized) == PRIORITIZED
    assert opt.report().conflicts.any()


def test_sum_is_the_gradient_of_the_sum() -> None:
    (setup, opt), fresh = started(cs.Sum()), Setup()
    opt.step(setup.closure(0))
    for task in TASKS:
        with cs.nn.active_task(fresh.trunk, task):
            fresh.closure(0)(task).backward()
    assert_same_gradients(setup.trunk, fresh.trunk, rtol=1e-7)


@BOTH_PHASES
@pytest.mark.parametrize("method", METHODS)
def test_a_subset_leaves_other_tasks_alone(method: type[cs.Method], schedule: cs.Schedule) -> None:
    """Not by momentum or weight decay either, nor their statistics."""
    setup = Setup(optimizer=torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    opt = setup.start(method(), schedule)
    opt.step(setup.closure(0))
    before = copy.deepcopy({**setup.trunk.state_dict(), **setup.heads.state_dict()})
    losses = opt.step(setup.closure(1), tasks=["edges", "depth"])
    assert list(losses) == ["edges", "depth"]
    after = {**setup.trunk.state_dict(), **setup.heads.state_dict()}
    for name, tensor in after.items():
        same = torch.equal(tensor, before[name])
        assert same == ("normals" in name), name


def test_phase1_order_is_that_of_the_call() -> None:
    states = []
    for order in (["depth", "edges"], ["edges", "depth"]):
        setup, opt = started(schedule=cs.Sequential())
        opt.step(setup.closure(0), tasks=order)
        states.append(setup.trunk.stem.weight.detach().clone())
    assert not torch.equal(states[0], states[1])


def test_weighting_scales_gradients_not_the_report() -> None:
    plain, weighted = Setup(optimizer=torch.optim.SGD), Setup(optimizer=torch.optim.SGD)
    weights = cs.FixedWeights(dict.fromkeys(TASKS, 2.0))
    first, second = plain.start(), weighted.start(weighting=weights)
    assert first.step(plain.closure(0)) == second.step(weighted.closure(0))
    doubled = [None if p.grad is None else 2 * p.grad for p in plain.parameters()]
    torch.testing.assert_close([p.grad for p in weighted.parameters()], doubled)


def test_one_task(backend: str) -> None:
    """K = 1: every schedule is plain training."""
    states = []
    for schedule in (cs.Joint(), cs.Sequential()):
        setup = Setup(tasks=["depth"])
        _steps(setup, setup.start(schedule=schedule))
        states.append(setup.state())
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("kept", [["bare.weight"], []], ids=["a plain one", "none"])
def test_every_prioritized_layer_is_frozen_later(backend: str, kept: list[str]) -> None:
    setup, opt = started()
    opt.step(setup.closure(0))
    parameters = dict(setup.trunk.named_parameters())
    for name in {*PRIORITIZED, *opt.coverage().plain} - set(kept):
        parameters[name].requires_grad_(False)
    before = parameters["bare.weight"].detach().clone()
    opt.step(setup.closure(1))
    assert torch.equal(parameters["bare.weight"], before) == (not kept)


@BOTH_PHASES
def test_nan_loss_reaches_grad(backend: str, schedule: cs.Schedule) -> None:
    setup = Setup(optimizer=torch.optim.SGD)
    opt = setup.start(schedule=schedule)
    opt.step(lambda task: setup.closure(0)(task) * (float("nan") if task == "edges" else 1.0))
    for name, p in setup.trunk.named_parameters():
        if not any(f".{task}." in name for task in TASKS):
            assert p.grad.isnan().all(), name


def test_channels_last_network(backend: str) -> None:
    states = []
    for memory in (torch.contiguous_format, torch.channels_last):
        setup = Setup(optimizer=torch.optim.SGD)
        setup.trunk.to(memory_format=memory)
        _steps(setup, setup.start())
        states.append(setup.parameters())
    torch.testing.assert_close(*states, rtol=1e-8, atol=1e-10)


@BOTH_PHASES
def test_grad_scaler_skips_an_overflow(schedule: cs.Schedule) -> None:
    setup = Setup(dtype=torch.float32, optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = setup.start(schedule=schedule, scaler=scaler)
    before = [p.detach().clone() for p in setup.parameters()]
    losses = opt.step(lambda task: setup.closure(0)(task) * float("inf"))
    assert all(loss.isinf() for loss in losses.values())
    assert_equal(before, [p.detach() for p in setup.parameters()])
    assert scaler.get_scale() < 8.0
    opt.step(setup.closure(0))
    assert not torch.equal(before[0], setup.parameters()[0])


def test_clipping_before_the_step() -> None:
    """A hook of the wrapped optimizer sees the finished update."""
    setup, opt = started()
    norms = []
    setup.optimizer.register_step_pre_hook(
        lambda *_: norms.append(nn.utils.clip_grad_norm_(setup.parameters(), 1e-3))
    )
    opt.step(setup.closure(0))
    clipped = torch.cat([p.grad.flatten() for p in setup.parameters()]).norm()
    assert norms[0] > 1e-3
    torch.testing.assert_close(clipped, torch.tensor(1e-3, dtype=torch.float64), rtol=1e-2, atol=0)


def test_priority_is_that_of_the_step() -> None:
    """With the scales, variances and epsilons of now."""
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


def test_tasks_of_anything_that_has_an_order() -> None:
    model, loss, *_ = problem()
    for tasks in (dict.fromkeys(AB), dict.fromkeys(AB).keys(), iter(AB), tuple(AB)):
        opt = optimizer_of(model, cs.PCGrad(), tasks=tasks)
        assert opt.tasks == ("a", "b")
        opt.step(loss, tasks=dict.fromkeys(["b"]).keys())


def test_a_frozen_backbone_keeps_its_statistics_until_it_thaws() -> None:
    setup, opt = started()
    parts = setup.trunk.stem, setup.trunk.stem_norm
    for part in parts:
        part.requires_grad_(False).eval()
    before = copy.deepcopy([part.state_dict() for part in parts])
    opt.step(setup.closure(0))
    assert_equal([part.state_dict() for part in parts], before)
    assert setup.trunk.stem.weight.grad is None
    setup.trunk.stem.requires_grad_(True)
    opt.step(setup.closure(1))
    assert not torch.equal(setup.trunk.stem.weight, before[0]["weight"])
