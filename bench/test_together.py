"""`step_together` against `step`: time at several batch sizes, and memory.

A step includes the passes, the surgery and an optimizer without state. Memory is measured in two
ways: the gradients of convolutions' weights, as torch's dispatcher sees them (the trunk of linear
layers has none), and the growth of a fresh process's resident memory in three steps, including
activations and gradients.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.counting import GradientMemory
from harness.measure import in_turns, medians, on_device, ratio, timed
from harness.problems import assert_close
from harness.training import Setting, Training, timm_model
from torch import Tensor, nn

import cs_kernels as cs

WAYS = ("step", "step_together")
WIDTH, DEPTH = 4096, 6
CASES = [
    *(("resnet18", 4, batch) for batch in (1, 2, 4, 8, 16)),
    ("resnet18", 2, 4),
    ("resnet18", 8, 4),
    *(("hrnet_w18", tasks, 2) for tasks in (2, 4, 8)),
    *(("linear", tasks, 16) for tasks in (2, 4, 8)),
]
GPU_CASES = [
    *(("resnet18", 4, batch) for batch in (1, 4, 16)),
    *(("hrnet_w18", 4, batch) for batch in (2, 8)),
    *(("hrnet_w18", tasks, 8) for tasks in (2, 8)),
]


class Flat(nn.Module):
    """Flattens and concatenates all feature maps of the trunk."""

    def forward(self, z: Tensor | list[Tensor]) -> Tensor:
        return torch.cat([m.flatten(1) for m in (z if isinstance(z, list) else [z])], 1)


def _trunk(name: str) -> nn.Module:
    if name == "linear":
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        return nn.Sequential(*layers)
    options = {"num_classes": 0} if name == "resnet18" else {"features_only": True}
    model: nn.Module = timm_model(name, **options)
    return model


def training_of(
    name: str, tasks: int, batch: int, device: str = "cpu", size: int = 64, **options: Any
) -> Training:
    """The training of a trunk whose outputs are the predictions."""
    return Training(
        Setting(
            name=name,
            trunk=lambda: _trunk(name),
            head=lambda channels: Flat(),
            channels={str(task): 1 for task in range(tasks)},
            batch=batch,
            shape=(WIDTH,) if name == "linear" else (3, size, size),
            device=device,
        ),
        **options,
    )


def check(training: Training) -> None:
    """Checks that `step` and `step_together` make the same update in float64."""
    updates = []
    state = {key: value.clone() for key, value in training.trunk.state_dict().items()}
    for way in WAYS:
        training.trunk.load_state_dict(state)
        getattr(training, way)()
        grads = [p.grad for p in training.trunk.parameters() if p.grad is not None]
        updates.append([torch.cat([grad.flatten() for grad in grads])])
    assert_close(*updates, 1e-9)


def resident(way: str, *case: Any) -> int:
    """The growth of a fresh process's resident memory in three steps, in bytes."""
    command = [sys.executable, __file__, way, *map(str, case)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout))


def _growth(way: str, name: str, tasks: str, batch: str) -> int:
    training = training_of(name, int(tasks), int(batch))

    def read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    before = read("VmRSS")
    for _ in range(3):
        getattr(training, way)()
    return read("VmHWM") - before


def peak(training: Training, way: str) -> int:
    for p in training.trunk.parameters():
        p.grad = None
    with GradientMemory(training.trunk.parameters()) as memory:
        getattr(training, way)()
    return memory.peak


def measure(report: Any, table: str, training: Training, rounds: int, **more: Any) -> None:
    device = training.x.device.type
    before = torch.cuda.synchronize if device == "cuda" else None
    runs = {way: timed(getattr(training, way), device, before) for way in WAYS}
    times = in_turns(runs, rounds)
    own = {p for norm in cs.nn.task_norms(training.trunk) for p in norm.parameters()}
    sizes = [p.numel() for p in training.trunk.parameters() if p not in own]
    milliseconds = medians(times)
    report(
        table,
        **training.setting.facts(),
        numel=sum(sizes),
        largest=max(sizes),
        milliseconds={"step": milliseconds["step"], "together": milliseconds["step_together"]},
        ratio=ratio(times["step_together"], times["step"]),
        aim_bytes=4 * (sum(sizes) + len(training.heads) * max(sizes)),
        **more,
    )


@pytest.mark.parametrize(("name", "tasks", "batch"), CASES)
def test_together(report: Any, quick: bool, name: str, tasks: int, batch: int) -> None:
    if quick and (name, tasks, batch) != CASES[0]:
        pytest.skip("one small network")
    check(training_of(name, tasks, batch, dtype=torch.float64))
    training = training_of(name, tasks, batch)
    gradients, growth = {}, {}
    for way, key in zip(WAYS, ("step", "together"), strict=True):
        growth[key] = resident(way, name, tasks, batch)
        if name != "linear":
            gradients[key] = peak(training, way)
    more = {"gradient_bytes": gradients, "resident_bytes": growth}
    measure(report, "together", training, 1 if quick else 9, **more)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("name", "tasks", "batch"), GPU_CASES)
def test_together_on_a_gpu(report: Any, quick: bool, name: str, tasks: int, batch: int) -> None:
    pytest.importorskip("timm")
    if quick and (name, tasks, batch) != GPU_CASES[0]:
        pytest.skip("one small network")
    check(training_of(name, tasks, 2, "cuda", dtype=torch.float64))
    training = training_of(name, tasks, batch, "cuda", 256)
    measured = {way: on_device(getattr(training, way)) for way in WAYS}
    measure(report, "gpu_together", training, 2 if quick else 15, on_device=measured)


if __name__ == "__main__":
    print(json.dumps(_growth(*sys.argv[1:])))
