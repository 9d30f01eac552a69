"""What is kept of the steps for those who watch."""

from collections.abc import Callable

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods import Method
from cs_kernels.monitor.conflicts import ConflictCounter
from cs_kernels.monitor.elapsed import Elapsed
from cs_kernels.monitor.report import Done, Report, report_of
from cs_kernels.monitor.zero_gradients import warn_of_zero_gradients
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.step import Step
from cs_kernels.weightings import Weighting

_LOOKS = 8
"""The first steps in which gradients are searched for zeros; one is enough, if they show it."""


class Monitor:
    """The last step, and the conflicts counted over the steps."""

    def __init__(self) -> None:
        self.done: Done | None = None
        """The last step, if there was one."""
        self.counter: ConflictCounter | None = None
        """If conflicts are counted."""
        self._reported = False
        self._looks = _LOOKS
        """The steps in which to look for zeros."""

    @property
    def threshold(self) -> float | None:
        """The threshold of the counted conflicts."""
        return None if self.counter is None else self.counter.threshold

    def timer(self, device: torch.device, *, eager: bool) -> Elapsed:
        """Takes the time of a surgery; on a GPU once a report was asked for, not in a capture."""
        return Elapsed(device, wanted=self._reported and eager)

    def measure(self, step: Step) -> None:
        """Measures the gradients of a step that solves, before its method takes them."""
        if self.counter is not None and step.kept is None:
            self.counter.measure(step)

    def look_for_zeros(self, gradients: TaskGradients, step: Step) -> None:
        """Warns, in the first step whose gradients show it, of some that are zero."""
        if self._looks and step.counter is None:
            self._looks = 0 if warn_of_zero_gradients(gradients, step) else self._looks - 1

    def counted_step(self, step: Step) -> Callable[[], None]:
        """Counts the conflicts of a step; the function returned takes the counts."""
        return (lambda: None) if self.counter is None else self.counter.added(step)

    def report(self, method: Method, weighting: Weighting) -> Report:
        """The report of the last step.

        Raises:
            RuntimeError: There was none.

        """
        if self.done is None:
            raise RuntimeError("a report is of the last step: call step or backward first")
        self._reported = True
        return report_of(self.done, method, weighting)

    def count(self, threshold: float | None, gradients: TaskGradients, method: Method) -> None:
        """Counts conflicts from now on; None ends it.

        Raises:
            ValueError: The threshold is outside of [-1, 1], there are more than 64 tasks, or the
                method does not keep per-task gradients.

        """
        if threshold is None:
            self.counter = None
            return
        if not method.separate_gradients:
            raise ValueError(
                "method must keep the tasks' gradients one by one for count_conflicts, got"
                f" {method!r}, which adds them up: for the plain sum, use"
                " cs.Sum(separate=True)"
            )
        if len(gradients.tasks) > MOST_TASKS:
            raise ValueError(
                f"tasks must be at most {MOST_TASKS} for count_conflicts, got"
                f" {len(gradients.tasks)}"
            )
        self.counter = ConflictCounter(gradients, threshold)

    def counted(self) -> ConflictCounter:
        """The counts.

        Raises:
            RuntimeError: None are taken.

        """
        if self.counter is None:
            raise RuntimeError("conflicts are not counted: call count_conflicts() before the steps")
        return self.counter

    def captured_state(self) -> list[Tensor]:
        """The tensors that joint steps update in place."""
        return [] if self.counter is None else self.counter.captured_state()
