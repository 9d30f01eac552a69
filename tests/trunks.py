"""Real networks as trunks, and the update of each by a plain loop in float64.

`python tests/trunks.py` prints the table of docs/trunks.md.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torchvision_operators
from layers import Kind
from networks import projected_update, with_task_norms
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.trunk.layers import shared_parameters
from cs_kernels.trunk.watcher import LAYERS

TASKS = ["depth", "edges"]


@dataclass(frozen=True)
class Case:
    """A network, and what is known of it."""

    make: Callable[[], nn.Module]
    layers: int
    """Weights of convolutions and linear layers."""
    prioritized: int
    """The weights whose layer's output goes straight into a batch normalization."""
    size: int = 64
    """Height and width of the pictures."""


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchvision_operators.define()
        model: nn.Module = pytest.importorskip("timm").create_model(name, **options)
        return model

    return make


def _deeplab() -> nn.Module:
    torchvision_operators.define()
    models = pytest.importorskip("torchvision.models.segmentation")
    model: nn.Module = models.deeplabv3_resnet50(
        weights=None, weights_backbone=None, num_classes=21
    )
    return model


CASES = {
    "resnet18": Case(_timm("resnet18", num_classes=0), 20, 20),
    "hrnet_w18": Case(_timm("hrnet_w18", features_only=True), 321, 321),
    "mobilenetv3_large_100": Case(_timm("mobilenetv3_large_100", num_classes=0), 63, 46),
    "efficientnet_b0": Case(_timm("efficientnet_b0", num_classes=0), 81, 49),
    "densenet121": Case(_timm("densenet121", num_classes=0), 120, 59),
    "resnetv2_50": Case(_timm("resnetv2_50", num_classes=0), 53, 32),
    "levit_128s": Case(_timm("levit_128s", num_classes=0), 50, 50, size=224),
    "deeplabv3_resnet50": Case(_deeplab, 61, 60),
    "convnext_tiny": Case(_timm("convnext_tiny", num_classes=0), 58, 0),
    "vit_tiny_patch16_224": Case(_timm("vit_tiny_patch16_224", num_classes=0, img_size=64), 49, 0),
}


class Setup:
    """A trunk in float64, and a loss a task whose gradients are in conflict here and there."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.trunk = case.make().double()
        for module in self.trunk.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.converts = case.prioritized > 0
        if self.converts:
            with_task_norms(self.trunk, TASKS)
        self.method = cs.ConnectionStrength() if self.converts else cs.PCGrad()
        self.x = torch.randn(2, 3, case.size, case.size).double()

    def loss(self, task: str) -> Tensor:
        """`loss_of` the trunk's output."""
        return self.loss_of(self.trunk(self.x), task)

    def loss_of(self, output: object, task: str) -> Tensor:
        """The mean of the outputs, times random numbers that lean against the first task's."""
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
    """Updates and sums of gradients by name of the shared parameter.

    Nothing of the package but TaskBatchNorm itself computes them.
    """
    shared = shared_parameters(setup.trunk)
    norms = cs.nn.task_norms(setup.trunk)
    grads: dict[str, list[Tensor]] = {name: [] for name in shared}
    for task in TASKS:
        for norm in norms:
            norm.active = task
        found = torch.autograd.grad(setup.loss(task), [*shared.values()], allow_unused=True)
        for (name, p), grad in zip(shared.items(), found, strict=True):
            grads[name].append(torch.zeros_like(p) if grad is None else grad)
    sums = {name: sum(of_tasks[1:], of_tasks[0]) for name, of_tasks in grads.items()}
    if not setup.converts:
        one, other = (torch.cat([g[i].flatten() for g in grads.values()]) for i in range(2))
        dot = (one @ other).clamp(max=0)
        merged = one + other - dot / (other @ other) * other - dot / (one @ one) * one
        pieces = merged.split([p.numel() for p in shared.values()])
        return {n: piece.view_as(shared[n]) for n, piece in zip(grads, pieces, strict=True)}, sums
    updates = dict(sums)
    for name, norm_name in prioritized.items():
        weight = shared[name].detach()
        norm, kind = setup.trunk.get_submodule(norm_name), Kind(name, tuple(weight.shape))
        updates[name] = projected_update(weight, norm, grads[name], kind)
    return updates, sums


def layer_weights(trunk: nn.Module) -> list[str]:
    """The names of all weights of convolutions and linear layers."""
    return [
        f"{name}.weight"
        for name, module in trunk.named_modules()
        if isinstance(module, LAYERS) and "weight" in module._parameters
    ]


def compare(case: Case) -> tuple[cs.Coverage, float, int]:
    """The coverage; the largest error, relative to the tensor; the tensors in conflict."""
    ours = Setup(case)
    theirs = copy.deepcopy(ours)
    opt = ours.optimizer()
    opt.step(ours.loss)
    return opt.coverage(), *compared(ours, theirs, opt.coverage())


def compared(ours: Setup, theirs: Setup, coverage: cs.Coverage) -> tuple[float, int]:
    """The updates in a trunk after a step, with those of another as it was before the step."""
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
    for label, network in CASES.items():
        report, worst, projected = compare(network)
        share = sum(report.numel[n] for n in report.prioritized) / sum(report.numel.values())
        print(
            f"| {label} | {len(report.prioritized)} of {network.layers} | {100 * share:.1f} % |"
            f" {projected} of {len(report.numel)} | {worst:.0e} |",
            flush=True,
        )
