"""Plain gradient descent on the sum of the losses."""

from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.methods.method import Method
from cs_kernels.step import Step
from cs_kernels.trunk.layers import Layout


class Sum(Method):
    """Plain gradient descent on the sum of the losses: the baseline, without overhead.

    The tasks' gradients add up in `.grad` during the backward passes and are not kept separate.

    Args:
        separate: Whether to keep the tasks' gradients separate and add them with the kernels of the
            Gramian methods. Reports then show norms and cosines, and `GradNorm` works.

    Raises:
        ValueError: `separate` is neither True nor False.

    """

    separate_gradients = False
    _ones: GramianMethod | None = None

    def __init__(self, separate: bool = False) -> None:
        if separate not in (True, False):
            raise ValueError(f"separate must be True or False, got {separate!r}")
        if separate:
            self._ones = Ones()
            self.separate_gradients = self.has_gramian = True
            self.most_tasks = self._ones.most_tasks

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Adds separate gradients; without `separate`, autograd has already added them."""
        if self._ones is not None:
            self._ones.combine(gradients, layout, step)

    def __repr__(self) -> str:
        return "Sum(separate=True)" if self.separate_gradients else "Sum()"


class Ones(GramianMethod):
    """The plain sum as a Gramian method."""

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """A weight of 1 per task."""
        return gramian.new_ones(gramian.shape[:-1])
