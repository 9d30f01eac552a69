"""The interface of a weighting."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs_kernels.stateful import Stateful
from cs_kernels.step import Step


class Weighting(Stateful, ABC):
    """Weighs the loss of each task, in both phases and with every method."""

    needs_gramian: bool = False
    """Whether `observe` reads the Gramian of the gradients, `step.surgery.gramian`."""

    reevaluates: bool = False
    """Whether `MultiTaskOptimizer.step` computes the losses again after the step, for
    `step.losses_after`."""

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if the weighting does not fit the tasks."""
        del tasks

    @abstractmethod
    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The weighted loss of a task, for its backward pass; called once per micro-batch.

        Args:
            task: The task.
            loss: The task's loss, with its autograd graph.
            step: The tasks that take part, and the step number. On several ranks, the losses are
                this rank's own; `observe` gets their means.

        """

    def regularizer(self, task: str) -> Tensor | None:
        """A term to add to a task's weighted loss, once per step, or None."""
        return None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of learned weights, for the torch optimizer."""
        return []

    def is_undone(self) -> bool:
        """Whether a failed step restores the state; never with learned `parameters`."""
        return super().is_undone() and not self.parameters()

    def start_epoch(self, epoch: int) -> None:
        """Called when an epoch begins."""
        del epoch

    def observe(self, step: Step) -> None:
        """Called once per step; `step.losses` has the unweighted losses of its tasks.

        These losses are means over the ranks and sums over the micro-batches. The call comes before
        the torch optimizers' step or, if the weighting `reevaluates`, after the losses were
        recomputed. If the step fails, `load_state_dict` restores the earlier state.
        """
        del step


def weighed(loss: Tensor, weight: Tensor) -> Tensor:
    """A loss times a scalar on the same device; half-precision losses are multiplied in float32."""
    wide = torch.promote_types(loss.dtype, torch.float32)
    return (loss.to(wide) * weight.to(wide)).to(loss.dtype)
