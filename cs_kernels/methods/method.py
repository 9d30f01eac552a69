"""What a method is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout
from cs_kernels.step import Step


class Method(ABC):
    """Turns the gradients of all tasks into one update, in a joint step (Phase 2)."""

    separate_gradients: ClassVar[bool] = True
    """Whether it looks at the tasks' gradients one by one; a plain sum adds up in `.grad`."""

    prioritizes: ClassVar[bool] = False
    """Whether it needs layers with a task-specific normalization behind them."""

    most_tasks: ClassVar[int | None] = None
    """The number of tasks that it can take, if there is a limit."""

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if it does not fit the tasks."""
        if self.most_tasks is not None and len(tasks) > self.most_tasks:
            raise ValueError(
                f"tasks must be at most {self.most_tasks} for {self!r}, got {len(tasks)}"
            )

    @abstractmethod
    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Writes the update of every shared parameter that a task has reached.

        Args:
            gradients: Of `gradients.reached()`, the tasks' gradients by `of`; `updates` has the
                tensors to write, and `assign` makes them `.grad`.
            layout: The layers whose output channels have a priority.
            step: The tasks that take part, their losses, the number of the step.

        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        del state

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
