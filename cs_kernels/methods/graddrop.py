"""GradDrop."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout
from cs_kernels.methods.method import Method


class GradDrop(Method):
    """Gradient sign dropout (Chen et al., "Just Pick a Sign", 2020).

    Of each element, either the positive or the negative gradients are added: the positive ones
    with the probability that is their share of the sum of absolute values. In the mean, the update
    is the plain sum.

    The choice is a function of the seed, the number of steps made and the element's place: equal on
    all ranks and for any number of threads.

    Args:
        leak: The part of each gradient that is added in any case: one number, or one a task.
        seed: Of the choices.

    Raises:
        ValueError: A leak is outside [0, 1].

    """

    def __init__(self, leak: float | Sequence[float] = 0.0, seed: int = 0) -> None:
        for value in leak if isinstance(leak, Sequence) else [leak]:
            if not 0 <= value <= 1:
                raise ValueError(f"leak must lie in [0, 1], got {value}")
        self.leak = leak
        self.seed = seed
        self._steps = 0

    def check(self, tasks: Sequence[str]) -> None:
        """As many leaks as tasks."""
        if isinstance(self.leak, Sequence) and len(self.leak) != len(tasks):
            raise ValueError(
                f"leak must have {len(tasks)} entries, one a task, got {len(self.leak)}"
            )

    def combine(self, gradients: TaskGradients, layout: Layout) -> None:
        """One pass over the gradients."""
        del layout
        tasks = gradients.taking_part()
        leak = self.leak
        leaks = [leak[task] if isinstance(leak, Sequence) else leak for task in tasks]
        parameters = gradients.reached()
        if not parameters:
            gradients.clear()
            return
        torch.ops.cs_kernels.drop_signs_(
            gradients.updates(parameters),
            gradients.of(parameters, tasks),
            leaks,
            self.seed,
            self._steps,
            len(tasks),
        )
        gradients.assign(parameters)
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The number of steps made, which the choices follow from."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the choices of the next step."""
        self._steps = state["steps"]

    def __repr__(self) -> str:
        return f"GradDrop(leak={self.leak!r}, seed={self.seed})"
