"""What each task's loss is multiplied by before its backward pass."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import isfinite

from torch import Tensor


class Weighting(ABC):
    """Weighs the loss of each task, in every phase and with every method."""

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if it does not fit the tasks."""
        del tasks

    @abstractmethod
    def weigh(self, task: str, loss: Tensor) -> Tensor:
        """The loss to take the gradient of."""


class EqualWeights(Weighting):
    """Every loss as it is."""

    def weigh(self, task: str, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def __repr__(self) -> str:
        return "EqualWeights()"


class FixedWeights(Weighting):
    """Every loss times a number, such as the manually tuned ones of the paper's tables.

    Args:
        weights: A number for every task.

    Raises:
        ValueError: One is not finite.

    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        for task, weight in weights.items():
            if not isfinite(weight):
                raise ValueError(f"weights must be finite, got {weight} for {task!r}")
        self.weights = dict(weights)

    def check(self, tasks: Sequence[str]) -> None:
        """Every task must have a weight, and every weight a task."""
        if set(self.weights) != set(tasks):
            raise ValueError(
                f"weighting must have a weight for each of {list(tasks)}, got {list(self.weights)}"
            )

    def weigh(self, task: str, loss: Tensor) -> Tensor:
        """The loss times its weight."""
        return loss * self.weights[task]

    def __repr__(self) -> str:
        return f"FixedWeights({self.weights})"
