"""Networks with every kind of layer, in odd sizes, and how ranks train them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.ranks import buckets

TASKS = ["depth", "normals", "edges"]


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


def both_phases() -> cs.Schedule:
    """Six steps with seed 3: four of Phase 2, two of Phase 1."""
    return cs.Mixed(2, seed=3, draw="step")


def trained(
    rank: int, size: int, kind: str, method: str, nbytes: int = 700
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    """Parameters, losses and reports of six steps, and the phases."""
    buckets.BUCKET_BYTES = nbytes
    network = Network(kind, rank, size)
    opt = network.start(METHODS[method](), both_phases())
    opt.start_epoch(1)
    losses, phases = [], []
    for step in range(6):
        phases.append(opt.phase)
        losses.append(opt.step(partial(network.loss, step)))
        report = opt.report()
        numbers = report.gramian, report.products, report.removed
        losses[-1] |= {str(n): number for n, number in enumerate(numbers) if number is not None}
    return network.state(), losses, phases


def assert_near(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


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


class Whole(nn.Module):
    """A trunk and heads in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 7))
        self.heads = nn.ModuleDict({task: nn.Linear(7, 3) for task in TASKS})

    def forward(self, x: Tensor, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(x)).square().mean()
        return result
