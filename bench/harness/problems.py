"""The layer shapes of networks, with random weights, normalizations and gradients."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cs_kernels as cs
from harness.measure import median, quantiles
from harness.peers import peers
from harness.training import HRNET18

Shape = tuple[int, ...]
METHODS: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": cs.PCGrad,
    "CAGrad": lambda: cs.CAGrad(0.4, rescale=0),
    "MGDA": cs.MGDA,
    "AlignedMTL": cs.AlignedMTL,
    "NashMTL": cs.NashMTL,
    "IMTLG": cs.IMTLG,
    "UPGrad": cs.UPGrad,
    "FairGrad": cs.FairGrad,
    "ConFIG": cs.ConFIG,
    "GradVac": cs.GradVac,
    "GradDrop": cs.GradDrop,
}
NO_LAYERS = cs.Layout((), cs.Coverage({}, {}, {}, {}))


def resnet(basic: bool, blocks: tuple[int, ...]) -> list[Shape]:
    """The convolutions of a ResNet with basic blocks or bottlenecks."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    inputs = 64
    for n, number in enumerate(blocks):
        width = 64 << n
        outputs = width if basic else 4 * width
        for block in range(number):
            if basic:
                shapes += [(width, inputs, 3, 3), (width, width, 3, 3)]
            else:
                shapes += [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
            if block == 0 and inputs != outputs:
                shapes.append((outputs, inputs, 1, 1))
            inputs = outputs
    return shapes


NETWORKS: dict[str, list[Shape]] = {
    "small": [(o, i, 3, 3) for i, o in pairwise([3, 24, 32, 48, 64, 96, 96, 64, 48, 32, 24])],
    "resnet18": resnet(True, (2, 2, 2, 2)),
    "resnet50": [*resnet(False, (3, 4, 6, 3)), (1000, 2048)],
    "wide": 24 * [(2048, 2048)],
}


def shapes_of(network: str) -> list[Shape]:
    """The shapes of a network's weights; for HRNet-18, the 305 convolutions of timm's network."""
    if network == "hrnet18":
        return [tuple(p.shape) for p in HRNET18.trunk().parameters() if p.dim() == 4]
    return NETWORKS[network]


def phase2_cases(*networks: str, tasks: Sequence[int]) -> Any:
    """Parametrizes by network, number of tasks, and both dtypes."""
    cases = [
        pytest.param(name, number, dtype, id=f"{name}-K{number}-{str(dtype).partition('.')[2]}")
        for name in networks
        for number in tasks
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return pytest.mark.parametrize(("network", "tasks", "dtype"), cases)


def phase2(
    updates: list[Tensor],
    grads: list[Tensor],
    weights: list[Tensor],
    gamma: Tensor,
    running_var: Tensor,
) -> Tensor:
    """Runs Phase 2 of a trunk; returns the concatenated priorities of all layers."""
    layers = len(weights)
    tasks = len(grads) // layers
    eps, out_channel_dims, groups = [1e-5] * len(grads), [0] * layers, [1] * layers
    priorities: Tensor = torch.ops.cs_kernels.phase2_update_(
        updates, grads, weights, gamma, running_var, eps, out_channel_dims, groups, tasks
    )
    return priorities


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Checks that each tensor's largest error is within a tolerance of its largest element."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance * other.abs().max()


class Problem:
    """A network's layers and K random gradients; about half of all pairs conflict."""

    def __init__(
        self, network: str, tasks: int, dtype: torch.dtype = torch.float32, quick: bool = False
    ) -> None:
        torch.manual_seed(0)
        shapes = shapes_of(network)[: 4 if quick else None]  # Enough for a smoke test.
        self.tasks = [str(task) for task in range(tasks)]
        self.weights = [torch.randn(shape).to(dtype) for shape in shapes]
        self.rows = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in self.tasks]
        numbers = tasks * sum(shape[0] for shape in shapes)
        self.norms = [torch.rand(numbers) + 0.5, torch.rand(numbers) + 0.5]
        self.updates = [torch.zeros_like(weight) for weight in self.weights]
        self.numel = sum(weight.numel() for weight in self.weights)
        self.itemsize = dtype.itemsize
        self.facts = {
            "network": f"{network}, 4 layers" if quick else network,
            "tasks": tasks,
            "numel": self.numel,
        }
        self.parameters = [nn.Parameter(weight) for weight in self.weights]
        names = map(str, range(len(shapes)))
        named = dict(zip(names, self.parameters, strict=True))
        self._gradients = cs.TaskGradients(named, self.tasks)
        self._overwritten = [grad.clone() for grad in self.rows[0]]
        """The first task's gradients in `combine`, which writes the update over them."""
        self._operands = [g for of_layer in zip(*self.rows, strict=True) for g in of_layer]

    def phase2(self) -> Tensor:
        return phase2(self.updates, self._operands, self.weights, *self.norms)

    def reference(self) -> None:
        with cs.use_backend("reference"):
            self.phase2()

    def phase2_facts(self, steps: list[float], copies: list[float]) -> dict[str, Any]:
        """A record's entries for Phase 2; TorchJD starts from prepared `.jac` fields."""
        milliseconds, moved = quantiles(steps), self.phase2_bytes()
        runs = peers("PCGrad", self.parameters, self.rows, prepared=True)
        runs["reference"] = self.reference
        seconds = 3 if len(steps) > 2 else 0
        device = self.weights[0].device.type
        return {
            **self.facts,
            "dtype": str(self.weights[0].dtype).removeprefix("torch."),
            "bytes": moved,
            "milliseconds": milliseconds,
            "copy_gigabytes_per_second": moved / statistics.median(copies) / 1e6,
            "peers": {
                name: {"ratio": median(run, 15, seconds, device) / milliseconds["p50"]}
                for name, run in runs.items()
            },
        }

    def phase2_bytes(self) -> int:
        """The bytes moved if each gradient and weight is read once and the update written once."""
        return (len(self.tasks) + 2) * self.numel * self.itemsize

    def check_phase2(self) -> None:
        """Compares the update and the priorities with the reference in float64."""
        priorities = self.phase2()
        exact = [[t.double() for t in ts] for ts in (self.updates, self._operands, self.weights)]
        with cs.use_backend("reference"):
            assert torch.equal(priorities, phase2(*exact, *self.norms))
        assert_close(self.updates, exact[0], 2 * torch.finfo(self.updates[0].dtype).eps)

    def refill(self) -> None:
        """Restores the gradients that `combine` overwrites."""
        for target, grad in zip(self._overwritten, self.rows[0], strict=True):
            target.copy_(grad)

    def combine(self, method: cs.Method) -> None:
        """Makes the update in `.grad` from the gradients that K backward passes have left there."""
        for task, row in zip(self.tasks, [self._overwritten, *self.rows[1:]], strict=True):
            for parameter, grad in zip(self.parameters, row, strict=True):
                parameter.grad = grad
            self._gradients.collect(task)
        method.combine(self._gradients, NO_LAYERS, cs.Step(tasks=tuple(self.tasks)))

    def combine_bytes(self, name: str) -> int:
        """The bytes moved: GradDrop reads each gradient once, other methods read it twice."""
        reads = len(self.tasks) * (1 if name == "GradDrop" else 2)
        return (reads + 1) * self.numel * self.itemsize

    def check_combine(self, make: Callable[[], cs.Method]) -> None:
        """Compares the update with the reference, which multiplies and adds in float32."""
        self.refill()
        self.combine(make())
        found = [p.grad.clone() for p in self.parameters if p.grad is not None]
        self.refill()
        with cs.use_backend("reference"):
            self.combine(make())
        assert_close(found, [p.grad for p in self.parameters if p.grad is not None], 1e-5)
