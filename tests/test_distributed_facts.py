"""Ranks with different statistics, labels and losses, whose passes reach different parameters."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_networks import (
    METHODS,
    TASKS,
    Network,
    assert_near,
    both_phases,
    conflicting_loss,
    on_ranks,
    optimizer_on_ranks,
    part_of_this_rank,
    whole_copies,
)
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ranks import buckets

pytestmark = pytest.mark.ranks

SEPARATE_OR_SUMMED = pytest.mark.parametrize("method", ["PCGrad", "Sum"])


def _linear() -> tuple[nn.Linear, Callable[[str], Tensor]]:
    trunk, x = nn.Linear(4, 4), torch.randn(6, 4)

    def loss(task: str) -> Tensor:
        return conflicting_loss(trunk(part_of_this_rank(x).to(trunk.weight.dtype)).float(), task)

    return trunk, loss


@SEPARATE_OR_SUMMED
@on_ranks(2, alone={})
def test_a_network_that_is_moved_between_steps(rank: int, method: str) -> list[Tensor]:
    """The move replaces the gradients of the last step."""
    trunk, loss = _linear()
    opt = optimizer_on_ranks(trunk, METHODS[method](), tasks=TASKS[:2])
    for change in (
        lambda: None,
        lambda: trunk.double().float(),
        lambda: setattr(trunk.weight.grad, "data", trunk.weight.grad.data.clone()),
        trunk.double,
    ):
        opt.step(loss)
        change()
    opt.step(loss)
    return whole_copies(trunk.parameters())


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@SEPARATE_OR_SUMMED
@on_ranks(2, alone={})
def test_skipped_layers(rank: int, method: str) -> list[Tensor]:
    """Each rank skips different random layers; a user's hook changes gradients."""
    buckets.BUCKET_BYTES = 100
    trunk = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
    opt = optimizer_on_ranks(trunk, METHODS[method]())
    x, draws = torch.randn(2, 3, 4), torch.rand(10, len(TASKS), 2, 5)

    def loss(step: int, task: str) -> Tensor:
        losses = []
        for r in [rank] if dist.is_initialized() else range(2):
            y = x[r]
            for layer, draw in zip(trunk, draws[step, TASKS.index(task), r], strict=True):
                y = torch.tanh(layer(y)) if draw < 0.6 or layer is trunk[0] else y
            losses.append(conflicting_loss(y, task))
        return torch.stack(losses).mean()

    for step in range(10):
        opt.step(partial(loss, step))
        if step == 4:  # These run after the hooks that the first step registered.
            for parameter in trunk[0].parameters():
                parameter.register_post_accumulate_grad_hook(_halve)
    return whole_copies(trunk.parameters())


@on_ranks(2, alone={})
def test_parameters_that_are_unfrozen(rank: int) -> list[Tensor]:
    """A layer is frozen in the first steps; unfreezing the layer within a step is refused."""
    trunk = nn.ModuleDict({"body": nn.Linear(4, 4), "x": nn.Linear(4, 4)})
    opt = optimizer_on_ranks(trunk, cs.CAGrad(), tasks=TASKS[:2])
    x = part_of_this_rank(torch.randn(6, 4))

    def loss(task: str, train: bool | None = None) -> Tensor:
        if train is not None:
            trunk["x"].requires_grad_(train)
        return conflicting_loss(trunk["x"](trunk["body"](x)), task)

    for train, tasks in ((False, None), (False, None), (True, TASKS[:1]), (True, None)):
        trunk["x"].requires_grad_(train)
        opt.step(loss, tasks=tasks)
    assert opt.coverage().own == {}
    if dist.is_initialized():
        trunk["x"].requires_grad_(False)
        with pytest.raises(RuntimeError, match="must not be unfrozen within a step"):
            opt.step(partial(loss, train=True))
    return whole_copies(trunk.parameters())


@on_ranks(2, alone={})
def test_a_state_is_followed_by_new_passes(rank: int) -> list[Tensor]:
    trunk = nn.ModuleDict({"body": nn.Linear(4, 4), "own": nn.Linear(4, 4)})
    opt, x = optimizer_on_ranks(trunk, cs.PCGrad(), tasks=TASKS[:2]), torch.randn(6, 4)

    def loss(tasks: list[str], task: str) -> Tensor:
        y = trunk["body"](part_of_this_rank(x))
        return conflicting_loss(y + trunk["own"](y) if task in tasks else y, task)

    opt.step(partial(loss, TASKS[1:2]))
    state, owned = copy.deepcopy(opt.state_dict()), []
    for loads in (False, True):
        if loads:
            opt.load_state_dict(state)
            owned.append(opt.coverage().own)
        for _ in range(1 if loads else 3):
            opt.step(partial(loss, TASKS[:2]))
        owned.append(opt.coverage().own)
    assert owned == [{}, {"own.weight": TASKS[1], "own.bias": TASKS[1]}, {}]
    return whole_copies(trunk.parameters())


def _weights(opt: cs.MultiTaskOptimizer, loss: Callable[[str], Tensor], tasks: list[str]) -> Any:
    """Makes some steps; returns their task weights, and the weighting's state."""
    weights = []
    for n in range(4):
        opt.start_epoch(n)
        opt.step(loss, tasks=tasks)
        weights.append(opt.report().task_weights)
    return weights, opt.weighting.state_dict()


