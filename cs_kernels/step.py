"""The facts of one step, for methods and weightings."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cs_kernels.elapsed import Elapsed
from cs_kernels.layout import LayerLists


@dataclass
class Losses:
    """The losses of some passes, by task."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Surgery:
    """The numbers from which a method made its update; tensors on the gradients' device.

    They are kept for `MultiTaskOptimizer.report`, which says what they mean.
    """

    rows: tuple[str, ...] = ()
    """The tasks, in the order of the rows."""
    layers: tuple[str, ...] = ()
    """The modules of per-layer Gramians, with groups="layer"."""
    gramian: Tensor | None = None
    """Float64 [K, K] or [layers, K, K], without the loss scale."""
    task_weights: Tensor | None = None
    """[K] or [layers, K]."""
    prioritized: LayerLists | None = None
    """The layers of the priorities and the products."""
    priorities: Tensor | None = None
    """int64 [O] of one layer after the other."""
    products: Tensor | None = None
    """Float64 [layers, K, K], d_ij of the channel groups, with the square of the loss scale."""


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
    known: dict[str, Tensor] = field(default_factory=dict)
    """The losses of this step that are known before a task's backward pass, detached: in `backward`
    those of all tasks, in `step` the task's own. None on many ranks and with micro-batches."""
    losses_after: dict[str, Tensor] = field(default_factory=dict)
    """The losses on the same batch after the step, for a weighting that `reevaluates`."""
    layers: tuple[str, ...] = ()
    """The modules of the per-layer Gramians, with groups="layer"."""
    loss_scale: Tensor | None = None
    """The factor of the weighted losses in their backward passes, if there is one."""
    counter: Tensor | None = None
    """In a CUDA graph in place of the number: int64 [1] in device memory."""
    surgery: Surgery = field(default_factory=Surgery)
    """What the method did, for a report; methods fill it in."""
    elapsed: Elapsed | None = None
    """The time of the surgery; None in a CUDA graph."""
    recent: Losses = field(default_factory=Losses)
    """The losses since the last `begin_passes`."""

    @property
    def draw(self) -> tuple[int, Tensor | None]:
        """The step for operators that draw: a number, and a counter that adds to it."""
        return (self.number, None) if self.counter is None else (0, self.counter)

    def begin_passes(self) -> Losses:
        """Returns the losses of earlier passes."""
        self.recent = Losses()
        return Losses(dict(self.losses), dict(self.weighted_losses))

    def add_loss(self, task: str, loss: Tensor, weighted: Tensor) -> None:
        """Adds the loss of one micro-batch."""
        for losses, value in (
            (self.losses, loss),
            (self.weighted_losses, weighted),
            (self.recent.losses, loss),
            (self.recent.weighted_losses, weighted),
        ):
            value = value.detach()
            losses[task] = losses[task] + value if task in losses else value


class GraphStep(Step):
    """The facts of a step in a CUDA graph: one number does not fit all replays."""

    def __getattribute__(self, name: str) -> Any:
        """Reads any other attribute.

        Raises:
            RuntimeError: It is the number.

        """
        if name == "number":
            raise RuntimeError(
                "step.number changes from replay to replay of a captured step: use step.counter, or"
                " step.draw for an operator that draws"
            )
        return super().__getattribute__(name)
