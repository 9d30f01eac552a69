"""`step_together` against `step`: time at several batch sizes, and memory.

The ways take turns in every round. A step is whole: passes, surgery and an optimizer without state.
Memory: of gradients as torch's dispatcher sees them (of convolutions' weights; the trunk of linear
layers has none of these), and the growth of the resident memory of a fresh process in three steps,
activations, gradients and all.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.device import milliseconds, on_device
from harness.gradient_memory import GradientMemory
from harness.settings import timm_model
from harness.timing import median_ratio, seconds
from torch import Tensor, nn

import cs_kernels as cs

WAYS = ("step", "together")
SIZE = 64
GPU_SIZE = 256
WIDTH, DEPTH = 4096, 6
TOLERANCE = 1e-9
"""The largest difference of updates in float64, relative to their largest element."""


def _network(name: str) -> nn.Module:
    if name == "linear":
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        return nn.Sequential(*layers)
    options = {"num_classes": 0} if name == "resnet18" else {"features_only": True}
    return timm_model(name, **options)


class Training:
    """A converted trunk, whose outputs are the predictions, and a batch."""

    def __init__(
        self,
        name: str,
        tasks: int,
        batch: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        size: int = SIZE,
    ) -> None:
        torch.manual_seed(0)
        names = [str(task) for task in range(tasks)]
        self.trunk = cs.nn.convert_task_batchnorm(_network(name), names).to(device, dtype)
        for norm in cs.nn.task_norms(self.trunk):  # Else rounding decides between the tasks.
            for child in norm.children():
                nn.init.uniform_(child.weight, 0.5, 1.5)
        self.sgd = torch.optim.SGD(self.trunk.parameters(), lr=1e-4)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, names)
        shape = (WIDTH,) if name == "linear" else (3, size, size)
        self.x = torch.randn(batch, *shape, dtype=dtype).to(device)

    def loss(self, output: Any, task: str) -> Tensor:
        maps = output if isinstance(output, list) else [output]
        total = output.new_zeros(()) if isinstance(output, Tensor) else output[0].new_zeros(())
        for z in maps:
            ends = -1, 1 + int(task)
            lean = torch.linspace(*ends, z.numel(), dtype=z.dtype, device=z.device).view(z.shape)
            total = total + (z * lean).tanh().mean()
        return total

    def steps(self) -> dict[str, Callable[[], object]]:
        x = self.x
        return {
            "step": lambda: self.opt.step(lambda task: self.loss(self.trunk(x), task)),
            "together": lambda: self.opt.step_together(
                lambda run: {task: self.loss(z, task) for task, z in run(x).items()}
            ),
        }

    def numel(self) -> tuple[int, int]:
        """The parameters of the trunk outside normalizations, and of its largest layer."""
        own = {p for norm in cs.nn.task_norms(self.trunk) for p in norm.parameters()}
        sizes = [p.numel() for p in self.trunk.parameters() if p not in own]
        return sum(sizes), max(sizes)

    def check(self) -> None:
        """The updates are alike."""
        updates = []
        state = {key: value.clone() for key, value in self.trunk.state_dict().items()}
        for step in self.steps().values():
            self.trunk.load_state_dict(state)
            step()
            updates.append([p.grad for p in self.trunk.parameters()])
        largest = max(g.abs().max() for g in updates[0] if g is not None)
        for one, other in zip(*updates, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one - other).abs().max() <= TOLERANCE * largest, one.shape


def resident(way: str, name: str, tasks: int, batch: int) -> int:
    """The growth of a fresh process in three steps, in bytes."""
    command = [sys.executable, __file__, way, name, str(tasks), str(batch)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout))


def _peak(way: str, name: str, tasks: int, batch: int) -> int:
    training = Training(name, tasks, batch)
    status = Path("/proc/self/status")

    def read(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return 1024 * int(line.split()[1])

    before = read("VmRSS")
    for _ in range(3):
        training.steps()[way]()
    return read("VmHWM") - before


CASES = [
    *(("resnet18", 4, batch) for batch in (1, 2, 4, 8, 16)),
    ("resnet18", 2, 4),
    ("resnet18", 8, 4),
    *(("hrnet_w18", tasks, 2) for tasks in (2, 4, 8)),
    *(("linear", tasks, 16) for tasks in (2, 4, 8)),
]


@pytest.mark.parametrize(("name", "tasks", "batch"), CASES)
def test_together(report: Any, quick: bool, name: str, tasks: int, batch: int) -> None:
    if quick and (name, tasks, batch) != CASES[0]:
        pytest.skip("one small network")
    Training(name, tasks, batch, torch.float64).check()
    training = Training(name, tasks, batch)
    steps = training.steps()
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(2 if quick else 9):
        for way in WAYS:
            times[way].append(seconds(steps[way]))
    gradients: dict[str, int] = {}
    for way in WAYS if name != "linear" else ():
        for p in training.trunk.parameters():
            p.grad = None
        with GradientMemory(training.trunk.parameters()) as memory:
            steps[way]()
        gradients[way] = memory.peak
    total, largest = training.numel()
    del training, steps
    report.add(
        "together",
        network=name,
        tasks=tasks,
        batch=batch,
        numel=total,
        largest=largest,
        milliseconds={way: 1e3 * statistics.median(times[way]) for way in WAYS},
        ratio=median_ratio(times["together"], times["step"]),
        gradient_bytes=gradients,
        aim_bytes=4 * (total + tasks * largest),
        resident_bytes={way: resident(way, name, tasks, batch) for way in WAYS},
    )


GPU_CASES = [
    *(("resnet18", 4, batch) for batch in (1, 4, 16)),
    *(("hrnet_w18", 4, batch) for batch in (2, 8)),
    *(("hrnet_w18", tasks, 8) for tasks in (2, 8)),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("name", "tasks", "batch"), GPU_CASES)
def test_together_on_a_gpu(report: Any, quick: bool, name: str, tasks: int, batch: int) -> None:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if quick and (name, tasks, batch) != GPU_CASES[0]:
        pytest.skip("one small network")
    Training(name, tasks, 2, torch.float64, "cuda", SIZE).check()
    training = Training(name, tasks, batch, device="cuda", size=GPU_SIZE)
    steps = training.steps()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    measured: dict[str, dict[str, int]] = {}
    for way in WAYS:
        for _ in range(3):
            steps[way]()
        training.sgd.zero_grad()
        measured[way] = on_device(steps[way])
    for _ in range(2 if quick else 15):
        for way in WAYS:
            times[way].append(milliseconds(steps[way], torch.cuda.synchronize))
    total, largest = training.numel()
    report.add(
        "gpu_together",
        network=name,
        tasks=tasks,
        batch=batch,
        size=GPU_SIZE,
        numel=total,
        largest=largest,
        milliseconds={way: statistics.median(times[way]) for way in WAYS},
        ratio=median_ratio(times["together"], times["step"]),
        on_device=measured,
    )


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
