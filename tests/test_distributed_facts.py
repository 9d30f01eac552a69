"""What differs between ranks: statistics, labels, losses, the parameters that a pass reaches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal
from rank_networks import METHODS, TASKS, Network, assert_near, both_phases
from ranks import Ranks
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ranks import buckets, phase2

pytestmark = pytest.mark.ranks


def _linear(rank: int, size: int, **options: Any) -> tuple[nn.Linear, Any, Callable[[str], Tensor]]:
    """A trunk, what builds its MultiTaskOptimizer, and a loss."""
    torch.manual_seed(0)
    trunk = nn.Linear(4, 4)
    x = torch.randn(6, 4)

    def start(method: cs.Method, *arguments: Any, **more: Any) -> cs.MultiTaskOptimizer:
        sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
        given = {} if size == 1 else {"process_group": dist.group.WORLD}
        return cs.MultiTaskOptimizer(trunk, sgd, TASKS[:2], method, *arguments, **given, **more)

    def loss(task: str) -> Tensor:
        y: Tensor = trunk(x.to(trunk.weight.dtype)[rank::size])
        return (y.float() - 1.23 * TASKS.index(task)).square().mean()

    return trunk, start, loss


def _moved(rank: int, size: int, method: str) -> list[Tensor]:
    """The gradients of the last step are replaced when the network is moved."""
    trunk, start, loss = _linear(rank, size)
    opt = start(METHODS[method]())
    for change in (
        lambda: None,
        lambda: trunk.double().float(),
        lambda: setattr(trunk.weight.grad, "data", trunk.weight.grad.data.clone()),
        trunk.double,
    ):
        opt.step(loss)
        change()
    opt.step(loss)
    return [p.detach().clone() for p in trunk.parameters()]


@pytest.mark.parametrize("method", ["PCGrad", "Sum"])
def test_a_network_that_is_moved_between_steps(pools: Callable[[int], Ranks], method: str) -> None:
    first, second = pools(2).run(_moved, 2, method)
    assert_equal(first, second)
    assert_near(first, _moved(0, 1, method))


def _on_one_rank(rank: int, size: int, what: str) -> Any:
    """Rank 1 has no labels for the second task, or for none."""
    trunk, start, loss = _linear(rank, size)
    mine = TASKS[:2] if rank == 0 or size == 1 else TASKS[:1]
    if what == "dtype":
        trunk.bfloat16()
        opt = start(cs.MGDA("loss"), weighting=cs.DynamicWeightAverage())
    elif what == "factor":
        opt = start(cs.NashMTL(max_norm=0.1), backward=lambda x, **k: (4 * x).backward(**k))
        mine = mine if rank == 0 else []
    weights = []
    given = opt.method.weights
    opt.method.weights = lambda *a: weights.append(given(*a)) or weights[-1]
    for n in range(4):
        opt.start_epoch(n)
        opt.step(loss, tasks=mine)
    return weights, opt.weighting.state_dict()


@pytest.mark.parametrize("what", ["dtype", "factor"])
def test_a_rank_without_labels_knows_the_same(pools: Callable[[int], Ranks], what: str) -> None:
    """The type of the losses, and the factor of the backward passes."""
    first, second = pools(2).run(_on_one_rank, 2, what)
    assert_equal(first, second)
    if what == "factor":  # That of one process, which has all labels on rank 0's samples.
        trunk, _, loss = _linear(0, 2)
        sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
        opt = cs.MultiTaskOptimizer(
            trunk, sgd, TASKS[:2], cs.NashMTL(max_norm=0.1),
            backward=lambda x, **k: (4 * x).backward(**k),
        )  # fmt: skip
        weights: list[Tensor] = []
        given = opt.method.weights
        opt.method.weights = lambda *a: weights.append(given(*a)) or weights[-1]
        opt.step(loss)
        torch.testing.assert_close(first[0][0], weights[0], rtol=1e-5, atol=0)


def _statistics_of_some(rank: int, size: int) -> list[Any]:
    """Labels on rank 0 alone; and a task whose statistics change between the steps."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    norm, plain[2] = plain[2], nn.Identity()
    trunk = nn.Sequential(cs.nn.convert_task_batchnorm(plain, TASKS), norm)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.0)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, process_group=dist.group.WORLD)
    x = torch.randn(12, 4)[rank::size]
    opt.step(lambda task: trunk(x).square().mean())
    opt.step(lambda task: trunk(x).square().mean(), tasks=TASKS if rank == 0 else TASKS[:1])
    found = {name: buffer.clone() for name, buffer in trunk.named_buffers()}
    # The user changes those of a task that the next step is not for.
    changed = torch.logspace(-3, 3, 6)
    trunk[0][1].of(TASKS[2]).running_var.copy_(changed if rank == 0 else changed.flip(0))
    seen = []
    given = phase2.task_priorities
    phase2.task_priorities = lambda *a, **k: seen.append(given(*a, **k)) or seen[-1]
    try:
        opt.step(lambda task: trunk(x).square().mean(), tasks=TASKS[:2])
    finally:
        phase2.task_priorities = given
    of_rank = opt.priority()["0.0"]
    return [found, seen[0], of_rank, trunk[0][0](x).detach()]


