"""`backward(losses)` against `backward(losses, features=z)`: ResNet-18 with a head a task.

The ways take turns in every round, each with a forward pass of its own, which is not timed. What
is timed is the call: K backward passes through heads and trunk, or K through the heads and one
through the trunk, and the method in between. Plain `sum(losses).backward()` is the least that a
step takes.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness.gradient_memory import GradientMemory
from harness.settings import timm_model
from harness.timing import median_ratio, seconds
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.engine.at_features import Features

WAYS = ("plain", "all", "features")
BATCH, SIZE = 8, 64
TOLERANCE = 1e-4
"""The largest difference, relative to the largest element of each tensor's gradient."""


def _head() -> nn.Module:
    """512 channels at a 32nd of the size to one map of a quarter of it."""
    return nn.Sequential(
        nn.Conv2d(512, 64, 1),
        nn.ReLU(),
        nn.Upsample(scale_factor=8, mode="bilinear"),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 1, 1),
    )


class Training:
    """The network, a batch, and the ways to make its gradients."""

    def __init__(self, tasks: int) -> None:
        torch.manual_seed(0)
        names = [str(task) for task in range(tasks)]
        self.trunk = timm_model("resnet18", num_classes=0, global_pool="")
        self.heads = nn.ModuleDict({name: _head() for name in names})
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.sgd = torch.optim.SGD(self.parameters, lr=1e-3)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, names, cs.MGDA())
        self.x = torch.randn(BATCH, 3, SIZE, SIZE)
        self.targets = {name: torch.randn(BATCH, 1, SIZE // 4, SIZE // 4) for name in names}

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        self.sgd.zero_grad()
        z = self.trunk(self.x)
        return z, {
            name: (head(z) - self.targets[name]).abs().mean() for name, head in self.heads.items()
        }

    def call(self, way: str) -> Callable[[], object]:
        z, losses = self.forward()
        if way == "plain":
            total = sum(losses.values())
            assert isinstance(total, Tensor)
            return total.backward
        features = z if way == "features" else None
        return lambda: self.opt.backward(losses, features=features)

    def check(self, way: str) -> None:
        """The update is that of torch.autograd.grad, with weights from the exact Gramian."""
        z, losses = self.forward()
        shared = [*self.trunk.parameters()]
        at = [z] if way == "features" else shared

        def grads(of: Sequence[Tensor], *given: Tensor) -> list[Tensor]:
            return [*torch.autograd.grad(of, at if not given else shared, given or None, True)]

        rows = [grads([loss]) for loss in losses.values()]
        flat = torch.stack([torch.cat([g.flatten().double() for g in row]) for row in rows])
        weights = cs.MGDA().weights(flat @ flat.T).tolist()
        update = [
            sum(w * g for w, g in zip(weights, of, strict=True)) for of in zip(*rows, strict=True)
        ]
        if way == "features":
            update = grads([z], *update)
        self.call(way)()
        for parameter, expected in zip(shared, update, strict=True):
            assert parameter.grad is not None
            error = (parameter.grad - expected).abs().max()
            assert error <= TOLERANCE * expected.abs().max(), parameter.shape

    def peak(self, way: str) -> tuple[int, int]:
        """Bytes of gradients: of weights, and of the features with their combination."""
        rows = list[int]()
        combine = self.opt.method.combine

        def counted(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            rows.append(sum(g.nbytes for row in gradients.rows for g in row if g is not None))
            combine(gradients, layout, step)

        call = self.call(way)
        with GradientMemory(self.parameters) as memory:
            if way == "features":
                self.opt.method.combine = counted  # type: ignore[method-assign]
            call()
            self.opt.method.combine = combine  # type: ignore[method-assign]
        tasks = len(self.heads)
        return memory.peak, sum(rows) // tasks * (tasks + 1)


@pytest.mark.parametrize("tasks", [2, 4, 8])
def test_features(report: Any, quick: bool, tasks: int) -> None:
    training = Training(tasks)
    for way in WAYS[1:]:
        training.check(way)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    checks = []
    for _ in range(2 if quick else 25):
        for way in WAYS:
            times[way].append(seconds(training.call(way)))
        z, losses = training.forward()
        shared = [*training.trunk.parameters()]
        checks.append(seconds(lambda: Features(z, losses, list(losses), shared, lambda _: [])))
    peaks = {way: training.peak(way) for way in WAYS}
    report.add(
        "features",
        network="resnet18",
        tasks=tasks,
        batch=BATCH,
        size=SIZE,
        numel=sum(p.numel() for p in training.trunk.parameters()),
        method="MGDA",
        milliseconds={way: 1e3 * statistics.median(times[way]) for way in WAYS},
        ratio=median_ratio(times["all"], times["features"]),
        over_plain=median_ratio(times["features"], times["plain"]),
        check_milliseconds=1e3 * statistics.median(checks),
        peak_bytes={way: sum(peaks[way]) for way in WAYS},
        feature_bytes=peaks["features"][1],
    )
