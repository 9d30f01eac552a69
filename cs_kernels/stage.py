"""The stages of a step: what a group of backward passes is for, and what follows it."""

from dataclasses import dataclass, field
from enum import IntEnum

from cs_kernels.step import Losses, Step


class Stage(IntEnum):
    """The position of a group of backward passes within a step.

    Ranks compare the value in every step. The legal transitions:

        step            TURN -> TURN ... (Phase 1)      JOINT (Phase 2)
        backward        WHOLE                           FIRST -> MIDDLE ... -> LAST
        features=       HEADS -> TRUNK
    """

    TURN = 0
    """One task's passes, then the torch optimizers' step; the next task's TURN may follow."""
    JOINT = 1
    """All tasks' passes, the method's update, and the torch optimizers' step."""
    WHOLE = 2
    """All tasks' passes and the method's update, in one call of `backward`."""
    FIRST = 3
    """Passes of the first micro-batch: gradients stay for MIDDLE or LAST, in a later call."""
    MIDDLE = 4
    """Passes whose gradients are added to those in place, and stay for MIDDLE or LAST."""
    LAST = 5
    """Passes of the last micro-batch, and the method's update."""
    HEADS = 6
    """Passes that end at features, whose gradients the method combines; TRUNK follows at once."""
    TRUNK = 7
    """The pass from the features' combined gradient to the trunk's parameters."""

    @property
    def is_joint(self) -> bool:
        """Whether the method makes the update."""
        return self is not Stage.TURN

    @property
    def continues(self) -> bool:
        """Whether gradients of the stage before it are in place."""
        return self in (Stage.MIDDLE, Stage.LAST, Stage.TRUNK)

    @property
    def is_open(self) -> bool:
        """Whether gradients stay for a later stage that makes the update."""
        return self in (Stage.FIRST, Stage.MIDDLE, Stage.HEADS)


@dataclass
class Passes:
    """The backward passes of one stage."""

    step: Step
    tasks: tuple[str, ...]
    """The tasks of all ranks."""
    stage: Stage
    separate: bool = False
    """Whether each task's gradients are kept; else they add up in `.grad`."""
    before: Losses = field(default_factory=Losses)
    """The losses of earlier stages."""
    reached: tuple[bool, ...] = ()
    """In HEADS: for each feature, whether a task has a gradient of it; averaged, on any rank."""

    @property
    def adds_tasks(self) -> bool:
        """Whether the gradients of several tasks add up without weights.

        Then only graphs show what each task reaches. In other stages, nothing may be learned from
        graphs, because a resumed run checks them at other steps.
        """
        return self.stage.is_joint and not self.separate and self.step.kept is None
