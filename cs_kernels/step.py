"""The facts of one step, made once in it and handed to methods and weightings."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Step:
    """What methods and weightings may ask about the step that they take part in."""

    number: int = 0
    """The number of steps made before, in both phases."""
    tasks: tuple[str, ...] = ()
    """The tasks that take part, in the order of the rows of a Gramian."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The loss of each task, detached, a scalar; micro-batches added up."""
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)
    """The same after weighting: what the gradients are of, but for the loss scale."""
    layers: tuple[str, ...] = ()
    """The modules that the Gramians are of, with groups="layer"."""
    loss_scale: Tensor | None = None
    """What the weighted losses were multiplied by before their backward passes, if by anything."""

    def add_loss(self, task: str, loss: Tensor, weighted: Tensor) -> None:
        """Adds the loss of one micro-batch."""
        for losses, value in ((self.losses, loss.detach()), (self.weighted_losses, weighted)):
            value = value.detach()
            losses[task] = losses[task] + value if task in losses else value
