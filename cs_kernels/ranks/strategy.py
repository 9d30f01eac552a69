"""The engine's interface to the ranks that train one network, implemented for a single process."""

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
    """Another rank failed, or the ranks differ; every rank raises an exception in the same step."""


class Call(NamedTuple):
    """The facts of a call that each rank sends; all but `passes` must be equal on all ranks."""

    number: int
    """The number of steps made before this one."""
    phase: int
    epoch: int
    """-1 before the first `start_epoch`."""
    held: int
    """The number of parameters in the torch optimizers."""
    stage: int
    """The first `Stage` of the call."""
    features: int
    """The number of feature tensors; 0 without features."""
    passes: int
    """In `step`, the number of micro-batches; in `backward`, the number of backward passes if all
    ranks must make equally many, else 1."""


@dataclass(frozen=True)
class Training:
    """The trunk, and the values that ranks compare before the first step and in every step."""

    facts: Callable[[], Mapping[str, object]]
    """Returns descriptions of the setup, by name."""
    trunk: Trunk
    """The trunk, whose discoveries are merged over the ranks."""
    planned: Callable[[], dict[str, list[object]]]
    """Returns settings of the next step that may change between steps, by name."""
    checksums: Callable[[], dict[str, int]]
    """Returns, by parameter name, a number that changes with the parameter's values."""
    factor_is_hidden: bool
    """Whether the loss scale is visible only in the backward passes."""


class Ranks(Storage):
    """The strategy of a single process: collectives are no-ops.

    `Distributed` has the same methods for several ranks. A step runs inside `together` and calls
    `begin`. Each stage of the step calls `expect`; then for each task `last_backward` and `collect`
    (or `note` if gradients add up, or `skip` if only other ranks have labels); and then `average`.
    After an exception, the step calls `recover`.

    Args:
        shared: The shared parameters, by name.
        tasks: The names of all tasks.
        wrappers: The DistributedDataParallel modules around the trunk.

    """

    size = 1
    is_distributed = False
    passes_are_counted = False
    """Whether every backward pass has collectives, so that all ranks need equally many passes."""
    passes = 1
    """The maximum of `Call.passes` over the ranks, once a step has begun."""
    scale = 1.0
    """The factor for gradients that `fully_shard` does not average; it undoes the factor `size` in
    `Sharded.share`."""

    def __init__(
        self, shared: Mapping[str, nn.Parameter], tasks: Sequence[str], wrappers: Wrappers
    ) -> None:
        super().__init__(list(shared.values()))
        self.wrappers = wrappers
        self.reach = self._new_reach(shared, tasks)
        # Avoids a reference cycle: process groups must be destroyed with their last user.
        storage = cast("Storage", weakref.proxy(self))
        self.gradients = TaskGradients(shared, tasks, self.reach, storage)

    def _new_reach(self, shared: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> Reach:
        return Reach(shared, tasks)

    # --- once per training run ---

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Wraps argument checks, so that other ranks do not wait for a rank whose checks fail."""
        return contextlib.nullcontext()

    def agree(self, training: Training) -> None:
        """Checks that all ranks have the same setup; keeps the functions for later comparisons."""

    def close(self) -> None:
        """Re-enables the reductions of DistributedDataParallel wrappers."""
        self.wrappers.release()

    # --- a step ---

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a step, and tells the other ranks about an exception."""
        return contextlib.nullcontext()

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """Returns the tasks of the step, including those for which only other ranks have labels."""
        del call
        return tuple(tasks)

    def has(self, task: str) -> bool:
        """Whether this rank has labels for a task of the step."""
        del task
        return True

    def share(self, task: str) -> float:
        """The factor on this rank's loss that makes reduced gradients equal the mean loss's."""
        del task
        return 1.0

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Sums terms from the ranks' own samples; the sum is bitwise equal on every rank."""
        return tensor

    def returned(self, losses: Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
        """The losses of these tasks, as `step` and `backward` return them."""
        return {task: losses[task] for task in tasks}

    def recheck_networks(self) -> None:
        """Checks in the next two steps that all ranks hold the same parameters."""

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
        """Moves a task's gradients out of `.grad`; returns whether there were any."""
        return self.gradients.collect(task)

    def note(self, task: str) -> bool:
        """Records a task's gradients, which stay in `.grad`; returns whether there are any."""
        return self.reach.note_gradients(task)

    def skip(self, task: str) -> None:
        """Called in place of the passes of a task for which only other ranks have labels."""

    def average(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Averages gradients, losses and statistics over the ranks.

        Args:
            passes: The passes of a stage.
            held: The torch optimizers' parameters.

        """

    def forget_passes(self) -> None:
        """Forgets the discoveries of earlier passes, because different parameters may train now."""

    def recover(self, held: Sequence[nn.Parameter]) -> None:
        """Cleans up the state of the parameters after a failed step."""
