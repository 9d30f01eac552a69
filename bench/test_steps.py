"""Whole training steps: the paper's training-time table.

In the demo's network on the CPU, in HRNet-18 with four tasks on a GPU. All rows take turns in every
round, so that what else the machine does falls on all alike. A row's surgery is what lies between
the backward passes and the optimizer: on a GPU the time from the event before it to the event after
it, whether the device works or waits for the host.
"""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.device import on_device
from harness.settings import DEMO, HRNET18, Setting
from harness.textbook import textbook_pcgrad
from harness.timing import median_ratio
from torch import Tensor, nn

import cs_kernels as cs

Grads = list[list[Tensor]]
NO_GPU = "there is no GPU"


class _Peer(cs.Method):
    """A peer's method on the gradients of our step."""

    def __init__(self, combine: Callable[[list[nn.Parameter], Grads], list[Tensor] | None]) -> None:
        self._combine = combine

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        reached = gradients.reached()
        parameters = [gradients.parameters[i] for i in reached]
        updates = self._combine(parameters, [[row[i] for i in reached] for row in gradients.rows])
        if updates is not None:  # TorchJD writes them itself.
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.grad = update
        gradients.clear()


def _torchjd(name: str) -> cs.Method:
    """Its aggregator by `jac_to_grad`, as it comes, after the stack to `.jac` that this takes."""
    from harness.peers import TORCHJD, stacked, torchjd_step

    aggregator = TORCHJD[name](0)  # Not one that asks for the number of tasks.
    return _Peer(lambda parameters, grads: torchjd_step(aggregator, parameters, stacked(grads)))


ROWS: dict[str, Callable[[], cs.Method]] = {
    "Phase 1": cs.ConnectionStrength,
    "Sum": cs.Sum,
    "Phase 2": cs.ConnectionStrength,
    "PCGrad": cs.PCGrad,
    "CAGrad": cs.CAGrad,
    "MGDA": cs.MGDA,
    "AlignedMTL": cs.AlignedMTL,
    "NashMTL": cs.NashMTL,
    "IMTLG": cs.IMTLG,
    "UPGrad": cs.UPGrad,
    "GradDrop": cs.GradDrop,
    "textbook PCGrad": lambda: _Peer(lambda parameters, grads: textbook_pcgrad(grads)),
    "TorchJD PCGrad": lambda: _torchjd("PCGrad"),
    "TorchJD CAGrad": lambda: _torchjd("CAGrad"),
}


