"""Real networks as trunks, and their updates by a plain loop in float64.

`python tests/trunks.py` prints the table of docs/trunks.md.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torchvision_operators
from layers import Kind
from networks import projected_update, with_task_norms
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.trunk.layers import shared_parameters

TASKS = ["depth", "edges"]


@dataclass(frozen=True)
class Case:
    """A network, and the expected numbers of its layers."""

    name: str
    layers: int
    """Weights of convolutions and linear layers."""
    prioritized: int
    """Weights of layers whose output feeds a batch normalization directly."""
    options: dict[str, Any] = field(default_factory=lambda: {"num_classes": 0})
    size: int = 64
    """Height and width of the pictures."""

    def make(self) -> nn.Module:
        torchvision_operators.define()
        if self.name.startswith("deeplab"):
            segmentation = pytest.importorskip("torchvision.models.segmentation")
            model: nn.Module = getattr(segmentation, self.name)(**self.options)
        else:
            model = pytest.importorskip("timm").create_model(self.name, **self.options)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.double()


_DEEPLAB = {"weights": None, "weights_backbone": None, "num_classes": 21}
CASES = {
    case.name: case
    for case in (
        Case("resnet18", 20, 20),
        Case("hrnet_w18", 321, 321, {"features_only": True}),
        Case("mobilenetv3_large_100", 63, 46),
        Case("efficientnet_b0", 81, 49),
        Case("densenet121", 120, 59),
        Case("resnetv2_50", 53, 32),
        Case("levit_128s", 50, 50, size=224),
        Case("deeplabv3_resnet50", 61, 60, _DEEPLAB),
        Case("convnext_tiny", 58, 0),
        Case("vit_tiny_patch16_224", 49, 0, {"num_classes": 0, "img_size": 64}),
    )
}


class Setup:
    """A trunk in float64, and a loss per task; gradients conflict in some layers."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.trunk = case.make()
        self.converts = case.prioritized > 0
        if self.converts:
            with_task_norms(self.trunk, TASKS)
        self.method = cs.ConnectionStrength() if self.converts else cs.PCGrad()
        self.x = torch.randn(2, 3, case.size, case.size).double()

    def loss(self, task: str) -> Tensor:
        return self.loss_of(self.trunk(self.x), task)

    def loss_of(self, output: object, task: str) -> Tensor:
        """The mean of the output times random factors; the tasks' factors are partly opposed."""
        maps = [*output.values()] if isinstance(output, dict) else output
        total = torch.zeros((), dtype=torch.float64)
        for n, y in enumerate(maps if isinstance(maps, list | tuple) else [maps]):
            torch.manual_seed(n)
            first, second = torch.randn(2, *y.shape).double()
            total = total + (y * (first if task == TASKS[0] else second - 0.7 * first)).mean()
        return total

    def optimizer(self) -> cs.MultiTaskOptimizer:
        sgd = torch.optim.SGD(self.trunk.parameters(), lr=0.0)
        return cs.MultiTaskOptimizer(self.trunk, sgd, TASKS, self.method)


def plain_updates(
    setup: Setup, prioritized: dict[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Updates and sums of gradients, by the names of shared parameters.

    This uses nothing of the package but TaskBatchNorm and the list of shared parameters.
    """
    shared, grads = shared_parameters(setup.trunk), {}
    for task in TASKS:
        cs.nn.set_task(setup.trunk, task)
        found = torch.autograd.grad(setup.loss(task), [*shared.values()], materialize_grads=True)
        grads[task] = dict(zip(shared, found, strict=True))
    one, other = grads.values()
    sums = {name: one[name] + other[name] for name in shared}
    if not setup.converts:
        g, h = (torch.cat([x.flatten() for x in of_task.values()]) for of_task in (one, other))
        dot = (g @ h).clamp(max=0)
        merged = g + h - dot / (h @ h) * h - dot / (g @ g) * g
        pieces = merged.split([p.numel() for p in shared.values()])
        return {n: x.view_as(p) for (n, p), x in zip(shared.items(), pieces, strict=True)}, sums
    updates = dict(sums)
    for name, norm in prioritized.items():
        weight, kind = shared[name].detach(), Kind(name, tuple(shared[name].shape))
        pair = [one[name], other[name]]
        updates[name] = projected_update(weight, setup.trunk.get_submodule(norm), pair, kind)
    return updates, sums


def compared(ours: Setup, theirs: Setup, coverage: cs.Coverage) -> tuple[float, int]:
    """Compares a trunk's updates after a step with plain updates of a copy from before the step.

    Returns the largest error, relative to the tensor, and how many tensors are in conflict.
    """
    expected, sums = plain_updates(theirs, coverage.prioritized)
    error, conflicts = 0.0, 0
    for name, p in shared_parameters(ours.trunk).items():
        update = torch.zeros_like(p) if p.grad is None else p.grad
        scale = expected[name].abs().max().item()
        error = max(error, (update - expected[name]).abs().max().item() / max(scale, 1e-30))
        conflicts += bool((sums[name] - expected[name]).abs().max() > 1e-6 * scale)
    return error, conflicts


if __name__ == "__main__":
    print("| network | weights prioritized | of all elements | tensors projected | largest error |")
    print("| --- | --- | --- | --- | --- |")
    for case in CASES.values():
        ours = Setup(case)
        theirs, opt = copy.deepcopy(ours), ours.optimizer()
        opt.step(ours.loss)
        report = opt.coverage()
        worst, projected = compared(ours, theirs, report)
        share = sum(report.numel[n] for n in report.prioritized) / sum(report.numel.values())
        print(
            f"| {case.name} | {len(report.prioritized)} of {case.layers} | {100 * share:.1f} % |"
            f" {projected} of {len(report.numel)} | {worst:.0e} |",
            flush=True,
        )
