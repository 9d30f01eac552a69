"""Records data about training steps for reports, conflict counts and warnings."""

from collections.abc import Callable

import torch
from torch import Tensor

from cs_kernels.elapsed import Elapsed
from cs_kernels.gradients import TaskGradients
from cs_kernels.methods import Method
from cs_kernels.monitor.conflicts import ConflictCounter
from cs_kernels.monitor.report import Done, Report, report_of
from cs_kernels.monitor.zero_gradients import warn_of_zero_gradients
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.step import Step
from cs_kernels.weightings import Weighting

_ZERO_CHECKS = 8
"""The maximum number of joint steps to check for zero gradients until one is conclusive."""


class Monitor:
    """Stores the last step and the conflict counts."""

    def __init__(self) -> None:
        self.done: Done | None = None
        """The last step; None before the first one."""
        self.counter: ConflictCounter | None = None
        """None unless conflicts are counted."""
        self._reported = False
        self._zero_checks = _ZERO_CHECKS
        """The number of remaining checks for zero gradients."""

    @property
    def threshold(self) -> float | None:
        return None if self.counter is None else self.counter.threshold

    def timer(self, device: torch.device, *, eager: bool) -> Elapsed:
        """A timer of the surgery; on a GPU, idle until the first report and during a capture."""
        return Elapsed(device, wanted=self._reported and eager)

    def measure(self, step: Step) -> None:
        """Measures the gradients before the method consumes them, unless weights are reused."""
        if self.counter is not None and step.kept is None:
            self.counter.measure(step)

    def look_for_zeros(self, gradients: TaskGradients, step: Step) -> None:
        """Checks for zero gradients until a step is conclusive, and warns if there are any."""
        if self._zero_checks and step.counter is None:
            conclusive = warn_of_zero_gradients(gradients, step)
            self._zero_checks = 0 if conclusive else self._zero_checks - 1

    def counted_step(self, step: Step) -> Callable[[], None]:
        """Counts the conflicts of a step; returns a function that commits the counts."""
        return (lambda: None) if self.counter is None else self.counter.count(step)

    def report(self, method: Method, weighting: Weighting) -> Report:
        if self.done is None:
            raise RuntimeError("no step to report on: call step or backward first")
        self._reported = True
        return report_of(self.done, method, weighting)

    def count(self, threshold: float | None, gradients: TaskGradients, method: Method) -> None:
        """Starts to count conflicts, from zero; a threshold of None stops counting."""
        if threshold is None:
            self.counter = None
            return
        if not method.separate_gradients:
            raise ValueError(
                "method must keep the tasks' gradients separate for count_conflicts, got"
                f" {method!r}, which adds them up: for the plain sum, use cs.Sum(separate=True)"
            )
        if len(gradients.tasks) > MOST_TASKS:
            raise ValueError(
                f"tasks must name at most {MOST_TASKS} tasks for count_conflicts, got"
                f" {len(gradients.tasks)}"
            )
        self.counter = ConflictCounter(gradients, threshold)

    def counted(self) -> ConflictCounter:
        if self.counter is None:
            raise RuntimeError("conflicts are not counted: call count_conflicts() before the steps")
        return self.counter

    def captured_state(self) -> list[Tensor]:
        return [] if self.counter is None else self.counter.captured_state()