def test_statistics_count_with_the_ranks_that_have_labels(pools: Callable[[int], Ranks]) -> None:
    (found, *of_first, y), (other, *of_second, z) = pools(2).run(_statistics_of_some, 2)
    assert_equal(found, other)
    assert_equal(of_first[0], of_second[0])
    assert not torch.equal(of_first[1], of_second[1])  # From the ranks' own variances.
    for task, of_second in ((TASKS[0], [y, z]), (TASKS[1], [y])):
        expected = 0.9 + 0.1 * torch.stack([y.var(0), z.var(0)]).mean(0)
        expected = 0.9 * expected + 0.1 * torch.stack([part.var(0) for part in of_second]).mean(0)
        assert_near(found[f"0.1.{task}.running_var"], expected)
        assert found[f"0.1.{task}.num_batches_tracked"] == 2


def _normalized_heads(rank: int, size: int) -> dict[str, Tensor]:
    """Heads with batch normalization; rank 1 never runs that of the last task."""
    torch.manual_seed(0)
    trunk = nn.Linear(4, 6)
    heads = nn.ModuleDict({t: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)) for t in TASKS})
    sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.0)
    group = dist.group.WORLD
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), process_group=group)
    x = torch.randn(12, 4)[rank::size]
    for _ in range(2):
        opt.step(
            lambda task: heads[task](trunk(x)).square().mean(),
            tasks=TASKS if rank == 0 else TASKS[:2],
        )
    found = {name: buffer.clone() for name, buffer in heads.named_buffers()}
    return {**found, "var": trunk(x).var(0).detach()}


def test_statistics_of_heads(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_normalized_heads, 2)
    variances = torch.stack([first.pop("var"), second.pop("var")])
    for name, buffer in first.items():
        if TASKS[2] not in name:  # Rank 1 has never seen that head.
            assert_equal(buffer, second[name])
        if name.endswith("running_var"):
            of_task = variances if TASKS[2] not in name else variances[:1]
            assert_near(buffer, 0.81 + 0.19 * of_task.mean(0))


def _unfrozen_later(rank: int, size: int) -> Any:
    """A parameter that a task has tried to reach while it was frozen, and one unfrozen too late."""
    torch.manual_seed(0)
    trunk = nn.ModuleDict({"body": nn.Linear(4, 4), "x": nn.Linear(4, 4)})
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    given = {} if size == 1 else {"process_group": dist.group.WORLD}
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS[:2], cs.CAGrad(), **given)
    x = torch.randn(6, 4)[rank::size]

    def loss(task: str) -> Tensor:
        return (trunk["x"](trunk["body"](x)) - TASKS.index(task)).square().mean()

    trunk["x"].requires_grad_(False)
    opt.step(loss)
    opt.step(loss)
    trunk["x"].requires_grad_(True)
    opt.step(loss, tasks=TASKS[:1])
    opt.step(loss)
    text = None
    if size > 1:
        trunk["x"].requires_grad_(False)

        def too_late(task: str) -> Tensor:
            trunk["x"].requires_grad_(True)
            return loss(task)

        with pytest.raises(RuntimeError, match="must not be unfrozen within a step"):
            opt.step(too_late)
    return [p.detach().clone() for p in trunk.parameters()], opt.coverage().own, text


