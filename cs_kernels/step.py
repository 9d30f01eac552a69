"""The facts of one step, for methods and weightings."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Step:
    """One training step, as methods and weightings see it."""

    number: int = 0
    """The number of steps made before, in both phases."""
    tasks: tuple[str, ...] = ()
    """The tasks that take part, in the order of the rows of a Gramian."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The loss of each task, detached, a scalar; micro-batches added up."""
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)
    """The same after weighting; the gradients are theirs, times the loss scale."""
    layers: tuple[str, ...] = ()
    """The modules of the per-layer Gramians, with groups="layer"."""
    loss_scale: Tensor | None = None
    """The factor of the weighted losses in their backward passes, if there is one."""

    def add_loss(self, task: str, loss: Tensor, weighted: Tensor) -> None:
        """Adds the loss of one micro-batch."""
        for losses, value in ((self.losses, loss.detach()), (self.weighted_losses, weighted)):
            value = value.detach()
            losses[task] = losses[task] + value if task in losses else value
