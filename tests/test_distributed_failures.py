"""What goes wrong on one rank ends the step of all, in an error that says what."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal
from rank_networks import (
    METHODS,
    TASKS,
    Dense,
    Network,
    Whole,
    assert_near,
    both_phases,
    trained,
)
from ranks import TIMEOUT, Ranks
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ranks import buckets, messages

pytestmark = pytest.mark.ranks


class BrokenError(Exception):
    """That of one rank."""


def _with_a_failing_rank(rank: int, size: int, kind: str, method: str) -> list[Any]:
    """Rank 1 fails in the second task of a step: everywhere an error, and nothing has changed."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size)
    network.trunk.train()
    opt = network.start(METHODS[method](), both_phases())
    opt.start_epoch(1)
    errors = []
    for step in range(6):
        opt.step(partial(network.loss, step))

        def loss(task: str, step: int = step) -> Tensor:
            if rank == 1 and task == "normals":
                raise BrokenError(f"no labels on the disk in step {step}")
            return network.loss(step, task)

        before = [t.clone() for t in [*network.state(), *network.plain.buffers()]]
        phase = opt.phase
        with pytest.raises(BrokenError if rank == 1 else RuntimeError) as caught:
            opt.step(loss)
        errors.append((phase, str(caught.value)))
        if phase == 2:  # In Phase 1, the first task has been updated.
            assert_equal([*network.state(), *network.plain.buffers()], before)
        assert all(p.grad is None for p in network.parameters)
    return [errors, network.state(), [b.clone() for b in network.plain.buffers()]]


