"""Plain gradient descent on the sum of the losses."""

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout
from cs_kernels.methods.method import Method
from cs_kernels.step import Step


class Sum(Method):
    """Plain gradient descent on the sum of the losses: the baseline, at its true cost.

    The tasks' gradients add up in `.grad` during the backward passes; no K gradients are kept.
    """

    separate_gradients = False

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Nothing to do: autograd has added the gradients."""
