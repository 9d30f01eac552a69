"""Fixed weights."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cs_kernels.options import check_mapping, is_finite_number
from cs_kernels.step import Step
from cs_kernels.weightings.weighting import Weighting


class FixedWeights(Weighting):
    """Multiplies each loss by a fixed weight, such as the hand-tuned ones in the paper's tables.

    Args:
        weights: One number per task.

    Raises:
        ValueError: A weight is not finite.

    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        check_mapping("weights", weights, "weight")
        for task, weight in weights.items():
            if not is_finite_number(weight):
                raise ValueError(f"weights must be finite, got {weight!r} for {task!r}")
        self.weights = dict(weights)

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that the tasks and the weights have the same names."""
        if set(self.weights) != set(tasks):
            raise ValueError(
                f"weighting must have a weight for each of {list(tasks)}, got {list(self.weights)}"
            )

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight."""
        return loss * self.weights[task]

    def __repr__(self) -> str:
        return f"FixedWeights({self.weights})"
