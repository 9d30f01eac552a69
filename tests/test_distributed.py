"""Many ranks: the bits of each other, and what one process gives on the whole batch."""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import assert_equal
from ranks import Ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cs_kernels as cs
from cs_kernels.distributed import buckets, control

pytestmark = pytest.mark.xdist_group("ranks")

TASKS = ["depth", "normals", "edges"]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Ranks]]:
    """Processes by their number, kept for the whole module."""
    started: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size)
        return started[size]

    yield pool
    for ranks in started.values():
        ranks.stop()


# --- a network with every kind of layer, in odd sizes --------------------------------------------


class Trunk(nn.Module):
    """Plain, grouped and transposed convolutions and linear layers; one has nothing behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 7, 3, padding=1, bias=False),
            nn.BatchNorm2d(7),
            nn.ReLU(),
            nn.Conv2d(7, 14, 3, groups=7),
            nn.BatchNorm2d(14),
            nn.ReLU(),
            nn.ConvTranspose2d(14, 6, 2, stride=2, groups=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 5, 3),
            nn.BatchNorm2d(5),
            nn.Conv2d(5, 3, 1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 11),
            nn.BatchNorm1d(11),
            nn.Tanh(),
            nn.Linear(11, 9),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Network:
    """A trunk with fixed statistics, heads, data, and how it is distributed."""

    def __init__(self, kind: str, rank: int, size: int, *, heads_too: bool = False) -> None:
        torch.manual_seed(1)
        self.kind, self.rank, self.size = kind, rank, size
        plain = cs.nn.convert_task_batchnorm(Trunk(), TASKS)
        for norm in cs.nn.task_norms(plain):
            for child in norm.children():
                nn.init.uniform_(child.weight, 0.5, 1.5)
                nn.init.uniform_(child.running_var, 0.5, 1.5)
        self.trunk: nn.Module = plain.eval()
        self.heads = nn.ModuleDict({task: nn.Linear(9, 2) for task in TASKS})
        self.x = torch.randn(8, 12, 3, 6, 5)
        self.targets = 2 * torch.randn(len(TASKS), 8, 12, 2)
        self.options: dict[str, Any] = {}
        self.plain = plain
        if kind == "replicated":
            self.options["process_group"] = dist.group.WORLD
        if kind.startswith("DDP"):
            self.trunk = nn.parallel.DistributedDataParallel(
                plain, gradient_as_bucket_view=kind.endswith("views")
            )
        if kind.startswith("fully_shard"):
            from torch.distributed.fsdp import fully_shard

            names = {"mesh_dim_names": ("replicas", "shards")}
            mesh = (
                dist.init_device_mesh("cpu", (2, size // 2), **names)
                if kind.endswith("2-D")
                else dist.init_device_mesh("cpu", (size,))
            )
            for n in (0, 3, 6, 9, 14):
                fully_shard(plain.layers[n], mesh=mesh)
            fully_shard(plain, mesh=mesh)
            for head in self.heads.values() if heads_too else ():
                fully_shard(head, mesh=mesh)
        self.parameters = [*plain.parameters(), *self.heads.parameters()]

    def start(
        self, method: cs.Method, schedule: cs.Schedule | None = None, **options: Any
    ) -> cs.MultiTaskOptimizer:
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)
        given = self.trunk, self.optimizer, TASKS, method, schedule
        self.opt = cs.MultiTaskOptimizer(*given, **self.options, **options)
        return self.opt

    def part(self, batch: Tensor) -> Tensor:
        """The samples of a batch on this rank."""
        return batch if self.kind == "alone" else batch.chunk(self.size)[self.rank]

    def loss(self, step: int, task: str, samples: slice | None = None) -> Tensor:
        n = TASKS.index(task)
        x, target = self.part(self.x[step]), self.part(self.targets[n, step])
        if samples is not None:
            x, target = x[samples], target[samples]
        result: Tensor = (self.heads[task](self.trunk(x)) - target).square().mean()
        return result

    def state(self) -> list[Tensor]:
        """Whole parameters."""
        return [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in self.parameters
        ]


METHODS: dict[str, Callable[[], cs.Method]] = {
    "ConnectionStrength": cs.ConnectionStrength,
    "PCGrad": partial(cs.PCGrad, seed=3),
    "PCGrad-layer": partial(cs.PCGrad, seed=3, groups="layer"),
    "CAGrad": cs.CAGrad,
    "GradDrop": partial(cs.GradDrop, [0.1, 0.0, 0.2], seed=4),
    "MGDA": partial(cs.MGDA, "loss+"),
    "Sum": cs.Sum,
}


KINDS = [
    ("replicated", 3),
    ("replicated", 2),
    ("DDP", 2),
    ("fully_shard", 2),
    ("DDP views", 3),
    ("fully_shard", 3),
    ("fully_shard 2-D", 4),
]
"""How ranks share the network, and their number."""


def _both_phases() -> cs.Schedule:
    """Six steps with seed 3: four of Phase 2, two of Phase 1."""
    return cs.Mixed(2, seed=3, draw="step")


def _trained(
    rank: int, size: int, kind: str, method: str, nbytes: int = 700
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    """Parameters and losses of six steps, and the phases."""
    buckets.BUCKET_BYTES = nbytes
    network = Network(kind, rank, size)
    opt = network.start(METHODS[method](), _both_phases())
    opt.start_epoch(1)
    losses, phases = [], []
    for step in range(6):
        phases.append(opt.phase)
        losses.append(opt.step(partial(network.loss, step)))
    return network.state(), losses, phases


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


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
    results = pools(size).run(_trained, size, kind, method)
    for other in results[1:]:
        assert_equal(other, results[0])
    state, losses, phases = _trained(0, size, "alone", method)
    assert set(phases) == {1, 2}
    assert_near(results[0][0], state)
    assert_near(results[0][1], losses)


# --- other ways to train --------------------------------------------------------------------------


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
    opt = network.start(METHODS[method](), _both_phases())
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
    assert_near(first, _trained(0, 2, "alone", method)[0])


def _scaled(rank: int, size: int, kind: str, method: str) -> tuple[list[Tensor], float]:
    """With a scaler; in one step, the gradient of one rank is not finite."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size, heads_too=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt = network.start(METHODS[method](), _both_phases(), scaler=scaler)
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


