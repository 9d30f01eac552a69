"""Networks with every kind of layer, in odd sizes, and their training on ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any

import torch
import torch.distributed as dist
from networks import TASKS, sgd_of
from ranks import Pools, on_its_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cs_kernels as cs
from cs_kernels.ranks import buckets


def shard(*modules: nn.Module, replicas: bool = False) -> None:
    """Calls `fully_shard` on each module, over all ranks or in two replicas."""
    from torch.distributed.fsdp import fully_shard  # This import takes a second.

    size, device = dist.get_world_size(), next(modules[0].parameters()).device.type
    shape, names = ((2, size // 2), ("replicas", "shards")) if replicas else ((size,), None)
    mesh = dist.init_device_mesh(device, shape, mesh_dim_names=names)
    for module in modules:
        fully_shard(module, mesh=mesh)


def distributed(
    network: nn.Module, kind: str, *layers: nn.Module
) -> tuple[nn.Module, dict[str, Any]]:
    """A network distributed over ranks, and the options of its MultiTaskOptimizer."""
    if kind.startswith("DDP"):
        views = kind.endswith("views")
        network = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=views)
    if kind.startswith("fully_shard"):
        shard(*layers, network, replicas=kind.endswith("2-D"))
    return network, {"process_group": dist.group.WORLD if kind == "replicated" else None}


def optimizer_on_ranks(
    trunk: nn.Module,
    *arguments: Any,
    heads: Iterable[nn.Module] = (),
    tasks: list[str] = TASKS,
    lr: float = 0.1,
    **options: Any,
) -> cs.MultiTaskOptimizer:
    """An optimizer for a trunk that all ranks replicate; works in a single process, too."""
    options = {"process_group": dist.group.WORLD, **options}
    return cs.MultiTaskOptimizer(trunk, sgd_of(trunk, *heads, lr=lr), tasks, *arguments, **options)


def part_of_this_rank(samples: Tensor, dim: int = 0) -> Tensor:
    """The samples of this rank; in a single process, all samples."""
    if not dist.is_initialized():
        return samples
    return samples.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def conflicting_loss(y: Tensor, task: str) -> Tensor:
    """A loss whose target differs between tasks, so their gradients may be in conflict."""
    return (y - TASKS.index(task)).square().mean()


def whole_copies(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in parameters
    ]


class Network:
    """A trunk with fixed statistics, distributed over ranks in one of several ways, heads and data.

    The trunk has plain, grouped and transposed convolutions and linear layers. One convolution and
    one linear layer have no normalization.
    """

    def __init__(self, kind: str, rank: int, size: int, *, heads_too: bool = False) -> None:
        buckets.BUCKET_BYTES = 700  # Small enough for several buckets.
        torch.manual_seed(1)
        self.kind, self.rank, self.size = kind, rank, size
        plain = nn.Sequential(
            *(nn.Conv2d(3, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7), nn.ReLU()),
            *(nn.Conv2d(7, 14, 3, groups=7), nn.BatchNorm2d(14), nn.ReLU()),
            *(nn.ConvTranspose2d(14, 6, 2, stride=2, groups=2), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.ConvTranspose2d(6, 5, 3), nn.BatchNorm2d(5)),
            *(nn.Conv2d(5, 3, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
            *(nn.Linear(12, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 9)),
        )
        self.plain = cs.nn.convert_task_batchnorm(plain, TASKS).eval()
        for norm in cs.nn.task_norms(plain):
            for child in norm.children():
                nn.init.uniform_(child.weight, 0.5, 1.5)
                nn.init.uniform_(child.running_var, 0.5, 1.5)
        self.heads = nn.ModuleDict({task: nn.Linear(9, 2) for task in TASKS})
        self.x = torch.randn(8, 12, 3, 6, 5)
        self.targets = 2 * torch.randn(len(TASKS), 8, 12, 2)
        self.trunk, self.options = distributed(plain, kind, *(plain[n] for n in (0, 3, 6, 9, 14)))
        if heads_too and kind == "fully_shard":
            shard(*self.heads.values())
        self.parameters = [*plain.parameters(), *self.heads.parameters()]

    def start(
        self, method: cs.Method, schedule: cs.Schedule | None = None, **options: Any
    ) -> cs.MultiTaskOptimizer:
        # foreach, the default on a GPU, refuses a mix of sharded and whole tensors.
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9, foreach=False)
        given = self.trunk, self.optimizer, TASKS, method, schedule
        self.opt = cs.MultiTaskOptimizer(*given, **self.options, **options)
        return self.opt

    def start_phases(self, method: str, **options: Any) -> cs.MultiTaskOptimizer:
        """Starts a schedule with steps of both phases."""
        opt = self.start(METHODS[method](), both_phases(), **options)
        opt.start_epoch(1)
        return opt

    def part(self, batch: Tensor) -> Tensor:
        """The samples of a batch on this rank."""
        return batch if self.kind == "alone" else batch.chunk(self.size)[self.rank]

    def loss(self, step: int, task: str, samples: slice = slice(None)) -> Tensor:
        n = TASKS.index(task)
        x, target = self.part(self.x[step])[samples], self.part(self.targets[n, step])[samples]
        return (self.heads[task](self.trunk(x)) - target).square().mean()

    def state(self) -> list[Tensor]:
        return whole_copies(self.parameters)


METHODS: dict[str, Callable[[], cs.Method]] = {
    "ConnectionStrength": cs.ConnectionStrength,
    "PCGrad": partial(cs.PCGrad, seed=3),
    "Protect": partial(cs.Protect, TASKS[0], constraint_only=True),
    "Protect-kept": partial(cs.Protect, TASKS[0], refresh_every=2, rank=2),
    "PCGrad-layer": partial(cs.PCGrad, seed=3, groups="layer"),
    "CAGrad": cs.CAGrad,
    "CAGrad-kept": partial(cs.CAGrad, update_every=4),
    "GradDrop": partial(cs.GradDrop, [0.1, 0.0, 0.2], seed=4),
    "MGDA": partial(cs.MGDA, "loss+"),
    "SAGO": partial(cs.SAGO, TASKS[0]),
    "Sum": cs.Sum,
}


def both_phases() -> cs.Schedule:
    """A schedule whose first six steps in epoch 1 are four of Phase 2 and two of Phase 1."""
    return cs.Mixed(2, seed=3, draw="step")


def trained(rank: int, size: int, kind: str, method: str) -> tuple[list[Tensor], list[Any]]:
    """Trains for six steps; returns the state, and each step's losses and report."""
    network = Network(kind, rank, size)
    opt = network.start_phases(method)
    losses, phases = [], set()
    for step in range(6):
        phases.add(opt.phase)
        losses.append(opt.step(partial(network.loss, step)))
        report = opt.report()
        numbers = report.gramian, report.products, report.removed
        losses[-1] |= {str(n): number for n, number in enumerate(numbers) if number is not None}
    assert phases == {1, 2}
    return network.state(), losses