def test_parameters_that_are_unfrozen(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_unfrozen_later, 2)
    assert_equal(first[0], second[0])
    expected = _unfrozen_later(0, 1)
    assert_near(first[0], expected[0])
    assert first[1] == second[1] == expected[1] == {}


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def _left_out(rank: int, size: int, method: str) -> list[Tensor]:
    """Layers are skipped at random, on each rank others; a hook of the user changes gradients."""
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(0)
    trunk = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    given = {} if size == 1 else {"process_group": dist.group.WORLD}
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, METHODS[method](), **given)
    x, draws = torch.randn(6, 4), torch.rand(10, len(TASKS), 2, 5)

    def loss(step: int, task: str) -> Tensor:
        losses = []
        for r in range(2) if size == 1 else [rank]:
            y = x[r::2]
            for layer, draw in zip(trunk, draws[step, TASKS.index(task), r], strict=True):
                y = torch.tanh(layer(y)) if draw < 0.6 or layer is trunk[0] else y
            losses.append((y - TASKS.index(task)).square().mean())
        return torch.stack(losses).mean()

    for step in range(10):
        opt.step(partial(loss, step))
        if step == 4:  # Hooks that run after those of the first step.
            for parameter in trunk[0].parameters():
                parameter.register_post_accumulate_grad_hook(_halve)
    return [p.detach().clone() for p in trunk.parameters()]


@pytest.mark.parametrize("method", ["PCGrad", "Sum"])
def test_layers_that_are_left_out(pools: Callable[[int], Ranks], method: str) -> None:
    first, second = pools(2).run(_left_out, 2, method)
    assert_equal(first, second)
    assert_near(first, _left_out(0, 1, method))


def _with_own_statistics(rank: int, size: int) -> list[Any]:
    """In training mode every rank normalizes with the statistics of its own samples."""
    network = Network("replicated", rank, size)
    network.trunk.train()
    opt = network.start(cs.ConnectionStrength(), both_phases())
    opt.start_epoch(1)
    buffers_of_steps, priorities = [], []
    for step in range(6):
        opt.step(partial(network.loss, step))
        buffers_of_steps.append([b.clone() for b in network.plain.buffers()])
        priorities.append(opt.priority())
    return [network.state(), buffers_of_steps, priorities]


def test_statistics_are_averaged(pools: Callable[[int], Ranks]) -> None:
    """Also in Phase 1, so that every rank predicts alike and saves the same checkpoint."""
    first, *others = pools(3).run(_with_own_statistics, 3)
    for other in others:
        assert_equal(other, first)
    # The first task of the first step, of Phase 1, sees the first weights.
    assert cs.Mixed(2, seed=3, draw="step").phase(1, 0) == 1
    before = Network("alone", 0, 3)
    after: list[dict[str, Tensor]] = []
    for part in before.x[0].chunk(3):
        of_rank = Network("alone", 0, 3)
        of_rank.trunk.train()
        with cs.nn.active_task(of_rank.plain, TASKS[0]):
            of_rank.trunk(part)
        after.append(dict(of_rank.plain.named_buffers()))
    averages = 0
    for name, found in zip(after[0], first[1][0], strict=True):
        if f".{TASKS[0]}.running" in name:
            assert_near(found, torch.stack([of_rank[name] for of_rank in after]).mean(0))
            averages += 1
    assert averages == 10


def _weighted(rank: int, size: int, kind: str, weighting: str) -> list[Any]:
    network = Network(kind, rank, size)
    made: cs.Weighting = {
        "dynamic": cs.DynamicWeightAverage,
        "uncertainty": lambda: cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
    }[weighting]()
    network.parameters += made.parameters()
    opt = network.start(cs.MGDA("loss"), both_phases(), weighting=made)
    losses = []
    for step in range(8):
        opt.start_epoch(min(1, step // 2))
        losses.append(opt.step(partial(network.loss, step)))
    return [network.state(), losses, made.state_dict()]


@pytest.mark.parametrize("weighting", ["dynamic", "uncertainty"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_weightings_see_the_mean_losses(
    pools: Callable[[int], Ranks], kind: str, weighting: str
) -> None:
    first, *others = pools(2).run(_weighted, 2, kind, weighting)
    for other in others:
        assert_equal(other, first)
    expected = _weighted(0, 2, "alone", weighting)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)


def _priorities(rank: int, size: int, kind: str) -> dict[str, Tensor]:
    network = Network(kind, rank, size)
    opt = network.start(cs.ConnectionStrength())
    coverage = opt.trace(partial(network.loss, 0))
    assert len(coverage.prioritized) == 5
    return opt.priority()


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_priorities_are_those_of_one_process(pools: Callable[[int], Ranks], kind: str) -> None:
    expected = _priorities(0, 3, "alone")
    assert len({int(p) for of_layer in expected.values() for p in of_layer}) == 3
    for found in pools(3).run(_priorities, 3, kind):
        assert_equal(found, expected)