class Dense(nn.Module):
    """A network without normalization, whose heads are in the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7))
        self.heads = nn.ModuleDict({task: nn.Linear(7, 3) for task in TASKS})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {task: self.heads[task](y).square().mean() for task in TASKS}


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
    with cs.nn.active_task(trunk, TASKS[2]), torch.no_grad():
        for n in range(20):
            trunk(torch.randn(5, 4) * (rank + 1) * torch.arange(1, 5) ** n)
    opt.step(lambda task: trunk(x).square().mean(), tasks=TASKS[:2])
    return [found, opt.priority(), trunk[0][0](x).detach()]


def test_statistics_count_with_the_ranks_that_have_labels(pools: Callable[[int], Ranks]) -> None:
    (found, priority, y), (other, other_priority, z) = pools(2).run(_statistics_of_some, 2)
    assert_equal(found, other)
    assert_equal(priority, other_priority)
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


# --- what goes wrong ------------------------------------------------------------------------------


class BrokenError(Exception):
    """That of one rank."""


def _with_a_failing_rank(rank: int, size: int, kind: str, method: str) -> list[Any]:
    """Rank 1 fails in the second task of a step: everywhere an error, and nothing has changed."""
    buckets.BUCKET_BYTES = 700
    network = Network(kind, rank, size)
    network.trunk.train()
    opt = network.start(METHODS[method](), _both_phases())
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
    group = dist.new_group(range(size), timeout=timedelta(seconds=2))
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
        return trunk(torch.ones(3, 5))[task]

    with pytest.raises((BrokenError, RuntimeError)) as caught:
        opt.step(loss)
    shards = [p.to_local() for p in sgd.param_groups[0]["params"]]
    rows = [p.chunk(size)[rank] for p in before]
    assert_equal(shards, rows)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_failing_shard_is_named_after_the_timeout(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_with_a_failing_shard, 2)
    assert re.match("RankError: rank 1 failed in step 0: BrokenError: no labels", first)
    assert second == "BrokenError: no labels"


def _on_a_grid(rank: int, size: int) -> list[Any]:
    control._GRID_FROM = 2
    try:
        assert control.grid_rows(size) == 2
        failing = _with_a_failing_rank(rank, size, "replicated", "Sum")
        return [_trained(rank, size, "replicated", "PCGrad")[:2], failing[0]]
    finally:
        control._GRID_FROM = 16


def test_messages_on_a_grid(pools: Callable[[int], Ranks]) -> None:
    """Two rows of two ranks, as many ranks have."""
    results = pools(4).run(_on_a_grid, 4)
    for trained, _ in results:
        assert_equal(list(trained), list(results[0][0]))
    assert_near(results[0][0][0], _trained(0, 4, "alone", "PCGrad")[0])
    for rank in (0, 2, 3):
        assert all(text.startswith("rank 1 failed") for _, text in results[rank][1])
    assert [control.grid_rows(size) for size in (15, 16, 17, 512)] == [1, 4, 1, 16]


class Failing(torch.optim.SGD):
    """Fails where it is told to."""

    fails = 0

    def step(self, closure: Any = None) -> None:
        self.fails -= 1
        if self.fails == 0:
            raise BrokenError("in the torch optimizer")
        super().step()


def _with_a_failing_optimizer(rank: int, size: int) -> list[str]:
    """In Phase 1 the others are in the next task's passes by then."""
    texts = []
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
    return texts