def _now(device: str) -> Any:
    """A mark in time: of the device, when it gets there."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, stop: Any) -> float:
    if isinstance(start, float):
        return 1e3 * (stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop))


class Training:
    """A setting's networks, a batch, one row's method to train them, and what its steps take."""

    def __init__(
        self, setting: Setting, method: cs.Method, schedule: cs.Schedule, backend: str | None
    ) -> None:
        torch.manual_seed(0)
        self.setting, self.backend = setting, backend
        tasks = list(setting.channels)
        self.trunk = cs.nn.convert_task_batchnorm(setting.trunk(), tasks).to(setting.device)
        self.heads = nn.ModuleDict({t: setting.head(n) for t, n in setting.channels.items()})
        self.heads.to(setting.device)
        adam = torch.optim.Adam([*self.trunk.parameters(), *self.heads.parameters()], lr=1e-4)
        self.opt = cs.MultiTaskOptimizer(self.trunk, adam, tasks, method, schedule)
        shape = (setting.size, setting.size)
        self.picture = torch.randn(setting.batch, 3, *shape, device=setting.device)
        self.targets = {
            task: torch.randn(setting.batch, n, *shape, device=setting.device)
            for task, n in setting.channels.items()
        }
        self.milliseconds: list[float] = []
        self.surgery: list[float] = []
        self.host: list[float] = []
        self._marks: list[tuple[Any, Any]] = []
        self._host = 0.0
        self._definition = copy.deepcopy(method)
        self._combine = method.combine
        gradients = self.opt._engine.ranks.gradients
        gradients.collect = self._marked(gradients.collect)
        method.combine = self._marked(method.combine)

    def _marked(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin, start = time.perf_counter(), _now(self.setting.device)
            result = part(*arguments)
            self._marks.append((start, _now(self.setting.device)))
            self._host += time.perf_counter() - begin
            return result

        return run

    def check(self) -> None:
        """A step, whose update is that of the reference; a peer's is at least finite."""
        ours = not isinstance(self._definition, _Peer)

        def compared(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            parameters = dict(zip(gradients.names, gradients.parameters, strict=True))
            same = cs.TaskGradients(parameters, gradients.tasks)
            same.rows = [list(row) for row in gradients.rows]
            if ours:
                self._definition.load_state_dict(self.opt.method.state_dict())
                with cs.use_backend("reference"):
                    self._definition.combine(same, layout, step)
            expected = [parameter.grad for parameter in gradients.parameters]
            self._combine(gradients, layout, step)
            for parameter, update in zip(gradients.parameters, expected, strict=True):
                assert parameter.grad is not None
                assert parameter.grad.isfinite().all()
                if ours and update is not None:
                    allowed = 1e-4 * update.abs().max()
                    assert (parameter.grad - update).abs().max() <= allowed, parameter.shape

        marked = self.opt.method.combine
        self.opt.method.combine = compared
        self.step()
        self.opt.method.combine = marked

    def loss(self, task: str) -> Tensor:
        output = self.heads[task](self.trunk(self.picture))
        return (output - self.targets[task]).abs().mean()

    def step(self) -> None:
        if self.backend is None:
            self.opt.step(self.loss)
        else:
            with cs.use_backend(self.backend):
                self.opt.step(self.loss)

    def timed_step(self) -> None:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        self._marks, self._host = [], 0.0
        start = _now(self.setting.device)
        self.step()
        self.milliseconds.append(_milliseconds(start, _now(self.setting.device)))
        self.surgery.append(sum(_milliseconds(*marks) for marks in self._marks))
        self.host.append(1e3 * self._host)

    def on_device(self) -> dict[str, int]:
        """What a step takes on a GPU, if there is one."""
        if self.setting.device != "cuda":
            return {}
        self.opt.optimizer.zero_grad()
        # Ours keep the update's buffer from step to step; the peers make theirs in each.
        gradients = self.opt._engine.ranks.gradients
        gradients._updates = [None] * len(gradients.parameters)
        return on_device(self.step)


def _trainings(setting: Setting) -> dict[str, Training]:
    rows: dict[str, Training] = {}
    gpu = [name for name in ("cuda", "triton") if cs.available_backends()[name] is None]
    for name, make in ROWS.items():
        schedule = cs.Sequential() if name == "Phase 1" else cs.Joint()
        try:
            rows[name] = Training(setting, make(), schedule, None)
        except ImportError:
            assert name.startswith("TorchJD"), name  # It, or what its method needs, is missing.
            continue
        if name == "Phase 2" and setting.device == "cuda":
            for backend in gpu[1:]:
                rows[f"{name}, {backend}"] = Training(setting, make(), schedule, backend)
    return rows


def _why_not(setting: Setting) -> str | None:
    if setting.device == "cuda" and not torch.cuda.is_available():
        return NO_GPU
    if setting is HRNET18 and find_spec("timm") is None:
        return "timm is not installed"
    return None


@pytest.mark.parametrize("setting", [DEMO, HRNET18], ids=lambda setting: setting.name)
def test_training_steps(report: Any, quick: bool, setting: Setting) -> None:
    reason = _why_not(setting)
    if reason == NO_GPU and quick:  # Far enough to see that it runs.
        setting = replace(setting, device="cpu", batch=1, size=64)
    elif reason is not None:
        pytest.skip(reason)
    trainings = _trainings(setting)
    if quick and reason is not None:
        trainings = {name: trainings[name] for name in ("Phase 1", "Phase 2")}
    for training in trainings.values():
        for _ in range(3):
            training.step()
        training.check()
    for _ in range(2 if quick else 25):
        for training in trainings.values():
            training.timed_step()
    first = trainings["Phase 1"].milliseconds
    for name, training in trainings.items():
        report.add(
            "steps" if setting.device == "cpu" else "gpu_steps",
            network=setting.name,
            tasks=len(setting.channels),
            batch=setting.batch,
            size=setting.size,
            method=name,
            milliseconds=statistics.median(training.milliseconds),
            surgery_milliseconds=statistics.median(training.surgery),
            surgery_host_milliseconds=statistics.median(training.host),
            surgery_share=median_ratio(training.surgery, training.milliseconds),
            over_phase_1=median_ratio(training.milliseconds, first) - 1,
            **training.on_device(),
        )
