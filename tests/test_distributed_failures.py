"""A failure on one rank ends the step on all, with an error that names the cause."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal, refused, sgd_of
from rank_networks import (
    TASKS,
    BrokenError,
    Dense,
    Network,
    conflicting_loss,
    distributed,
    on_ranks,
    optimizer_on_ranks,
    part_of_this_rank,
    shard,
    trained,
    whole_copies,
)
from ranks import DEVICE, TIMEOUT, Pools, Ranks
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ranks import buckets, transport
from cs_kernels.ranks.strategy import RankError

pytestmark = pytest.mark.ranks


def _error_of_rank_1(rank: int, text: str) -> AbstractContextManager[Any]:
    if rank == 1:
        return pytest.raises(BrokenError, match=f"^{text}")
    return pytest.raises(RankError, match=rf"^rank 1 failed in step \d+: BrokenError: {text}")


def _with_a_failing_rank(rank: int, size: int, method: str) -> list[list[Tensor]]:
    """Rank 1 fails in the second task of a step; all ranks raise, and Phase 2 changes nothing."""
    network = Network("replicated", rank, size)
    network.trunk.train()
    opt = network.start_phases(method)
    phases = set()

    def fails(task: str) -> Tensor:
        if rank == 1 and task == "normals":
            raise BrokenError("no labels")
        return network.loss(step, task)

    for step in range(6):
        opt.step(partial(network.loss, step))
        state = copy.deepcopy([*network.parameters, *network.plain.buffers()])
        phase = opt.phase
        phases.add(phase)
        with _error_of_rank_1(rank, "no labels"):
            opt.step(fails)
        if phase == 2:  # In Phase 1, the first task has been updated.
            assert_equal([*network.parameters, *network.plain.buffers()], state)
        assert all(p.grad is None for p in network.parameters)
    assert phases == {1, 2}
    return [network.state(), [*network.plain.buffers()][1:2]]


@pytest.mark.parametrize("method", ["ConnectionStrength", "Sum"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_failing_rank_ends_the_step_of_all(pools: Pools, size: int, method: str) -> None:
    """After the failure, all ranks make steps again."""
    first, failed, *others = pools(size).run(_with_a_failing_rank, size, method)
    assert_equal(failed[0], first[0])
    for other in others:
        assert_equal(other, first)


def _with_a_failing_shard(rank: int, size: int) -> None:
    """Rank 0 waits in a collective of `fully_shard` until the timeout."""
    from torch.distributed.fsdp import fully_shard

    group = dist.new_group(range(size), timeout=TIMEOUT)
    network = Dense()
    fully_shard(network, mesh=dist.DeviceMesh.from_group(group, DEVICE))
    before = whole_copies(network.parameters())
    opt = optimizer_on_ranks(network, cs.PCGrad(), process_group=None)

    def loss(task: str) -> Tensor:
        if rank == 1 and task == "normals":
            raise BrokenError("no labels")
        if task == "normals":  # From here on, this rank waits in vain.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        return network(torch.ones(3, 5), task)

    with _error_of_rank_1(rank, "no labels"):
        opt.step(loss)
    shards = [p.to_local() for p in network.parameters()]
    assert_equal(shards, [p.chunk(size)[rank] for p in before])


def _with_a_slow_rank(rank: int, size: int) -> None:
    """The errors on both ranks name the step and the rank that timed out."""
    group = dist.new_group(range(size), timeout=timedelta(seconds=1))
    network, x = Dense(), torch.ones(3, 5)
    opt = optimizer_on_ranks(network, cs.PCGrad(), process_group=group)
    opt.step(partial(network, x))
    waited = (
        "rank 0 timed out while it waited for another rank in step 1: a rank has ended, or has not"
    )
    message = f"^{waited}" if rank == 0 else f"^rank 0 failed in step 1: RankError: {waited}"
    with pytest.raises(RankError, match=message):
        opt.step(lambda task: time.sleep(3 * rank) or network(x, task))


def _without_memory_for_a_bucket(rank: int, size: int) -> None:
    """Rank 0 waits for rank 1's bucket until the timeout."""
    group = dist.new_group(range(size), timeout=timedelta(seconds=1))
    network, x = Dense(), torch.ones(3, 5)
    opt = optimizer_on_ranks(network, cs.PCGrad(), process_group=group)
    failing: dict[str, Any] = {"__name__": buckets.__name__, "torch": torch}
    exec("def new_parts(self):\n    raise torch.OutOfMemoryError('no memory')", failing)
    if rank == 1:
        buckets.Buckets.new_parts = failing["new_parts"]
    with pytest.raises(RankError if rank == 0 else torch.OutOfMemoryError):
        opt.step(partial(network, x))


