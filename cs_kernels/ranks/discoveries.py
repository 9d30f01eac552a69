"""Shares the discoveries of each rank's passes with all ranks: layers and reached parameters."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from cs_kernels.trunk.reach import Reach
from cs_kernels.trunk.statistics import Sizes
from cs_kernels.trunk.trunk import Trunk

Pattern = tuple[bool, ...]


class SharedReach(Reach):
    """The tasks that have reached each parameter on any rank.

    Passes take effect when the ranks exchange them, so all ranks make the same decisions.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> None:
        super().__init__(parameters, tasks)
        self._local: dict[str, list[int]] = {}
        self._of_ranks: Sequence[Mapping[str, list[int]]] = []
        self._is_sent = True
        self.version = 0
        """Increases when the tasks' reach may have changed."""

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undoes nothing, because ranks may already have exchanged discoveries."""
        yield

    def note(self, task: str, unreached: list[int]) -> None:
        """Records a pass of this rank for the next exchange."""
        if self._local.get(task) != unreached:
            self._local[task] = unreached
            missing = set(unreached)
            self.has_new |= any(
                not reached and i not in missing for i, reached in enumerate(self._reached_by)
            )
            self._is_sent = False

    def last_unreached(self, task: str) -> list[int]:
        """The parameters without a gradient in a task's last pass on this rank."""
        return self._local.get(task, [])

    def forget_passes(self) -> None:
        """Forgets all passes; the ranks exchange every task's next pass again."""
        super().forget_passes()
        self._local.clear()  # Old passes must not be recorded again.

    def changed(self) -> bool:
        """Whether there are passes that this rank has not sent yet."""
        return not self._is_sent

    def to_send(self) -> dict[str, list[int]]:
        """For each task, the parameters without a gradient in its last pass."""
        return self._local

    def receive(self, of_ranks: Sequence[Mapping[str, list[int]]]) -> None:
        """Records the passes of all ranks."""
        self._of_ranks, self._is_sent = of_ranks, True
        self.version += 1
        for of_rank in of_ranks:
            for task, unreached in of_rank.items():
                super().note(task, unreached)

    def unreached(self, task: str, ranks: Sequence[int]) -> set[int]:
        """The parameters that none of these ranks reached in its last pass of a task."""
        return set.intersection(*(set(self._of_ranks[rank][task]) for rank in ranks))

    def load_state_dict(self, state: Any) -> None:
        """Restores a `state_dict` that is the same on all ranks."""
        super().load_state_dict(state)
        self._local.clear()
        self.version += 1


class Discoveries:
    """The discoveries of a step's passes: layers, reached parameters, and statistics of heads.

    Args:
        trunk: The shared module.
        reach: Records which tasks have reached the trunk's parameters.

    """

    def __init__(self, trunk: Trunk, reach: SharedReach) -> None:
        watcher, statistics = trunk.watcher, trunk.statistics
        self._reach, self._watcher, self._statistics = reach, watcher, statistics
        self._sizes: Sizes = {}
        self._sizes_of_ranks: Sequence[Sizes] = []
        self._version = watcher.version
        self._patterns: dict[object, tuple[Pattern, Pattern]] = {}
        """By kind of passes: which parameters have a gradient on this rank, and on any rank."""
        self._pattern: tuple[object, Pattern] = None, ()

    def note_pattern(self, kind: object, has_gradient: Pattern) -> None:
        """Records which parameters have a gradient after passes of one kind."""
        self._pattern = kind, has_gradient

    def pattern(self) -> Pattern:
        """Whether each parameter has a gradient on any rank."""
        return self._patterns[self._pattern[0]][1]

    def of_heads(self, task: str, ranks: Sequence[int], like: Tensor) -> list[Tensor]:
        """The running statistics of a task's heads, or zeros of their sizes on ranks without them.

        Empty if the ranks that have the task ran different normalizations, or ran them in a
        different order.
        """
        sizes, *others = (self._sizes_of_ranks[rank].get(task, []) for rank in ranks)
        if any(other != sizes for other in others):
            return []
        mine = self._statistics.outside(task)
        if [(tensor.numel(), tensor.dtype) for tensor in mine] == sizes:
            return mine
        return [like.new_zeros(size, dtype=dtype) for size, dtype in sizes]

    def changed(self) -> bool:
        """Whether there are discoveries that the other ranks do not have."""
        kind, local = self._pattern
        known = self._patterns.get(kind)
        same = known is not None and known[0] == local
        seen = self._version == self._watcher.version and self._sizes == self._statistics.sizes()
        return not same or not seen or self._reach.changed()

    def to_send(self) -> dict[str, object]:
        """All discoveries, as a message."""
        watcher = self._watcher
        return {
            "norms": watcher.norms,
            "other_channels": watcher.other_channels,
            "norms_ran": watcher.norms_ran,
            "reach": self._reach.to_send(),
            "pattern": self._pattern[1],
            "sizes": self._statistics.sizes(),
        }

    def receive(self, of_ranks: Sequence[Any]) -> None:
        """Merges every rank's discoveries."""
        for of_rank in of_ranks:
            self._watcher.join(
                of_rank["norms"], of_rank["other_channels"], norms_ran=of_rank["norms_ran"]
            )
        self._version, self._sizes = self._watcher.version, self._statistics.sizes()
        self._sizes_of_ranks = [of_rank["sizes"] for of_rank in of_ranks]
        self._reach.receive([of_rank["reach"] for of_rank in of_ranks])
        kind, local = self._pattern
        columns = zip(*(of_rank["pattern"] for of_rank in of_ranks), strict=True)
        self._patterns[kind] = local, tuple(map(any, columns))