def test_an_optimizer_that_fails_on_one_rank(pools: Callable[[int], Ranks]) -> None:
    of_ranks = pools(2).run(_with_a_failing_optimizer, 2)
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
        dist.new_group([0, 2], use_local_synchronization=True)
    try:
        with pytest.raises(RuntimeError) as caught:
            cs.MultiTaskOptimizer(trunk, sgd, TASKS, cs.PCGrad(), **options)
    finally:
        if rank == 1:
            dist.new_group([1], use_local_synchronization=True)
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
        if rank == 0 and what == "state" and step == 1:
            adam.load_state_dict(adam.state_dict())
            adam.state[trunk.weight]["exp_avg"].add_(1)
        if rank == 0 and what == "parameter" and step == 5:
            trunk.bias.data.add_(1)
        try:
            opt.step(lambda task: trunk(torch.ones(2, 3)).square().mean())
        except RuntimeError as error:
            return step, str(error)
    return 70, ""


@pytest.mark.parametrize(("what", "noticed"), [("state", 64), ("parameter", 64)])
def test_ranks_that_drift_are_told_so(
    pools: Callable[[int], Ranks], what: str, noticed: int
) -> None:
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
            opt._steps += 1
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


# --- statistics, weightings, priorities ----------------------------------------------------------


def _with_own_statistics(rank: int, size: int) -> list[Any]:
    """In training mode every rank normalizes with the statistics of its own samples."""
    network = Network("replicated", rank, size)
    network.trunk.train()
    opt = network.start(cs.ConnectionStrength(), _both_phases())
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
    opt = network.start(cs.MGDA("loss"), _both_phases(), weighting=made)
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


def test_methods_differ_on_this_network() -> None:
    """Else the other tests would show nothing."""
    states = {name: _trained(0, 1, "alone", name)[0] for name in METHODS}
    for name, state in states.items():
        for other in states:
            if other < name:
                pairs = zip(state, states[other], strict=True)
                assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-3, (name, other)


# --- wrappers and arguments ----------------------------------------------------------------------


class Whole(nn.Module):
    """A trunk and heads in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7))
        self.heads = nn.ModuleDict({task: nn.Linear(7, 3) for task in TASKS})

    def forward(self, x: Tensor, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(x)).square().mean()
        return result


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