@pytest.mark.skipif(
    DEVICE != "cpu", reason="NCCL's watchdog ends a process that has waited for its timeout"
)
@pytest.mark.parametrize(
    "run", [_with_a_failing_shard, _with_a_slow_rank, _without_memory_for_a_bucket]
)
def test_a_rank_is_named_after_the_timeout(run: Callable[[int, int], None]) -> None:
    """The test starts its own processes, because the timeout breaks their connections."""
    ranks = Ranks(2)
    ranks.run(run, 2)
    ranks.stop()


@on_ranks(4, alone={})
def test_messages_on_a_grid(rank: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two rows of two ranks; by default, only large groups have a grid."""
    assert [transport.grid_rows(size) for size in (15, 16, 17, 512)] == [1, 4, 1, 16]
    with mock.patch.object(transport, "_GRID_FROM", 2):
        assert transport.grid_rows(4) == 2
        if not dist.is_initialized():
            return trained(rank, 4, "alone", "PCGrad")
        _with_a_failing_rank(rank, 4, "Sum")
        return trained(rank, 4, "replicated", "PCGrad")


class Failing(torch.optim.SGD):
    """An optimizer whose n-th step from now fails; `fails` is n, or 0 for no failure."""

    fails = 0

    def step(self, closure: Any = None) -> None:
        self.fails -= 1
        if self.fails == 0:
            raise BrokenError("in the torch optimizer")
        super().step()


@pytest.mark.parametrize(
    ("schedule", "fails"),
    [(cs.Sequential(), 1), (cs.Sequential(), 2), (cs.Sequential(), 3), (cs.Joint(), 1)],
)
@on_ranks(2)
def test_an_optimizer_that_fails_on_one_rank(
    rank: int, schedule: cs.Schedule, fails: int
) -> list[Tensor]:
    """In Phase 1, rank 0 is already in the next task's passes when rank 1's optimizer fails."""
    network, x = Dense(), part_of_this_rank(torch.randn(12, 5))
    sgd = Failing(network.parameters(), lr=0.1)
    group = dist.group.WORLD
    opt = cs.MultiTaskOptimizer(network, sgd, TASKS, cs.PCGrad(), schedule, process_group=group)
    step = partial(opt.step, partial(network, x))
    step()
    sgd.fails = fails if rank == 1 else 0
    is_last = isinstance(schedule, cs.Joint) or fails == len(TASKS)
    if is_last and rank == 0:
        step()  # Rank 0 has already finished the failed step.
    with _error_of_rank_1(rank, "in the torch optimizer"):
        step()
    sgd.fails = 0
    with pytest.raises(RuntimeError, match=r"same parameters|number of steps made before"):
        step()  # Some ranks have made the update, others have not.
    for parameter in network.parameters():
        dist.broadcast(parameter.data, 0)
    states = [opt.state_dict()]  # Rank 0 may have made one more step.
    dist.broadcast_object_list(states, 0)
    opt.load_state_dict(states[0])
    for _ in range(3):  # No collective of the failed step is left.
        step()
    return whole_copies(network.parameters())


@pytest.mark.parametrize("what", ["a hook", "a sparse gradient", "a sparse one of a head"])
@on_ranks(2)
def test_a_backward_pass_that_fails_on_one_rank(rank: int, what: str) -> list[Tensor]:
    """The pass fails after some buckets are sent; later steps are not affected."""
    buckets.BUCKET_BYTES = 70
    embedding = nn.Embedding(4, 4)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    both = nn.ModuleList([embedding, *layers])
    trunk, heads = (layers, [embedding]) if what.endswith("head") else (both, [])
    opt = optimizer_on_ranks(trunk, cs.PCGrad(), heads=heads, tasks=TASKS[:2])

    def fail(grad: Tensor) -> None:
        if fails and rank == 1 and what == "a hook":
            raise BrokenError("gradients must be dense, or a hook")

    def loss(task: str) -> Tensor:
        y = embedding(torch.arange(4)) + 1
        for layer in layers:
            y = torch.tanh(layer(y))
        return conflicting_loss(y, task)

    layers[1].weight.register_hook(fail)
    for number in range(8):
        fails = number in (0, 3, 4)
        embedding.sparse = fails and rank == 0 and what != "a hook"
        error = pytest.raises((BrokenError, ValueError, RuntimeError), match="must be dense")
        with error if fails else nullcontext():
            opt.step(loss, tasks=TASKS[:2] if rank == 0 else TASKS[1:2])
    assert opt.state_dict()["steps"] == 5
    return whole_copies(both.parameters())


def _with_sharded_heads() -> tuple[Dense, cs.MultiTaskOptimizer]:
    network = Dense()
    shard(network.trunk[0], network.trunk, *network.heads.values())
    network.trunk[0].set_reshard_after_backward(False)
    given = {"heads": [network.heads], "process_group": None}
    return network, optimizer_on_ranks(network.trunk, cs.PCGrad(), **given)


def _after_a_failing_pass(rank: int, layer: int | None) -> list[Tensor]:
    """A backward pass fails on all ranks; the heads are FSDP roots of their own."""
    network, opt = _with_sharded_heads()
    x = part_of_this_rank(torch.randn(12, 5))

    def fail(grad: Tensor) -> None:
        raise BrokenError("in the backward pass")

    def loss(task: str, fails: bool) -> Tensor:
        if fails and task == "normals":
            network.trunk[layer].register_forward_hook(
                lambda _, args, y: y.register_hook(fail) and None
            )
        return network.heads[task](network.trunk(x)).square().mean()

    for step in range(4):
        if layer is not None and step in (0, 2):
            with pytest.raises(BrokenError):
                opt.step(partial(loss, fails=True))
            network.trunk[layer]._forward_hooks.clear()
        opt.step(partial(loss, fails=False))
    return whole_copies(opt.optimizer.param_groups[0]["params"])


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard cannot be reset")
def test_shards_after_a_backward_pass_that_fails(pools: Pools) -> None:
    """The pass fails before the trunk, or inside it, before some gradients are reduced."""
    found = [pools(2).agreed(_after_a_failing_pass, layer) for layer in (None, 2, 1)]
    assert_equal(found[1:], [found[0]] * 2)


@on_ranks(2)
def test_heads_that_are_sharded(rank: int) -> list[dict[str, Tensor]]:
    """`backward` keeps the user's resharding option, and returns an infinite loss unchanged."""
    network, opt = _with_sharded_heads()
    x = part_of_this_rank(torch.randn(2, 12, 5), 1)
    returned = []
    for update in (False, True):
        y = network.trunk(x[int(update)])
        losses = {task: network.heads[task](y).square().mean() for task in TASKS}
        if not update:
            losses["depth"] = losses["depth"] * float("inf")
        returned.append(opt.backward(losses, update=update))
    group = network.trunk[0]._get_fsdp_state()
    groups = getattr(group, "_fsdp_param_groups", None) or [group._fsdp_param_group]
    assert not groups[0].reshard_after_backward
    assert returned[0]["depth"].isinf()
    assert returned[1]["depth"].isfinite()
    return returned


class Own(cs.Joint):
    """A schedule with Python's default repr, which contains an address."""

    __repr__ = object.__repr__


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "replicated",
            "step, or backward with the same update=.*: rank 0 has 'FIRST', rank 1 has 'WHOLE'",
        ),
        ("fully_shard", r"same tasks on all ranks .*: rank 1 lacks \['normals'\]"),
    ],
)
@on_ranks(2)
def test_other_calls_of_backward_are_refused(rank: int, kind: str, message: str) -> None:
    network, options = distributed(Dense(), kind)
    opt = optimizer_on_ranks(network, cs.PCGrad(), Own(), **options)
    losses = network(torch.ones(3, 5))
    if kind == "fully_shard" and rank == 1:
        del losses["normals"]
    with pytest.raises(RuntimeError, match=message):
        opt.backward(losses, update=kind == "fully_shard" or rank == 1)


