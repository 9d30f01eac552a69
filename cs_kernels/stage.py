"""The stages of a step, each of which is a group of backward passes."""

from dataclasses import dataclass, field
from enum import IntEnum

from cs_kernels.step import Losses, Step


class Stage(IntEnum):
    """The position of a group of backward passes within a step.

    At the start of a call, ranks compare their first stages (with `features=`: WHOLE, and the
    number of features). The legal transitions:

        step, step_together     TURN -> TURN ... (Phase 1)      JOINT (Phase 2)
        backward                WHOLE                           FIRST -> MIDDLE ... -> LAST
        features=               HEADS -> TRUNK
    """

    TURN = 0
    """One task's passes, then the torch optimizers' step; the next task's TURN may follow."""
    JOINT = 1
    """All tasks' passes, the method's update, and the torch optimizers' step."""
    WHOLE = 2
    """All tasks' passes and the method's update, in one call of `backward`."""
    FIRST = 3
    """Passes of the first micro-batch; gradients wait for MIDDLE or LAST, in a later call."""
    MIDDLE = 4
    """Passes of a further micro-batch; gradients are added to the waiting ones."""
    LAST = 5
    """Passes of the last micro-batch, and the method's update."""
    HEADS = 6
    """Passes of the heads, back to the features, whose gradients the method combines."""
    TRUNK = 7
    """The pass that propagates the features' combined gradient to the trunk's parameters."""

    @property
    def is_joint(self) -> bool:
        """Whether the method makes the update."""
        return self is not Stage.TURN

    @property
    def continues(self) -> bool:
        """Whether the stage builds on gradients of the previous one."""
        return self in (Stage.MIDDLE, Stage.LAST, Stage.TRUNK)

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for a later stage."""
        return self in (Stage.FIRST, Stage.MIDDLE, Stage.HEADS)


@dataclass
class Passes:
    """The backward passes of one stage."""

    step: Step
    tasks: tuple[str, ...]
    """The tasks of all ranks."""
    stage: Stage
    separate: bool = False
    """Whether each task's gradients are kept in a row; otherwise, they add up in `.grad`."""
    before: Losses = field(default_factory=Losses)
    """The losses of earlier stages."""
    reached: tuple[bool, ...] = ()
    """In HEADS, for each feature: whether a task has a gradient for it, on this rank before
    averaging and on any rank afterwards."""

    @property
    def adds_tasks(self) -> bool:
        """Whether the unweighted gradients of several tasks add up in `.grad`.

        If so, only the losses' graphs show which parameters each task reaches. Otherwise, reach is
        not recorded from graphs: they are checked only in some steps, which differ in a resumed
        run.
        """
        return self.stage.is_joint and not self.separate and self.step.kept is None
