"""Whole training steps: the paper's training-time table.

The network is the demo's on the CPU, and HRNet-18 with four tasks on a GPU. A row's surgery is all
work between the backward passes and the optimizer. On a GPU, it is the time between two events,
which includes waiting for the host.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.measure import elapsed, in_turns, mark, on_device, ratio, timed
from harness.peers import aggregator, stacked, textbook, torchjd_step
from harness.problems import METHODS, assert_close
from harness.training import DEMO, HRNET18, Setting, Training

import cs_kernels as cs


class _Peer(cs.Method):
    """A peer's method on the gradients of our step; it returns the updates or writes `.grad`."""

    def __init__(self, combine: Callable[..., Any]) -> None:
        self._combine = combine

    def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
        reached = gradients.reached()
        parameters = [gradients.parameters[i] for i in reached]
        updates = self._combine(parameters, [[row[i] for i in reached] for row in gradients.rows])
        for parameter, update in zip(parameters, updates or (), strict=updates is not None):
            parameter.grad = update
        gradients.clear()


def _torchjd(name: str) -> cs.Method:
    """TorchJD's method with default options, after the gradients are stacked into `.jac`."""
    method = aggregator(name, 0)  # Only for methods that do not need the number of tasks.
    return _Peer(lambda parameters, rows: torchjd_step(method, parameters, stacked(rows)))


ROWS: dict[str, Callable[[], cs.Method]] = {
    "Phase 1": cs.ConnectionStrength,
    "Sum": cs.Sum,
    "Phase 2": cs.ConnectionStrength,
    "Phase 2, triton": cs.ConnectionStrength,
    **METHODS,
    "textbook PCGrad": lambda: _Peer(lambda parameters, rows: textbook("PCGrad", rows)),
    "TorchJD PCGrad": lambda: _torchjd("PCGrad"),
    "TorchJD CAGrad": lambda: _torchjd("CAGrad"),
}


class Row(Training):
    """A row of the table: its training, and the time marks around its surgery."""

    def __init__(self, name: str, setting: Setting) -> None:
        schedule = cs.Sequential() if name == "Phase 1" else cs.Joint()
        super().__init__(setting, ROWS[name](), schedule, adam=True)
        self.device, self.in_triton = setting.device, name.endswith("triton")
        self.marks: list[tuple[Any, Any]] = []
        self.host = 0.0
        self.opt.method.combine = self.marked(self.opt.method.combine)

    def step(self) -> None:
        collect = cs.TaskGradients.collect

        def marked(gradients: cs.TaskGradients, task: str) -> bool:
            return bool(self.marked(collect)(gradients, task))

        with (
            pytest.MonkeyPatch.context() as patch,
            cs.use_backend("triton") if self.in_triton else contextlib.nullcontext(),
        ):
            patch.setattr(cs.TaskGradients, "collect", marked)
            super().step()

    def marked(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begin, start = time.perf_counter(), mark(self.device)
            result = part(*arguments)
            self.marks.append((start, mark(self.device)))
            self.host += 1e3 * (time.perf_counter() - begin)
            return result

        return run

    def check(self) -> None:
        """Compares a step's update with the reference's; a peer's must at least be finite."""
        combine, method = self.opt.method.combine, self.opt.method

        def compared(gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            parameters = dict(zip(gradients.names, gradients.parameters, strict=True))
            same = cs.TaskGradients(parameters, gradients.tasks)
            same.rows = [[g if g is None else g.clone() for g in row] for row in gradients.rows]
            expected = []
            if not isinstance(method, _Peer):
                state = method.state_dict()
                with cs.use_backend("reference"):
                    combine(same, layout, step)
                expected = [p.grad.clone() for p in gradients.parameters if p.grad is not None]
                method.load_state_dict(state)
            combine(gradients, layout, step)
            found = [p.grad for p in gradients.parameters if p.grad is not None]
            assert found
            assert all(grad.isfinite().all() for grad in found)
            assert_close(found if expected else [], expected, 1e-4)

        method.combine = compared
        self.step()
        method.combine = combine

    def times(self) -> tuple[float, float, float]:
        """Milliseconds of a step, of its surgery, and of its surgery by the host's clock."""
        self.marks, self.host = [], 0.0
        before = torch.cuda.synchronize if self.device == "cuda" else None
        whole = timed(self.step, self.device, before)()
        return whole, sum(elapsed(*marks) for marks in self.marks), self.host


@pytest.mark.parametrize("setting", [DEMO, HRNET18], ids=lambda setting: setting.name)
def test_training_steps(report: Any, quick: bool, setting: Setting) -> None:
    names = [*ROWS]
    if setting is HRNET18 and find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if quick:
        setting = replace(setting, batch=1, shape=(3, 64, 64))
    if setting.device == "cuda" and not torch.cuda.is_available():
        if not quick:
            pytest.skip("there is no GPU")
        setting = replace(setting, device="cpu")
        names = ["Phase 1", "Phase 2"]  # Enough for a smoke test.
    backends = cs.available_backends()
    if setting.device == "cpu" or backends["triton"] or backends["cuda"]:
        # Triton's row cannot run here, or is the same as "Phase 2".
        names = [name for name in names if not name.endswith("triton")]
    if find_spec("torchjd") is None:
        names = [name for name in names if not name.startswith("TorchJD")]
    rows = {name: Row(name, setting) for name in names}
    for row in rows.values():
        for _ in range(1 if quick else 3):
            row.step()
        row.check()
    of_rows = in_turns({name: row.times for name, row in rows.items()}, 1 if quick else 25)
    steps = {name: [times[0] for times in of_row] for name, of_row in of_rows.items()}
    for name, of_row in of_rows.items():
        _, surgery, host = zip(*of_row, strict=True)
        report(
            "steps" if setting.device == "cpu" else "gpu_steps",
            method=name,
            **setting.facts(),
            milliseconds=statistics.median(steps[name]),
            surgery_milliseconds=statistics.median(surgery),
            surgery_host_milliseconds=statistics.median(host),
            surgery_share=ratio(surgery, steps[name]),
            over_phase_1=ratio(steps[name], steps["Phase 1"]) - 1,
            **(on_device(rows[name].step) if setting.device == "cuda" else {}),
        )