@pytest.mark.parametrize("method", ["ConnectionStrength", "Sum"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_failing_rank_ends_the_step_of_all(
    pools: Callable[[int], Ranks], size: int, method: str
) -> None:
    """The steps after it are made by all ranks again."""
    results = pools(size).run(_with_a_failing_rank, size, "replicated", method)
    for rank, (errors, *state) in enumerate(results):
        assert_equal(state[0], results[0][1])
        if rank != 1:
            assert_equal(state[1][1:2], results[0][2][1:2])
        assert {phase for phase, _ in errors} == {1, 2}
        for _, text in errors:
            expected = (
                "no labels on the disk" if rank == 1 else r"rank 1 failed in step \d+: Broken"
            )
            assert re.match(expected, text), text


def _with_a_failing_shard(rank: int, size: int) -> str:
    """The other rank waits in a collective of `fully_shard` until its timeout."""
    group = dist.new_group(range(size), timeout=TIMEOUT)
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    trunk = Dense()
    from torch.distributed.fsdp import fully_shard

    fully_shard(trunk, mesh=mesh)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    before = [p.full_tensor().clone() for p in sgd.param_groups[0]["params"]]
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad())

    def loss(task: str) -> Tensor:
        if rank == 1 and task == "normals":
            raise BrokenError("no labels")
        if task == "normals":  # From here on, this rank waits in vain.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        return trunk(torch.ones(3, 5))[task]

    with pytest.raises((BrokenError, RuntimeError)) as caught:
        opt.step(loss)
    shards = [p.to_local() for p in sgd.param_groups[0]["params"]]
    rows = [p.chunk(size)[rank] for p in before]
    assert_equal(shards, rows)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failing_shard_is_named_after_the_timeout() -> None:
    """With processes of its own: their connections are closed after it."""
    ranks = Ranks(2)
    first, second = ranks.run(_with_a_failing_shard, 2)
    ranks.stop()
    assert re.match("RankError: rank 1 failed in step 0: BrokenError: no labels", first)
    assert second == "BrokenError: no labels"


def _on_a_grid(rank: int, size: int) -> list[Any]:
    messages._GRID_FROM = 2
    try:
        assert messages.grid_rows(size) == 2
        failing = _with_a_failing_rank(rank, size, "replicated", "Sum")
        return [trained(rank, size, "replicated", "PCGrad")[:2], failing[0]]
    finally:
        messages._GRID_FROM = 16


def test_messages_on_a_grid(pools: Callable[[int], Ranks]) -> None:
    """Two rows of two ranks, as many ranks have."""
    results = pools(4).run(_on_a_grid, 4)
    for found, _ in results:
        assert_equal(list(found), list(results[0][0]))
    assert_near(results[0][0][0], trained(0, 4, "alone", "PCGrad")[0])
    for rank in (0, 2, 3):
        assert all(text.startswith("rank 1 failed") for _, text in results[rank][1])
    assert [messages.grid_rows(size) for size in (15, 16, 17, 512)] == [1, 4, 1, 16]


class Failing(torch.optim.SGD):
    """Fails where it is told to."""

    fails = 0

    def step(self, closure: Any = None) -> None:
        self.fails -= 1
        if self.fails == 0:
            raise BrokenError("in the torch optimizer")
        super().step()


def _with_a_failing_optimizer(rank: int, size: int) -> list[Any]:
    """In Phase 1 the others are in the next task's passes by then."""
    texts: list[Any] = []
    for phase, schedule in enumerate((cs.Sequential(), cs.Joint()), 1):
        for fails in range(1, len(TASKS) + 1) if phase == 1 else [1]:
            torch.manual_seed(0)
            trunk = Whole()
            sgd = Failing(trunk.parameters(), lr=0.1)
            options: Any = {"process_group": dist.group.WORLD}
            opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), schedule, **options)
            x = torch.randn(12, 5)[rank::size]
            opt.step(lambda task, x=x, trunk=trunk: trunk(x, task))
            sgd.fails = fails if rank == 1 else 0
            for _ in range(2):  # The others may have ended the step before.
                try:
                    opt.step(lambda task, x=x, trunk=trunk: trunk(x, task))
                except (BrokenError, RuntimeError) as error:
                    texts.append(f"{phase} {fails} {error}")
                    break
            sgd.fails = 0
            with pytest.raises(RuntimeError) as caught:  # Ranks have made other updates.
                opt.step(lambda task, x=x, trunk=trunk: trunk(x, task))
            texts.append(str(caught.value))
            if phase == 2 or fails == len(TASKS):  # Rank 0 has made one more step.
                continue
            for parameter in trunk.parameters():
                dist.broadcast(parameter.data, 0)
            for _ in range(3):  # The collectives of the failed step are over.
                opt.step(lambda task, x=x, trunk=trunk: trunk(x, task))
            texts.append([parameter.detach().clone() for parameter in trunk.parameters()])
    return texts


def test_an_optimizer_that_fails_on_one_rank(pools: Callable[[int], Ranks]) -> None:
    of_ranks = pools(2).run(_with_a_failing_optimizer, 2)
    states = [[x for x in of_rank if isinstance(x, list)] for of_rank in of_ranks]
    assert len(states[0]) == 2
    assert_equal(*states)
    of_ranks = [[x for x in of_rank if isinstance(x, str)] for of_rank in of_ranks]
    assert len(of_ranks[0]) == len(of_ranks[1]) == 8
    for rank, texts in enumerate(of_ranks):
        for text in texts[::2]:
            expected = "in the torch optimizer" if rank == 1 else "rank 1 failed in step"
            assert expected in text
        for text in texts[1::2]:
            assert re.search("same parameters|number of steps made before", text)


def _with_a_failing_backward_pass(rank: int, size: int) -> list[Tensor]:
    """After some buckets are sent; later steps are made as if nothing had been."""
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(0)
    trunk = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), process_group=dist.group.WORLD)
    x, fails = torch.randn(6, 4)[rank::size], False

    def fail(grad: Tensor) -> None:
        if fails:
            raise BrokenError("in the backward pass")

    if rank == 1:
        trunk[1].bias.register_hook(fail)
    for step in range(8):
        fails = step in (0, 3, 4)
        if fails:
            with pytest.raises(BrokenError if rank == 1 else RuntimeError, match="in the backward"):
                opt.step(lambda task: (trunk(x) - TASKS.index(task)).square().mean())
        else:
            opt.step(lambda task: (trunk(x) - TASKS.index(task)).square().mean())
    assert opt.state_dict()["steps"] == 5
    return [p.detach().clone() for p in trunk.parameters()]


