"""Shapes of networks' layers, and random weights, normalizations and gradients of these."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

import cs_kernels as cs

Shape = tuple[int, ...]
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


def hrnet18() -> list[Shape]:
    """The 305 convolutions of HRNet-18's stem and stages, 9.5 M weights; many are small."""
    shapes: list[Shape] = [(64, 3, 3, 3), (64, 64, 3, 3)]
    for inputs in (64, 256, 256, 256):
        shapes += [(64, inputs, 1, 1), (64, 64, 3, 3), (256, 64, 1, 1)]
    shapes.append((256, 64, 1, 1))
    widths = [18, 36, 72, 144]
    shapes += [(18, 256, 3, 3), (36, 256, 3, 3)]
    for branches, modules in ((2, 1), (3, 4), (4, 3)):
        if branches > 2:
            shapes.append((widths[branches - 1], widths[branches - 2], 3, 3))
        of_module = [(w, w, 3, 3) for w in widths[:branches] for _ in range(8)]
        for into in range(branches):
            for source in range(branches):
                if source > into:  # from a coarser branch
                    of_module.append((widths[into], widths[source], 1, 1))
                if source < into:  # from a finer one, halved again and again
                    of_module += (into - source - 1) * [(widths[source], widths[source], 3, 3)]
                    of_module.append((widths[into], widths[source], 3, 3))
        shapes += modules * of_module
    return shapes


NETWORKS: dict[str, list[Shape]] = {
    "small": [(o, i, 3, 3) for i, o in pairwise([3, 24, 32, 48, 64, 96, 96, 64, 48, 32, 24])],
    "resnet18": resnet(True, (2, 2, 2, 2)),
    "resnet50": [*resnet(False, (3, 4, 6, 3)), (1000, 2048)],
    "hrnet18": hrnet18(),
    "wide": 24 * [(2048, 2048)],
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def phase2(
    updates: list[Tensor],
    grads: list[Tensor],
    weights: list[Tensor],
    gamma: Tensor,
    running_var: Tensor,
) -> Tensor:
    """Phase 2 of a trunk; the priorities of one layer after the other."""
    layers = len(weights)
    tasks = len(grads) // layers
    eps, out_channel_dims, groups = [1e-5] * len(grads), [0] * layers, [1] * layers
    priorities: Tensor = torch.ops.cs_kernels.phase2_update_(
        updates, grads, weights, gamma, running_var, eps, out_channel_dims, groups, tasks
    )
    return priorities


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """The largest error of each tensor, relative to its largest element, is within a tolerance."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance * other.abs().max()


class Problem:
    """A network's layers and K random gradients: half of all pairs conflict."""

    def __init__(
        self, network: str, tasks: int, dtype: torch.dtype = torch.float32, quick: bool = False
    ) -> None:
        torch.manual_seed(0)
        shapes = NETWORKS[network][: 4 if quick else None]  # Enough to see that it runs.
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
        self._operands = [g for of_layer in zip(*self.rows, strict=True) for g in of_layer]

    def phase2(self) -> Tensor:
        return phase2(self.updates, self._operands, self.weights, *self.norms)

    def reference(self) -> None:
        with cs.use_backend("reference"):
            self.phase2()

    def phase2_bytes(self) -> int:
        """Each gradient and weight read once, the update written once."""
        return (len(self.tasks) + 2) * self.numel * self.itemsize

    def check_phase2(self) -> None:
        """The update and the priorities are those of the reference in float64."""
        priorities = self.phase2()
        exact = [[t.double() for t in ts] for ts in (self.updates, self._operands, self.weights)]
        with cs.use_backend("reference"):
            assert torch.equal(priorities, phase2(*exact, *self.norms))
        assert_close(self.updates, exact[0], 2 * torch.finfo(self.updates[0].dtype).eps)

    def combine(self, method: cs.Method) -> None:
        """From the gradients that K backward passes have left in `.grad` to the update there."""
        for task, row in zip(self.tasks, self.rows, strict=True):
            for parameter, grad in zip(self.parameters, row, strict=True):
                parameter.grad = grad
            self._gradients.collect(task)
        method.combine(self._gradients, NO_LAYERS, cs.Step(tasks=tuple(self.tasks)))

    def combine_bytes(self, name: str) -> int:
        """Gradients read for the Gramian and for the sum, or once; the update written."""
        reads = len(self.tasks) * (1 if name == "GradDrop" else 2)
        return (reads + 1) * self.numel * self.itemsize

    def check_combine(self, make: Callable[[], cs.Method]) -> None:
        """The update is that of the reference."""
        self.combine(make())
        found = [p.grad.clone() for p in self.parameters if p.grad is not None]
        with cs.use_backend("reference"):
            self.combine(make())
        assert_close(found, [p.grad for p in self.parameters if p.grad is not None], 1e-5)
