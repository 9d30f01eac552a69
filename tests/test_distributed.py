"""Many ranks: the bits of each other, and what one process gives on the whole batch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal
from rank_networks import (
    KINDS,
    METHODS,
    TASKS,
    Dense,
    Network,
    Whole,
    assert_near,
    both_phases,
    trained,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cs_kernels as cs
from cs_kernels.distributed import buckets

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    ("kind", "size", "method"),
    [
        (kind, size, method)
        for method in METHODS
        for kind, size in KINDS[:: 3 if method in ("PCGrad-layer", "MGDA") else 1]
    ],
)
def test_ranks_train_as_one_process(
    pools: Callable[[int], Ranks], kind: str, size: int, method: str
) -> None:
    results = pools(size).run(trained, size, kind, method)
    for other in results[1:]:
        assert_equal(other, results[0])
    state, losses, phases = trained(0, size, "alone", method)
    assert set(phases) == {1, 2}
    assert_near(results[0][0], state)
    assert_near(results[0][1], losses)


def _with_some_labels(rank: int, size: int, kind: str, method: str) -> list[list[Tensor]]:
    """Rank 0 has all labels, rank 1 those of two tasks, rank 2 and the last step of 1 none."""
    buckets.BUCKET_BYTES = 700
    labels = [TASKS, ["edges", "depth"], []]
    states, networks = [], list[Network]()
    for schedule in (cs.Joint(), cs.Sequential()):
        networks.append(Network(kind, rank, size))
        opt = networks[-1].start(METHODS[method](), schedule)
        for step in range(4):
            of_ranks = [labels[r] if step < 3 else TASKS[: 1 - r] for r in range(size)]

            def loss(task: str, step: int = step, of_ranks: Any = of_ranks) -> Tensor:
                network = networks[-1]
                if kind == "alone":
                    # The ranks' means with the same weight.
                    parts = zip(range(size), of_ranks, strict=True)
                    samples = 12 // size
                    having = [
                        network.loss(step, task, slice(r * samples, (r + 1) * samples))
                        for r, tasks in parts
                        if task in tasks
                    ]
                    return torch.stack(having).mean()
                if task not in of_ranks[rank]:
                    assert kind == "fully_shard"
                    return 0 * network.loss(step, task)
                result: Tensor = network.loss(step, task)
                return result

            every = [task for task in TASKS if any(task in tasks for tasks in of_ranks)]
            if kind == "alone":
                losses = opt.step(loss, tasks=dict.fromkeys(t for o in of_ranks for t in o))
            else:
                losses = opt.step(loss, tasks=of_ranks[rank])
            assert set(losses) == set(every)
        states.append([*networks[-1].state(), *losses.values()])
    return states


@pytest.mark.parametrize("method", ["ConnectionStrength", "MGDA", "Sum"])
@pytest.mark.parametrize(
    ("kind", "size"), [("replicated", 2), ("replicated", 3), ("fully_shard", 2)]
)
def test_a_task_counts_with_the_ranks_that_have_labels(
    pools: Callable[[int], Ranks], kind: str, size: int, method: str
) -> None:
    first, *others = pools(size).run(_with_some_labels, size, kind, method)
    for other in others:
        assert_equal(other, first)
    assert_near(first, _with_some_labels(0, size, "alone", method))


def _in_parts(rank: int, size: int, kind: str, method: str) -> list[Tensor]:
    """Micro-batches: two on rank 0, three on the others, except with `fully_shard`."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size)
    opt = network.start(METHODS[method](), both_phases())
    opt.start_epoch(1)
    for step in range(6):
        number = 2 if rank == 0 or kind == "fully_shard" else 3
        samples = (12 if kind == "alone" else 12 // size) // number

        def loss(task: str, n: int, step: int = step, number: int = number) -> Tensor:
            part = slice(n * samples, (n + 1) * samples)
            return network.loss(step, task, part) / number

        opt.step([lambda task, n=n: loss(task, n) for n in range(number)])
    return network.state()


@pytest.mark.parametrize("method", ["ConnectionStrength", "CAGrad", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "DDP", "fully_shard"])
def test_micro_batches(pools: Callable[[int], Ranks], kind: str, method: str) -> None:
    first, *others = pools(2).run(_in_parts, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    assert_near(first, trained(0, 2, "alone", method)[0])


def _scaled(rank: int, size: int, kind: str, method: str) -> tuple[list[Tensor], float]:
    """With a scaler; in one step, the gradient of one rank is not finite."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size, heads_too=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = network.start(METHODS[method](), both_phases(), scaler=scaler)
    opt.start_epoch(1)
    for step in range(6):
        factor = float("inf") if step == 2 and (rank == 1 or kind == "alone") else 1.0
        opt.step(lambda task, step=step, factor=factor: factor * network.loss(step, task))
    return network.state(), scaler.get_scale()


@pytest.mark.parametrize("method", ["ConnectionStrength", "PCGrad", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_a_scaler_skips_the_step_on_all_ranks(
    pools: Callable[[int], Ranks], kind: str, method: str
) -> None:
    first, *others = pools(2).run(_scaled, 2, kind, method)
    for other in others:
        assert_equal(other, first)
    state, scale = _scaled(0, 2, "alone", method)
    assert scale < 1024
    assert first[1] == scale
    assert_near(first[0], state)


def _one_forward_pass(
    rank: int, size: int, kind: str, method: str, parts: int
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """`backward`, with the losses of one forward pass; in several parts that add up."""
    buckets.BUCKET_BYTES = 100
    torch.manual_seed(2)
    plain = Dense()
    network: nn.Module = plain
    options: dict[str, Any] = {}
    if kind == "replicated":
        options["process_group"] = dist.group.WORLD
    if kind.startswith("DDP"):
        network = nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (size,))
        fully_shard(plain.body[0], mesh=mesh)
        fully_shard(plain, mesh=mesh)
    parameters = list(plain.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
    opt = cs.MultiTaskOptimizer(plain, sgd, TASKS, METHODS[method](), **options)
    batches = torch.randn(5, 12, 5)
    returned = []
    for batch in batches:
        mine = batch if kind == "alone" else batch.chunk(size)[rank]
        for n, x in enumerate(mine.chunk(parts), 1):
            losses = {task: loss / parts for task, loss in network(x).items()}
            if rank == 1:  # The order of the losses is that of no collective.
                losses = dict(reversed(losses.items()))
            returned.append(opt.backward(losses, update=n == parts))
        sgd.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().clone() for p in whole], returned


@pytest.mark.parametrize("method", ["CAGrad", "GradDrop", "MGDA", "Sum"])
@pytest.mark.parametrize("kind", ["replicated", "DDP", "fully_shard"])
@pytest.mark.parametrize("parts", [1, 2])
def test_losses_of_one_forward_pass(
    pools: Callable[[int], Ranks], kind: str, method: str, parts: int
) -> None:
    first, *others = pools(2).run(_one_forward_pass, 2, kind, method, parts)
    for other in others:
        assert_equal(other, first)
    assert_near(first[0], _one_forward_pass(0, 2, "alone", method, 1)[0])


class Gathers(TorchDispatchMode):
    """Counts the collectives in which `fully_shard` gathers parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d" and "allgather" in str(function):
            self.count += any(t.is_floating_point() for t in tree_leaves(args[:2]))
        return function(*args, **(kwargs or {}))


def _gathers(rank: int, size: int, tasks: int) -> int:
    from torch.distributed.fsdp import fully_shard

    trunk = Dense()
    mesh = dist.init_device_mesh("cpu", (size,))
    for layer in (trunk.body[0], trunk.body[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(trunk, mesh=mesh)
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS[:tasks], cs.PCGrad())
    for _ in range(3):
        losses = trunk(torch.ones(4, 5))
        with Gathers() as gathers:
            opt.backward({task: losses[task] for task in TASKS[:tasks]})
        sgd.step()
    return gathers.count


def test_parameters_are_gathered_once_for_all_backward_passes(
    pools: Callable[[int], Ranks],
) -> None:
    assert pools(2).run(_gathers, 2, 1) == pools(2).run(_gathers, 2, 3) == [2, 2]


def _forgotten(rank: int, size: int, kind: str) -> list[Tensor]:
    """Gradients that were dropped or not used, as with one process."""
    torch.manual_seed(2)
    trunk = Dense()
    options: dict[str, Any] = {}
    if kind == "replicated":
        options["process_group"] = dist.group.WORLD
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(trunk, mesh=dist.init_device_mesh("cpu", (size,)))
    parameters = list(trunk.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.05)
    opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), **options)
    x = torch.randn(3, 12, 5)
    mine = x if kind == "alone" else x.chunk(size, dim=1)[rank]
    for set_to_none in (True, False):
        opt.backward(trunk(mine[0]), update=False)
        sgd.zero_grad(set_to_none=set_to_none)
        opt.backward(trunk(mine[1]), update=False)
        with pytest.raises(RuntimeError, match="wait for their update"):
            sgd.step()
        opt.backward(trunk(mine[2]))
        with pytest.raises(RuntimeError, match=r"still in .grad"):
            opt.backward(trunk(mine[0]))
        sgd.step()
    opt.backward(trunk(mine[0]), update=False)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="clip or unscale after the update"):
        opt.backward(trunk(mine[1]))
    sgd.zero_grad()
    opt.backward(trunk(mine[1]))
    sgd.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return [p.detach().clone() for p in whole]


