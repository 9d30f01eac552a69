"""The interface of a method."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from cs_kernels.gradients import TaskGradients
from cs_kernels.stateful import Stateful
from cs_kernels.step import Keeping, Step
from cs_kernels.trunk.layers import Layout


class Method(Stateful, ABC):
    """Turns the gradients of all tasks into one update, in a joint step (Phase 2)."""

    separate_gradients: bool = True
    """Whether the method needs separate gradients per task; otherwise, they add up in `.grad`."""

    prioritizes: ClassVar[bool] = False
    """Whether the method needs layers followed by task-specific normalization."""

    has_gramian: bool = False
    """Whether the method stores the Gramian of the gradients in `step.surgery`."""

    takes_complex: ClassVar[bool] = True
    """Whether the method can treat a complex gradient as pairs of real numbers."""

    update_every: int = 1
    """The interval between two solves for task weights, in steps."""

    keeps: Keeping | None = None
    """The gradients to keep between steps; later steps have them as `step.anchors`."""

    most_tasks: int | None = None
    """The maximum number of tasks; None for no limit."""

    @property
    def layerwise(self) -> bool:
        """Whether the updates of a module depend only on that module's gradients.

        `step_together` then calls `combine` several times per step, each time for different
        modules.
        """
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        """Sets `layerwise` to False in a class that overrides `combine` but not `layerwise`."""
        super().__init_subclass__(**options)
        if "combine" in vars(cls) and "layerwise" not in vars(cls):
            type.__setattr__(cls, "layerwise", False)

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if the method cannot handle these tasks."""
        if self.most_tasks is not None and len(tasks) > self.most_tasks:
            raise ValueError(
                f"tasks must name at most {self.most_tasks} tasks for {self!r}, got {len(tasks)}"
            )

    @abstractmethod
    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Writes the update of every shared parameter for which any task has a gradient.

        Args:
            gradients: For the parameters of `gradients.reached()`, `of` returns the tasks'
                gradients, `updates` returns the tensors to write to, and `assign` makes these
                tensors `.grad`. Complex gradients are pairs of real numbers, of shape [..., 2].
            layout: The layers whose output channels are prioritized.
            step: The tasks that take part, their losses, and the step number.

        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
