"""The ranks that train one network, as the engine sees them; here one process."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor, nn

from cs_kernels.gradients import Storage, TaskGradients
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.stage import Passes
from cs_kernels.trunk.reach import Reach
from cs_kernels.trunk.trunk import Trunk


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
    stage: int
    """The first `Stage` of the call."""
    features: int
    """The number of features."""
    passes: int
    """The number of micro-batches; in `backward`, of the passes with kept task weights."""


@dataclass(frozen=True)
class Training:
    """The facts that must be equal on all ranks, before the first step and in every step."""

    facts: Callable[[], Mapping[str, object]]
    """By name of an argument, its description."""
    trunk: Trunk
    """What passes show of it is made equal on all ranks."""
    planned: Callable[[], dict[str, list[object]]]
    """By name, facts of the next step that may change between steps."""
    checksums: Callable[[], dict[str, int]]
    """By name of a parameter, a number that differs if its values do."""
    factor_is_hidden: bool
    """Whether the loss scale shows in the backward passes only."""


class Ranks(Storage):
    """The strategy of a single process: collectives are no-ops.

    Many ranks have the same methods (`Distributed`). A step calls `together` around everything,
    `begin`, then for each of its stages `expect`, for each task `last_backward` and `collect` (or
    `note`, where gradients add up; or `skip`, where only other ranks have labels), and `average`;
    `recover` after an exception.

    Args:
        shared: The shared parameters, by name.
        tasks: The names of all tasks.
        wrappers: The DistributedDataParallel modules around the trunk.

    """

    size = 1
    is_distributed = False
    passes_are_counted = False
    """Whether every backward pass has collectives, so that all ranks need as many."""
    passes = 1
    """The greatest number of passes of any rank, `Call.passes`, once a step has begun."""
    scale = 1.0
    """The factor that the ranks' gradients, added up, have still to be multiplied by."""

    def __init__(
        self, shared: Mapping[str, nn.Parameter], tasks: Sequence[str], wrappers: Wrappers
    ) -> None:
        super().__init__(list(shared.values()))
        self.wrappers = wrappers
        self.reach = self._new_reach(shared, tasks)
        # No reference cycle: the groups of ranks end with their last user.
        storage = cast("Storage", weakref.proxy(self))
        self.gradients = TaskGradients(shared, tasks, self.reach, storage)

    def _new_reach(self, shared: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> Reach:
        return Reach(shared, tasks)

    # --- once ---

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the checks of arguments, so that other ranks do not wait if this one's fail."""
        return contextlib.nullcontext()

    def agree(self, training: Training) -> None:
        """Checks that all ranks have the same setup; keeps the facts to compare in each step."""

    def close(self) -> None:
        """Stops messages, and re-enables the reductions of DistributedDataParallel wrappers."""
        self.wrappers.release()

    # --- a step ---

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a step, and tells the other ranks of an exception."""
        return contextlib.nullcontext()

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """The tasks of the step, which other ranks may have labels for."""
        del call
        return tuple(tasks)

    def has(self, task: str) -> bool:
        """Whether this rank has labels for a task of the step."""
        del task
        return True

    def share(self, task: str) -> float:
        """The share of this rank's loss in the mean loss over the ranks with labels."""
        del task
        return 1.0

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of terms from their own samples; the same bits on every rank."""
        return tensor

    def returned(self, losses: Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
        """The losses of some tasks, for the caller."""
        return {task: losses[task] for task in tasks}

    def recheck_networks(self) -> None:
        """Checks in the next step that ranks hold the same parameters."""

    # --- the passes of a stage ---

    def expect(self, passes: Passes) -> None:
        """Begins the passes of a stage."""
        if passes.stage.is_joint and not passes.separate:
            self.free_updates()

    def before_backward(self, *, retains: bool) -> None:
        """Announces a backward pass, and whether it retains its graph."""

    def last_backward(self, task: str) -> None:
        """Announces a task's last backward pass."""

    def collect(self, task: str) -> bool:
        """Moves a task's gradients out of `.grad`; returns whether there is any."""
        return self.gradients.collect(task)

    def note(self, task: str) -> bool:
        """Notes the gradients in `.grad` as a task's; returns whether there is any."""
        return self.reach.note_gradients(task)

    def skip(self, task: str) -> None:
        """Replaces the passes of a task that only other ranks have labels for."""

    def average(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Averages gradients, losses and statistics over the ranks.

        Args:
            passes: Those of a stage.
            held: The torch optimizers' parameters.

        """

    def forget_passes(self) -> None:
        """Forgets what passes have shown, because other parameters may train now."""

    def recover(self, held: Sequence[nn.Parameter]) -> None:
        """Brings parameters back to where they were before a step that has failed."""