def test_a_backward_pass_that_fails_on_one_rank(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_with_a_failing_backward_pass, 2)
    assert_equal(first, second)


def _with_sharded_heads(rank: int, size: int, fails: bool) -> list[Tensor]:
    """A backward pass fails on all ranks alike, with heads that are roots of their own."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    network = Whole()
    mesh = dist.init_device_mesh("cpu", (size,))
    for module in (network.trunk[0], network.trunk, *network.heads.values()):
        fully_shard(module, mesh=mesh)
    parameters = list(network.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, cs.PCGrad())
    x = torch.randn(12, 5)[rank::size]

    def fail(grad: Tensor) -> None:
        raise BrokenError("in the backward pass")

    def loss(task: str, failing: bool = False) -> Tensor:
        y = network.trunk(x)
        if failing and task == "normals":
            y.register_hook(fail)
        result: Tensor = network.heads[task](y).square().mean()
        return result

    for step in range(4):
        if fails and step in (0, 2):
            with pytest.raises(BrokenError):
                opt.step(partial(loss, failing=True))
        opt.step(loss)
    return [p.full_tensor().detach() for p in parameters]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard cannot be reset")
def test_shards_after_a_backward_pass_that_fails(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_with_sharded_heads, 2, True)
    assert_equal(first, second)
    assert_equal(first, pools(2).run(_with_sharded_heads, 2, False)[0])


def _with_a_sparse_gradient(rank: int, size: int, where: str) -> list[Any]:
    """On one rank, in some steps; the other ones are made as if nothing had been."""
    buckets.BUCKET_BYTES = 70
    torch.manual_seed(0)
    embedding = nn.Embedding(4, 4)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    trunk = nn.ModuleList([embedding, *layers]) if where == "trunk" else layers
    sgd = torch.optim.SGD([*embedding.parameters(), *layers.parameters()], lr=0.1)
    options: Any = {"process_group": dist.group.WORLD}
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS[:2], cs.PCGrad(), **options)

    def loss(task: str) -> Tensor:
        y = embedding(torch.arange(4)) + 1
        for layer in layers:
            y = torch.tanh(layer(y))
        return (y - TASKS.index(task)).square().mean()

    texts = []
    for step in range(6):
        embedding.sparse = rank == 0 and step in (1, 4)
        try:
            opt.step(loss, tasks=TASKS[:2] if rank == 0 else TASKS[1:2])
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    return [texts, [p.detach().clone() for p in sgd.param_groups[0]["params"]]]


@pytest.mark.parametrize("where", ["trunk", "head"])
def test_sparse_gradients(pools: Callable[[int], Ranks], where: str) -> None:
    (texts, state), (others, other) = pools(2).run(_with_a_sparse_gradient, 2, where)
    assert len(texts) == len(others) == 2
    assert all("dense gradients" in text for text in texts + others)
    assert_equal(state, other)


class Own(cs.Joint):
    """A schedule without a representation."""

    __repr__ = object.__repr__


def _backward_calls(rank: int, size: int, what: str) -> str:
    torch.manual_seed(2)
    trunk = Dense()
    options: dict[str, Any] = {"process_group": dist.group.WORLD}
    if what == "tasks":
        from torch.distributed.fsdp import fully_shard

        fully_shard(trunk, mesh=dist.init_device_mesh("cpu", (size,)))
        options = {}
    sgd = torch.optim.SGD(list(trunk.parameters()), lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), Own(), **options)
    losses = trunk(torch.ones(3, 5))
    if what == "tasks" and rank == 1:
        del losses["normals"]
    with pytest.raises(RuntimeError) as caught:
        opt.backward(losses, update=what != "update" or rank == 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("update", "same calls: step, or backward with the same update=: rank 0 has 2, rank 1 has"),
        ("tasks", r"same tasks on all ranks .*: rank 1 lacks \['normals'\]"),
    ],
)
def test_other_calls_of_backward_are_refused(
    pools: Callable[[int], Ranks], what: str, message: str
) -> None:
    for text in pools(2).run(_backward_calls, 2, what):
        assert re.search(message, text), text


def _sharded_heads(rank: int, size: int) -> list[Any]:
    """`backward` does not see the heads run; the user's resharding stays; losses of inf."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    network = Whole()
    mesh = dist.init_device_mesh("cpu", (size,))
    for module in (network.trunk[0], network.trunk, *network.heads.values()):
        fully_shard(module, mesh=mesh)
    network.trunk[0].set_reshard_after_backward(False)
    parameters = list(network.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, cs.PCGrad())
    x = torch.randn(2, 12, 5)[:, rank::size]
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
    return returned