@on_ranks(2)
def test_a_rank_without_labels_has_the_dtype_of_losses(rank: int) -> Any:
    trunk, loss = _linear()
    options = {"tasks": TASKS[:2], "weighting": cs.DynamicWeightAverage()}
    opt = optimizer_on_ranks(trunk.bfloat16(), cs.MGDA("loss"), **options)
    return _weights(opt, loss, TASKS[: 2 - rank])


@on_ranks(2, alone={}, rtol=1e-5)
def test_a_rank_without_labels_has_the_factor_of_backward_passes(rank: int) -> Any:
    trunk, x = nn.Linear(4, 4), torch.randn(3, 4)
    options = {"tasks": TASKS[:2], "backward": lambda x, **more: (4 * x).backward(**more)}
    opt = optimizer_on_ranks(trunk, cs.NashMTL(max_norm=0.1), **options)
    tasks = [] if rank else TASKS[:2]
    return _weights(opt, lambda task: conflicting_loss(trunk(x), task), tasks)


@on_ranks(2)
def test_statistics_count_with_the_ranks_that_have_labels(rank: int) -> list[Any]:
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    trunk = nn.Sequential(cs.nn.convert_task_batchnorm(plain, TASKS), nn.BatchNorm1d(6))
    opt, x = optimizer_on_ranks(trunk, lr=0.0), torch.randn(12, 4)

    def loss(task: str) -> Tensor:
        return trunk(part_of_this_rank(x)).square().mean()

    opt.step(loss)
    opt.step(loss, tasks=TASKS if rank == 0 else TASKS[:1])
    found = {name: buffer.clone() for name, buffer in trunk.named_buffers()}
    both = torch.stack([trunk[0][0](of_rank).var(0) for of_rank in x.chunk(2)]).detach()
    for task, of_second in ((TASKS[0], both), (TASKS[1], both[:1])):
        expected = 0.9 * (0.9 + 0.1 * both.mean(0)) + 0.1 * of_second.mean(0)
        assert_near(found[f"0.1.{task}.running_var"], expected)
        assert found[f"0.1.{task}.num_batches_tracked"] == 2
    # The user changes the statistics of a task that the next step leaves out.
    changed = torch.logspace(-3, 3, 6)
    trunk[0][1].of(TASKS[2]).running_var.copy_(changed if rank == 0 else changed.flip(0))
    opt.step(loss, tasks=TASKS[:2])
    priorities = opt.report().priorities
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, opt.priority()["0.0"].tolist())
    assert of_ranks[0] != of_ranks[1]  # `priority` reads the rank's own variances.
    opt.step(loss, tasks=TASKS if rank == 0 else [])
    # Passes per step, averaged over the ranks with labels: 3, 2, 2 and 3.
    assert trunk[1].num_batches_tracked == 10
    return [found, priorities]


@on_ranks(2)
def test_statistics_of_heads(rank: int) -> list[Tensor]:
    trunk, x = nn.Linear(4, 6), torch.randn(12, 4)
    heads = nn.ModuleDict({t: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)) for t in TASKS})
    opt = optimizer_on_ranks(trunk, cs.PCGrad(), heads=[heads], lr=0.0)
    tasks = TASKS[: 3 - rank]  # Rank 1 never runs the last task's head.
    for _ in range(2):
        opt.step(lambda task: heads[task](trunk(part_of_this_rank(x))).square().mean(), tasks=tasks)
    variances = torch.stack([trunk(of_rank).var(0) for of_rank in x.chunk(2)]).detach()
    for task in tasks:
        of_task = variances[:1] if task == TASKS[2] else variances
        assert_near(heads[task][0].running_var, 0.81 + 0.19 * of_task.mean(0))
    return [*heads[TASKS[0]].buffers(), *heads[TASKS[1]].buffers()]


@on_ranks(3)
def test_statistics_are_averaged(rank: int) -> list[Any]:
    """Phase 1 averages statistics, too, so ranks predict alike and save the same checkpoint."""
    network = Network("replicated", rank, 3)
    network.trunk.train()
    opt, found = network.start_phases("ConnectionStrength"), []
    assert opt.phase == 1  # The first task's pass sees the initial weights.
    of_ranks = []
    for part in network.x[0].chunk(3):
        trunk = Network("alone", rank, 3).plain.train()
        with cs.nn.active_task(trunk, TASKS[0]):
            trunk(part)
        of_ranks.append(dict(trunk.named_buffers()))
    for step in range(6):
        opt.step(partial(network.loss, step))
        buffers = dict(network.plain.named_buffers())
        names = [n for n in buffers if step == 0 and f".{TASKS[0]}.running" in n]
        assert len(names) == 10 * (step == 0)
        for name in names:
            assert_near(buffers[name], torch.stack([of[name] for of in of_ranks]).mean(0))
        found.append([opt.priority(), *(buffer.clone() for buffer in buffers.values())])
    return [found, network.state()]


WEIGHTINGS: dict[str, Callable[[], cs.Weighting]] = {
    "dynamic": cs.DynamicWeightAverage,
    "uncertainty": lambda: cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
}


@pytest.mark.each
@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@on_ranks(2, alone={"kind": "alone"}, rtol=1e-5)
def test_weightings_see_the_mean_losses(rank: int, kind: str, name: str) -> list[Any]:
    network, weighting = Network(kind, rank, 2), WEIGHTINGS[name]()
    network.parameters += weighting.parameters()
    opt = network.start(cs.MGDA("loss"), both_phases(), weighting=weighting)
    losses = []
    for step in range(8):
        opt.start_epoch(min(1, step // 2))
        losses.append(opt.step(partial(network.loss, step)))
    return [network.state(), losses, weighting.state_dict()]