@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
def test_gradients_that_are_dropped(pools: Callable[[int], Ranks], kind: str) -> None:
    first, *others = pools(2).run(_forgotten, 2, kind)
    for other in others:
        assert_equal(other, first)
    assert_near(first, _forgotten(0, 1, "alone"))


def test_methods_differ_on_this_network() -> None:
    """Else the other tests would show nothing."""
    states = {name: trained(0, 1, "alone", name)[0] for name in METHODS}
    for name, state in states.items():
        for other in states:
            if other < name:
                pairs = zip(state, states[other], strict=True)
                assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-3, (name, other)


def _inside_ddp(rank: int, size: int, kind: str) -> Any:
    """DistributedDataParallel around the trunk and the heads together."""
    torch.manual_seed(0)
    plain = Whole()
    network: nn.Module = plain
    if kind in ("find_unused_parameters", "static_graph"):
        network = nn.parallel.DistributedDataParallel(plain, **{kind: True})
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    try:
        opt = cs.MultiTaskOptimizer(plain.trunk, sgd, TASKS, cs.PCGrad())
    except ValueError as error:
        return str(error)
    if kind == "after":
        network = nn.parallel.DistributedDataParallel(plain)
    x = torch.randn(4, 12, 5)
    try:
        for batch in x:
            mine = batch if kind == "alone" else batch.chunk(size)[rank]
            if kind == "after, backward":
                network = nn.parallel.DistributedDataParallel(plain)
                opt.backward({task: network(mine, task) for task in TASKS})
            opt.step(lambda task, mine=mine: network(mine, task))
            if kind == "find_unused_parameters":
                network.require_backward_grad_sync = True  # As Lightning does after its step.
    except ValueError as error:
        return str(error)
    return [p.detach().clone() for p in plain.parameters()]


def test_a_wrapper_around_trunk_and_heads(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_inside_ddp, 2, "find_unused_parameters")
    assert_equal(first, second)
    assert_near(first, _inside_ddp(0, 1, "alone"))
    for text in pools(2).run(_inside_ddp, 2, "static_graph"):
        assert re.match("DistributedDataParallel must be built without static_graph=True", text)
    for kind in ("after", "after, backward"):
        for text in pools(2).run(_inside_ddp, 2, kind):
            assert re.match("process_group must be that of the DistributedDataParallel", text)