def test_heads_that_are_sharded(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_sharded_heads, 2)
    assert_equal(first, second)
    assert first[0]["depth"].isinf()
    assert first[1]["depth"].isfinite()


def _disagreeing(rank: int, size: int, what: str) -> str:
    network = Network("alone", rank, size)
    trunk, heads = network.plain, network.heads
    tasks, method, schedule = list(TASKS), cs.PCGrad(), cs.Joint()
    options: dict[str, Any] = {"process_group": dist.group.WORLD}
    if rank == 1:
        if what == "tasks":
            tasks.reverse()
        if what == "number of tasks":
            tasks = TASKS[:2]
        if what == "method":
            method = cs.PCGrad(seed=2)
        if what == "schedule":
            schedule = cs.Switch(3)
        if what == "shape":
            trunk.layers[14] = nn.Linear(12, 11, bias=False)
        if what == "head":
            heads["depth"] = nn.Linear(9, 3)
        if what == "argument":
            options["layers"] = {"nowhere": None}
        if what == "frozen":
            trunk.layers[0].requires_grad_(False)
    sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        cs.MultiTaskOptimizer(trunk, sgd, tasks, method, schedule, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tasks", r"same tasks, in this order: rank 0 has 'depth', rank 1 has 'edges'"),
        ("number of tasks", r"rank 0 has \['depth', 'normals', 'edges'\], rank 1 has \['depth'"),
        ("method", r"same method: rank 0 has .*seed=0.*, rank 1 has .*seed=2"),
        ("schedule", r"same schedule: rank 0 has 'Joint\(\)', rank 1 has 'Switch\(epoch=3\)'"),
        ("shape", r"number of shared parameters: rank 0 has 13, rank 1 has 12"),
        ("head", r"other parameters .*: rank 0 has \(\(2, 9\), .*, rank 1 has \(\(3, 9\)"),
        ("frozen", r"rank 0 has \('layers.0.weight', .*True\), rank 1 has .*False"),
        ("argument", r"nowhere"),
    ],
)
def test_ranks_that_disagree_are_told_so(
    pools: Callable[[int], Ranks], what: str, message: str
) -> None:
    for text in pools(2).run(_disagreeing, 2, what):
        assert re.search(message, text), text


def _other_groups(rank: int, size: int) -> str:
    """A group of two ranks that the third one does not know of."""
    trunk = nn.Linear(3, 3)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    options: Any = {"process_group": dist.group.WORLD}
    if rank != 1:
        dist.new_group([0, 2])
    try:
        with pytest.raises(RuntimeError) as caught:
            cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), **options)
    finally:
        if rank == 1:
            dist.new_group([0, 2])
    cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), **options)
    return str(caught.value)


def test_ranks_with_other_groups_are_told_so(pools: Callable[[int], Ranks]) -> None:
    """Torch would wait for a group of another name."""
    for text in pools(3).run(_other_groups, 3):
        assert "the same number of process groups" in text


