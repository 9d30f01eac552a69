"""Schedules: when tasks are updated in turn (Phase 1) and when jointly (Phase 2).

A schedule is a pure function of the epoch and the number of earlier steps, so resumed runs and
other ranks need only these two numbers.
"""

from abc import ABC, abstractmethod
from random import Random
from typing import Literal

from cs_kernels.options import checked_integer, checked_seed

Phase = Literal[1, 2]


class Schedule(ABC):
    """Decides the phase of a step."""

    @abstractmethod
    def phase(self, epoch: int | None, step: int) -> Phase:
        """The phase of a step.

        Args:
            epoch: Counted from 0; None before the first `start_epoch`.
            step: The number of earlier steps.

        Raises:
            RuntimeError: The schedule depends on the epoch, and `start_epoch` was not called.

        """


def _require_epoch(epoch: int | None, schedule: Schedule) -> int:
    if epoch is None:
        raise RuntimeError(f"{schedule!r} depends on the epoch: call start_epoch(epoch) first")
    return epoch


class Joint(Schedule):
    """Always Phase 2: all tasks together, through the method."""

    def phase(self, epoch: int | None, step: int) -> Phase:
        """Returns 2."""
        return 2

    def __repr__(self) -> str:
        return "Joint()"


class Sequential(Schedule):
    """Always Phase 1: one update per task, each after the previous task's."""

    def phase(self, epoch: int | None, step: int) -> Phase:
        """Returns 1."""
        return 1

    def __repr__(self) -> str:
        return "Sequential()"


class Switch(Schedule):
    """Phase 1 before an epoch, then Phase 2 (the paper's sequential ablation).

    Args:
        epoch: The first epoch of Phase 2.

    Raises:
        ValueError: `epoch` is negative.
        TypeError: `epoch` is not an integer.

    """

    def __init__(self, epoch: int) -> None:
        self.epoch = checked_integer("epoch", epoch, 0)

    def phase(self, epoch: int | None, step: int) -> Phase:
        """Returns 1 before the epoch, then 2."""
        return 1 if _require_epoch(epoch, self) < self.epoch else 2

    def __repr__(self) -> str:
        return f"Switch(epoch={self.epoch})"


class Mixed(Schedule):
    """Phase 1 with probability 1 - e/E at epoch e of E, else Phase 2 (Algorithm 1).

    The draw is a function of (seed, epoch) or (seed, step), so an epoch that is started again, as
    in a resumed run, has the same draw.

    Args:
        epochs: E.
        seed: The seed of the draws.
        draw: "epoch" for one draw per epoch, as in the paper's text, or "step".

    Raises:
        ValueError: `epochs` is not positive, the seed is outside [0, 2^63), or `draw` is invalid.
        TypeError: `epochs` or the seed is not an integer.

    """

    def __init__(
        self, epochs: int, seed: int = 0, draw: Literal["epoch", "step"] = "epoch"
    ) -> None:
        if draw not in ("epoch", "step"):
            raise ValueError(f"draw must be 'epoch' or 'step', got {draw!r}")
        self.epochs = checked_integer("epochs", epochs, 1)
        self.seed = checked_seed(seed)
        self.draw = draw

    def phase(self, epoch: int | None, step: int) -> Phase:
        """Returns 1 if P ~ U(0, 1) is at least epoch / epochs, else 2."""
        epoch = _require_epoch(epoch, self)
        index = epoch if self.draw == "epoch" else step
        p = Random(f"{self.seed}/{self.draw}/{index}").random()
        return 1 if p >= epoch / self.epochs else 2

    def __repr__(self) -> str:
        return f"Mixed(epochs={self.epochs}, seed={self.seed}, draw={self.draw!r})"