def assert_near(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


def assert_trains_as_one_process(
    pools: Pools, case: tuple[Callable[..., Any], str, int], method: str
) -> None:
    """`case`: a training function, the way it distributes its network, and the number of ranks."""
    train, kind, size = case
    found = pools(size).agreed(train, size, kind, method)
    assert_near(found, on_its_device(0, train, size, "alone", method))


def names_of(cases: Iterable[tuple[Callable[..., Any], str, int]]) -> list[str]:
    return [f"{train.__name__.strip('_')}-{kind}-{size}" for train, kind, size in cases]


def on_ranks(
    size: int, alone: Mapping[str, object] | None = None, rtol: float = 1e-6
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Turns a function into a test: its result must have the same bits on every rank.

    With `alone`, a single process must return nearly the same; `alone` replaces some of the ranks'
    arguments.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = signature(function).parameters.values()

        @wraps(function)
        def test(pools: Pools, **arguments: Any) -> None:
            given = {parameter.name: arguments[parameter.name] for parameter in parameters}
            found = pools(size).agreed(test, *given.values())
            if alone is not None:
                expected = on_its_device(0, function, *{**given, **alone}.values())
                assert_near(found, expected, rtol)

        pools = Parameter("pools", Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = Signature([pools, *parameters])
        test.on_a_rank = function
        return test

    return decorate


class Sent(TorchDispatchMode):
    """Counts float collectives and their elements by name; all other collectives are messages."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.elements, self.messages = Counter[str](), Counter[str](), 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_")
            tensors = [t for t in tree_leaves(args[:2]) if isinstance(t, Tensor)]
            if tensors[0].is_floating_point():
                self.numbers[name] += 1
                self.elements[name] += max(t.numel() for t in tensors)
            else:
                self.messages += 1
        return function(*args, **(kwargs or {}))


class BrokenError(Exception):
    """The error that the tests raise."""


class Dense(nn.Module):
    """A module with a trunk without normalization, heads, and a layer that no task reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7))
        self.heads = nn.ModuleDict({task: nn.Linear(7, 3) for task in TASKS})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, task: str | None = None) -> Any:
        """The loss of a task; without a task, a dict of all losses."""
        y = self.trunk(x)
        losses = {t: self.heads[t](y).square().mean() for t in TASKS if task in (None, t)}
        return losses if task is None else losses[task]
