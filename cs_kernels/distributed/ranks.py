"""The ranks that train one network, as the training loop sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class RankError(RuntimeError):
    """Another rank failed, or differs from this one; every rank raises it in the same step."""


class Call(NamedTuple):
    """The facts of a step that must be equal on all ranks."""

    number: int
    """The number of steps made before."""
    phase: int
    epoch: int
    """-1 for none."""
    held: int
    """The number of parameters in the torch optimizer."""
    kind_of_call: int
    """0 for `step`; for `backward`, 1, or 2 without an update, plus 2 after one without."""
    passes: int
    """The number of micro-batches."""


class Facts:
    """The facts on which the ranks agree before the passes of a step."""

    def __init__(self, tasks: Sequence[str], ranks_of: Mapping[str, Sequence[int]]) -> None:
        self.tasks = tuple(tasks)
        """The tasks of any rank, in the order of Phase 1."""
        self.ranks_of = ranks_of
        """The ranks that have labels for each task."""


class Ranks(Protocol):
    """The ranks that train one network."""

    size: int

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Around the checks of one rank's arguments: the others do not wait for one that fails."""

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """The tasks of the step, which other ranks may have labels for."""

    def has(self, task: str) -> bool:
        """Whether this rank has labels for a task of the step."""

    def share(self, task: str) -> float:
        """The share of this rank's loss in the mean loss over the ranks with labels."""

    def passed(self) -> None:
        """To be called after the passes, before what they have shown is used.

        Raises:
            RankError: A rank has failed.

        """

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: tells the other ranks of an exception."""

    def recheck_networks(self) -> None:
        """Checks in the next step that ranks hold the same parameters."""

    def close(self) -> None:
        """Ends the messages."""


class Alone:
    """One process."""

    size = 1

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """The same tasks."""
        del call
        return tuple(tasks)

    def has(self, task: str) -> bool:
        """Always."""
        del task
        return True

    def share(self, task: str) -> float:
        """1."""
        del task
        return 1.0

    def passed(self) -> None:
        """Nothing."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()

    def recheck_networks(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Shown(Protocol):
    """Facts that passes have shown on a rank, to be made equal on all."""

    def changed(self) -> bool:
        """Whether the last passes have shown something that was not sent."""

    def to_send(self) -> object:
        """It, to be pickled."""

    def receive(self, of_ranks: Sequence[Any]) -> None:
        """Takes that of all ranks, this one's among them."""


class RankPasses(Protocol):
    """The passes of a rank in a step."""

    shown: Any

    def plan(self) -> int:
        """A number that differs if `planned` does."""

    def planned(self) -> dict[str, list[object]]:
        """The facts that the collectives and the update of the next step depend on."""

    def drain(self) -> None:
        """Takes part in the collectives of passes that have failed."""