def _drifting(rank: int, size: int, what: str) -> tuple[int, str]:
    """The first step in which it is noticed, of 70."""
    torch.manual_seed(0)
    trunk = nn.Linear(3, 3)
    adam = torch.optim.Adam(trunk.parameters(), lr=0.01)
    opt = cs.MultiTaskOptimizer(trunk, adam, TASKS, cs.Sum(), process_group=dist.group.WORLD)
    for step in range(70):
        if what == "equal options":
            adam.param_groups[0]["lr"] = [0.5, 0.5, 1, 1.0][2 * (step % 2) + rank]
            adam.param_groups[0]["betas"] = [(0.9, 0.99), [0.9, 0.99]][rank]
        if rank == 0 and what == "state" and step == 1:
            adam.load_state_dict(adam.state_dict())
            adam.state[trunk.weight]["exp_avg"].add_(1)
        if rank == 0 and what in ("parameter", "loaded") and step == 5:
            trunk.bias.data.add_(1)
        if what == "loaded" and step == 5:
            opt.load_state_dict(opt.state_dict())
        try:
            opt.step(lambda task: trunk(torch.ones(2, 3)).square().mean())
        except RuntimeError as error:
            for _ in range(4):  # As long as it is so.
                with pytest.raises(RuntimeError, match="same parameters"):
                    opt.step(lambda task: trunk(torch.ones(2, 3)).square().mean(), TASKS[:1])
            return step, str(error)
    return 70, ""


@pytest.mark.parametrize(("what", "noticed"), [("state", 64), ("parameter", 64), ("loaded", 5)])
def test_ranks_that_drift_are_told_so(
    pools: Callable[[int], Ranks], what: str, noticed: int
) -> None:
    assert pools(2).run(_drifting, 2, "equal options") == [(70, "")] * 2
    for step, text in pools(2).run(_drifting, 2, what):
        assert step <= noticed
        assert "ranks must hold the same parameters: trunk." in text


def _disagreeing_later(rank: int, size: int, what: str) -> tuple[str, list[Tensor], list[Tensor]]:
    """Ranks differ in a step; the error comes before anything has changed."""
    network = Network("replicated", rank, size)
    opt = network.start(cs.PCGrad(), cs.Switch(1))
    opt.start_epoch(1)
    if what != "parameters":
        opt.step(partial(network.loss, 0))
    if rank == 1:
        if what == "parameters":
            with torch.no_grad():
                network.plain.layers[3].bias[2] += 1e-6
        if what == "epoch":
            opt.start_epoch(0)
        if what == "group":
            network.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if what == "frozen":
            network.plain.layers[3].requires_grad_(False)
        if what == "number":
            opt._engine.steps += 1
        if what == "rate":
            network.optimizer.param_groups[0]["lr"] = 0.01
    before = network.state()
    tasks = [] if what == "no task" else None
    with pytest.raises(RuntimeError) as caught:
        opt.step(partial(network.loss, 1), tasks=tasks)
    return str(caught.value), before, network.state()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("parameters", r"trunk.layers.3.bias of rank 1 differs from that of rank 0.*same seed"),
        ("epoch", r"epoch, by start_epoch: rank 0 has 1, rank 1 has 0"),
        ("group", r"parameters in the optimizer: rank 0 has 49, rank 1 has 50"),
        (
            "frozen",
            r"require a gradient: rank 0 has \('layers.3.weight', True, .*, rank 1 has \(.*False",
        ),
        ("rate", r"options of the optimizer: rank 0 has \(0, 'lr', 0.05\), rank 1 has .* 0.01\)"),
        ("number", "number of steps made before: rank 0 has 1, rank 1 has 2"),
        ("no task", "at least one task on some rank"),
    ],
)
def test_ranks_that_differ_in_a_step_are_told_so(
    pools: Callable[[int], Ranks], what: str, message: str
) -> None:
    for text, before, after in pools(2).run(_disagreeing_later, 2, what):
        assert re.search(message, text), text
        assert_equal(after, before)