CHANGES: dict[str, Callable[[Network], object]] = {
    "shape": lambda network: network.plain.__setitem__(14, nn.Linear(12, 11, bias=False)),
    "head": lambda network: network.heads.update({"depth": nn.Linear(9, 3)}),
    "frozen": lambda network: network.plain[3].requires_grad_(False),
    "parameters": lambda network: network.plain[3].bias.data[2].add_(1e-6),
    "epoch": lambda network: network.opt.start_epoch(0),
    "group": lambda network: network.optimizer.add_param_group({"params": [nn.Parameter()]}),
    "rate": lambda network: network.optimizer.param_groups[0].update(lr=0.01),
    "number": lambda network: network.opt.load_state_dict({**network.opt.state_dict(), "steps": 2}),
    "no task": lambda network: None,
    "weights": lambda network: network.opt._engine.kept.forget(),
}
"""The changes that a test makes on rank 1."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": TASKS[::-1]}, "tasks, in this order: rank 0 has 'depth', rank 1 has 'edges'"),
        ({"tasks": TASKS[:2]}, r"0 has \['depth', 'normals', 'edges'\], rank 1 has \['depth'"),
        ({"method": cs.PCGrad(seed=2)}, "same method: rank 0 has .*seed=0.*, rank 1 has .*seed=2"),
        (
            {"schedule": cs.Switch(3)},
            r"schedule: rank 0 has 'Joint\(\)', rank 1 has 'Switch\(epoch=3\)'",
        ),
        ({"layers": {"nowhere": None}}, "nowhere"),
        ("shape", "number of shared parameters: rank 0 has 13, rank 1 has 12"),
        ("head", r"other parameters .*: rank 0 has \(\(2, 9\), .*, rank 1 has \(\(3, 9\)"),
        ("frozen", r"rank 0 has \('3.weight', .*True\), rank 1 has .*False"),
    ],
)
@on_ranks(2)
def test_ranks_that_disagree_raise(rank: int, change: str | dict[str, Any], message: str) -> None:
    network = Network("alone", rank, 2)
    options = {"tasks": TASKS, "method": cs.PCGrad(), "schedule": cs.Joint()}
    if rank == 1 and isinstance(change, str):
        CHANGES[change](network)
    elif rank == 1:
        options |= change
    options |= {"optimizer": sgd_of(network.plain, network.heads)}
    with pytest.raises((ValueError, RuntimeError), match=message):
        cs.MultiTaskOptimizer(network.plain, process_group=dist.group.WORLD, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("parameters", "trunk.3.bias of rank 1 differs from rank 0's.*same seed"),
        ("epoch", r"epoch \(set by start_epoch\): rank 0 has 1, rank 1 has 0"),
        ("group", "parameters in the optimizer: rank 0 has 49, rank 1 has 50"),
        ("frozen", r"a gradient: rank 0 has \('3.weight', True, .*, rank 1 has \(.*False"),
        ("rate", r"options of the optimizer: rank 0 has \(0, 'lr', 0.05\), rank 1 has .* 0.01\)"),
        ("number", "number of steps made before: rank 0 has 1, rank 1 has 2"),
        ("weights", "step of the kept task weights: rank 0 has 0, rank 1 has None"),
        ("no task", "at least one task on some rank"),
    ],
)
@on_ranks(2)
def test_ranks_that_differ_in_a_step_raise(rank: int, change: str, message: str) -> None:
    """The error is raised before anything changes."""
    network = Network("replicated", rank, 2)
    opt = network.start(cs.PCGrad(update_every=4), cs.Switch(1))
    opt.start_epoch(1)
    if change != "parameters":
        opt.step(partial(network.loss, 0))
    if rank == 1:
        CHANGES[change](network)
    with refused(network.state, RuntimeError, message):
        opt.step(partial(network.loss, 1), tasks=[] if change == "no task" else None)


@on_ranks(3)
def test_ranks_with_other_groups_raise(rank: int) -> None:
    """Otherwise torch would wait for a group that rank 1 does not know."""
    trunk = nn.Linear(3, 3)
    if rank != 1:
        dist.new_group([0, 2])
    try:
        with pytest.raises(RuntimeError, match="the same number of process groups"):
            optimizer_on_ranks(trunk, cs.PCGrad())
    finally:
        if rank == 1:
            dist.new_group([0, 2])
    optimizer_on_ranks(trunk, cs.PCGrad())


@pytest.mark.parametrize(
    ("what", "noticed"),
    [
        *(("state", 64), ("parameter", 64), ("loaded", 5), ("a loaded state", 6)),
        ("complex parameter", 64),
        ("equal options", None),
    ],
)
@on_ranks(2)
def test_ranks_that_drift_raise(rank: int, what: str, noticed: int | None) -> None:
    """`noticed` is the latest step that may raise; equal options may differ in type."""
    trunk = nn.Linear(3, 3)
    phases = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    if "complex" in what:
        trunk.register_parameter("phases", phases)
    adam = torch.optim.Adam(trunk.parameters(), lr=0.01)
    opt = cs.MultiTaskOptimizer(trunk, adam, TASKS, cs.Sum(), process_group=dist.group.WORLD)

    def loss(task: str) -> Tensor:
        y = trunk(torch.ones(2, 3))
        return (y * phases if "complex" in what else y).abs().square().mean()

    for step in range(70):
        if what == "equal options":
            adam.param_groups[0]["lr"] = [0.5, 0.5, 1, 1.0][2 * (step % 2) + rank]
            adam.param_groups[0]["betas"] = [(0.9, 0.99), [0.9, 0.99]][rank]
        if rank == 0 and (what, step) in (("state", 1), ("a loaded state", 5)):
            adam.load_state_dict(adam.state_dict())
            adam.state[trunk.weight]["exp_avg"].add_(1)
        if rank == 0 and what in ("parameter", "loaded") and step == 5:
            trunk.bias.data.add_(1)
        if rank == 0 and what == "complex parameter" and step == 5:
            phases.data.add_(1j)
        if "loaded" in what and step == 5:
            opt.load_state_dict(opt.state_dict())
        try:
            opt.step(loss)
        except RuntimeError as error:
            text = str(error)
            assert "ranks must hold the same parameters: trunk." in text
            assert step <= (noticed or 0)
            for _ in range(4):  # The error persists.
                with pytest.raises(RuntimeError, match="same parameters"):
                    opt.step(loss, TASKS[:1])
            return
    assert noticed is None
