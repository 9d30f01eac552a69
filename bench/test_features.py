"""`backward(losses)` against `backward(losses, features=z)`: ResNet-18 with one head per task.

The call is timed without the forward pass: K backward passes through heads and trunk, or K through
the heads and one through the trunk, with the method in between. Plain `sum(losses).backward()` is
the lower bound of a step's time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.counting import GradientMemory
from harness.measure import in_turns, medians, ratio, timed
from harness.problems import assert_close
from harness.training import Setting, Training, timm_model
from torch import nn

import cs_kernels as cs

WAYS = ("plain", "all", "features")


def _head(channels: int) -> nn.Module:
    """Turns 512 channels at 1/32 of the input size into maps at 1/4 of it."""
    return nn.Sequential(
        nn.Conv2d(512, 64, 1),
        nn.ReLU(),
        nn.Upsample(scale_factor=8, mode="bilinear"),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, channels, 1),
    )


@pytest.mark.parametrize("tasks", [2, 4, 8])
def test_features(report: Any, quick: bool, tasks: int) -> None:
    if quick and tasks != 2:
        pytest.skip("one small network")
    setting = Setting(
        name="resnet18",
        trunk=partial(timm_model, "resnet18", num_classes=0, global_pool=""),
        head=_head,
        channels={str(task): 1 for task in range(tasks)},
        batch=8,
        shape=(3, 64, 64),
    )
    training = Training(setting, cs.MGDA(), convert=False)
    shared = [*training.trunk.parameters()]

    def call(way: str) -> Callable[[], object]:
        """Makes a forward pass; returns the call to time."""
        training.optimizer.zero_grad()
        z = training.trunk(training.x)
        losses = training.losses(dict.fromkeys(training.heads, z))
        if way == "plain":
            return torch.stack([*losses.values()]).sum().backward
        return lambda: training.opt.backward(losses, features=z if way == "features" else None)

    def check(way: str) -> None:
        """Checks that the shared update is the gradient of losses weighted by MGDA in float64."""
        call(way)()
        found = [p.grad for p in shared if p.grad is not None]
        z = training.trunk(training.x)
        losses = training.losses(dict.fromkeys(training.heads, z))
        at = [z] if way == "features" else shared
        grads = (torch.autograd.grad(loss, at, retain_graph=True) for loss in losses.values())
        rows = torch.stack([torch.cat([g.flatten().double() for g in of]) for of in grads])
        weights = cs.MGDA().weights(rows @ rows.T)
        total = (weights * torch.stack([*losses.values()])).sum()
        assert_close(found, [*torch.autograd.grad(total, shared)], 1e-4)

    def peak(way: str) -> int:
        run = call(way)
        with GradientMemory(training.parameters) as memory:
            run()
        return memory.peak

    for way in WAYS[1:]:
        check(way)
    runs = {way: (lambda way=way: timed(call(way))()) for way in WAYS}
    times = in_turns(runs, 1 if quick else 25)
    peaks = {way: peak(way) for way in WAYS}
    with torch.no_grad():  # K gradients of z and their combination.
        feature_bytes = (tasks + 1) * training.trunk(training.x).nbytes
    peaks["features"] += feature_bytes
    report(
        "features",
        **setting.facts(),
        numel=sum(p.numel() for p in shared),
        method="MGDA",
        milliseconds=medians(times),
        ratio=ratio(times["all"], times["features"]),
        over_plain=ratio(times["features"], times["plain"]),
        peak_bytes=peaks,
        feature_bytes=feature_bytes,
    )
