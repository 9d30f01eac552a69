"""GradDrop."""

from collections.abc import Sequence

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.method import Method
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.options import checked_seed, is_finite_number
from cs_kernels.step import Step
from cs_kernels.trunk.layers import Layout


class GradDrop(Method):
    """Gradient sign dropout (Chen et al., "Just Pick a Sign", 2020).

    For each element, either the positive or the negative gradients are added. The positive ones are
    chosen with a probability equal to their share of the sum of absolute values. With one leak for
    all tasks, the expected update is the plain sum.

    The choice depends only on the seed, the step number and the element's index, so it is the same
    on all ranks and for any number of threads.

    Args:
        leak: The fraction of each gradient that is always added: one number, or one per task.
        seed: The seed of the random choices.

    Raises:
        ValueError: A leak is outside [0, 1], or the seed outside [0, 2^63).

    """

    most_tasks = MOST_TASKS
    takes_complex = False
    """False, because a complex number has no sign."""

    def __init__(self, leak: float | Sequence[float] = 0.0, seed: int = 0) -> None:
        for value in leak if isinstance(leak, Sequence) else [leak]:
            if not (is_finite_number(value) and 0 <= value <= 1):
                raise ValueError(f"leak must lie in [0, 1], got {value!r}")
        self.leak = leak
        self.seed = checked_seed(seed)

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that there is one leak for all tasks, or one per task."""
        super().check(tasks)
        if isinstance(self.leak, Sequence) and len(self.leak) != len(tasks):
            raise ValueError(
                f"leak must have {len(tasks)} entries, one per task, got {len(self.leak)}"
            )

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Makes one operator call, which reads each gradient once and writes each update once."""
        leaks = [self._leak(gradients.tasks.index(task)) for task in step.tasks]
        parameters = gradients.reached()
        if not parameters:
            gradients.clear()
            return
        number, counter = step.draw
        torch.ops.cs_kernels.drop_signs_(
            gradients.updates(parameters, in_place=True),
            gradients.of(parameters, step.tasks),
            leaks,
            self.seed,
            number,
            len(step.tasks),
            counter,
            gradients.offsets(parameters),
        )
        gradients.assign(parameters)

    def _leak(self, task: int) -> float:
        return self.leak[task] if isinstance(self.leak, Sequence) else self.leak

    def __repr__(self) -> str:
        return f"GradDrop(leak={self.leak!r}, seed={self.seed})"
