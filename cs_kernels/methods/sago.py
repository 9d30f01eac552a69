"""SAGO."""

from collections.abc import Sequence

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.method import Method
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.step import Step
from cs_kernels.trunk.layers import Layout


class SAGO(Method):
    """Sign-aligned gradient optimization: no element of the update opposes a protected gradient.

    An element of the update is the sum of the other tasks' gradients if this sum has the sign of
    the protected gradient, or if the protected gradient is zero there; otherwise, the element is
    the protected gradient (Xiao et al., "Modeling LLM Unlearning as an Asymmetric Two-Task Learning
    Problem", 2026). The protected gradient replaces the other tasks' sum; the two are never added.

    Where the other tasks' sum is exactly zero, as for embeddings of tokens that are absent from
    these tasks' batches, the authors' code leaves the element at zero; here, it is the protected
    gradient.

    Args:
        task: The protected task.

    Raises:
        TypeError: The task is not a string. `MultiTaskOptimizer` raises a ValueError if it is
            unknown, or the only task.

    Examples:
        >>> cs.SAGO("retain")
        SAGO('retain')

    """

    most_tasks = MOST_TASKS
    takes_complex = False
    """False, because a complex number has no sign."""

    def __init__(self, task: str) -> None:
        if not isinstance(task, str):
            raise TypeError(f"task must be a name, as in SAGO('retain'), got {task!r}")
        self.task = task

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that the protected task exists, and that there is another task.

        Raises:
            ValueError: The protected task does not exist or is the only task, or there are too
                many tasks.

        """
        super().check(tasks)
        if self.task not in tasks:
            raise ValueError(f"method must name a task among {list(tasks)}, got {self.task!r}")
        if len(tasks) == 1:
            raise ValueError(f"{self!r} needs at least one task besides {self.task!r}, got none")

    @property
    def layerwise(self) -> bool:
        """True, because elements do not depend on each other."""
        return True

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Makes one operator call, which reads each gradient once and writes each update once."""
        parameters = gradients.reached()
        if not parameters:
            gradients.clear()
            return
        updates = gradients.updates(parameters, in_place=True)
        protected = step.tasks.index(self.task) if self.task in step.tasks else None
        weights = torch.ones(1, len(step.tasks), dtype=torch.float64, device=updates[0].device)
        if protected is not None:
            weights[:, protected] = 0
        torch.ops.cs_kernels.combine_(
            updates,
            gradients.of(parameters, step.tasks),
            weights,
            [0] * len(parameters),
            len(step.tasks),
            protected,
        )
        gradients.assign(parameters)

    def __repr__(self) -> str:
        return f"SAGO({self.task!r})"
