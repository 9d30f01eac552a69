"""What a method is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout


class Method(ABC):
    """Turns the gradients of all tasks into one update, in a joint step (Phase 2)."""

    separate_gradients: ClassVar[bool] = True
    """Whether it looks at the tasks' gradients one by one; a plain sum adds up in `.grad`."""

    prioritizes: ClassVar[bool] = False
    """Whether it needs layers with a task-specific normalization behind them."""

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if it does not fit the tasks."""
        del tasks

    @abstractmethod
    def combine(self, gradients: TaskGradients, layout: Layout) -> None:
        """Writes the update of every parameter that a task has reached."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        del state

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
