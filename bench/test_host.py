"""The host time of a step's surgery on a GPU: everything except the kernels.

The CUDA backend's front end runs on CPU tensors, and its launches do nothing; no memory is pinned,
and nothing is transferred. With every method, a step saves the running statistics until it ends;
here, these copies count as host time, although kernels make them on a GPU. The network is HRNet-18
with 4 tasks: its convolutions are so many and so small that a GPU probably waits for the host.
"""

from typing import Any

import pytest
import torch
from harness.measure import in_turns, medians, timed
from harness.problems import METHODS
from harness.training import HRNET18

import cs_kernels as cs
from cs_kernels.ops import backends, cuda
from cs_kernels.trunk.statistics import RunningStatistics

TASKS = list(HRNET18.channels)


class Recorder(cs.ConnectionStrength):
    """Keeps the layout and the parameters that an optimizer passes to its method."""

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        self.parameters = dict(zip(gradients.names, gradients.parameters, strict=True))
        self.layout = layout
        super().combine(gradients, layout, step)


class _NoKernels:
    """Returns the kernels' tilings, and launches nothing."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name) if name.endswith("_tiling") else lambda **_: None


def test_host(report: Any, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if cuda._kernels is None:
        pytest.skip("cs_kernels was built without CUDA kernels")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trunk = cs.nn.convert_task_batchnorm(HRNET18.trunk(), TASKS)
    recorder = Recorder()
    sgd = torch.optim.SGD(trunk.parameters(), lr=0)
    cs.MultiTaskOptimizer(trunk, sgd, TASKS, recorder).step(
        lambda task: sum(z.mean() for z in trunk(torch.randn(2, 3, 32, 32)))
    )
    sgd.zero_grad()
    # Makes the CUDA backend accept CPU tensors, with kernels that do nothing.
    monkeypatch.setattr(cuda, "_kernels", _NoKernels(cuda._kernels))
    here = backends.Backend("cs_kernels.ops.cuda", ("cpu",), lambda: None)
    monkeypatch.setitem(backends._BACKENDS, "cuda", here)
    gradients = cs.TaskGradients(recorder.parameters, TASKS)
    running = RunningStatistics(trunk)
    step = cs.Step(tasks=tuple(TASKS))

    def keep() -> None:
        with running.restored_on_error(TASKS):
            pass

    def collect() -> float:
        spent = 0.0
        for task in TASKS:
            for parameter in recorder.parameters.values():
                # Left uninitialized, because a GPU's gradients do not pass through host caches.
                parameter.grad = torch.empty_like(parameter)
            spent += timed(lambda: gradients.collect(task))()
        return spent

    for name in ("Phase 2", "PCGrad", "CAGrad", "GradDrop"):
        method = METHODS.get(name, cs.ConnectionStrength)()
        runs = {
            "keep": timed(keep),
            "collect": collect,
            "combine": timed(lambda: method.combine(gradients, recorder.layout, step)),
        }
        with torch.no_grad(), cs.use_backend("cuda"):
            times = in_turns(runs, 5 if quick else 50)
        report(
            "host",
            method=name,
            layers=len(recorder.layout.layers),
            tasks=len(TASKS),
            threads=1,
            milliseconds=medians(times),
        )
