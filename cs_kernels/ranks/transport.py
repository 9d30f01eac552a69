"""Exchanges messages between the ranks' hosts, in a ring or along rows and columns of a grid."""

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist

from cs_kernels.ranks.collectives import all_gather
from cs_kernels.torch_internals.groups import names_are_counted, number_of_groups, timeout_of

_GRID_FROM = 16
"""The number of ranks from which messages go along the rows of a grid, then along its columns. A
ring of W ranks has W - 1 sequential hops; a square grid has 2 (sqrt(W) - 1)."""


def _check_names(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises RuntimeError if the next group would deadlock, with different names on the ranks."""
    number = number_of_groups(counted=names_are_counted(dist.get_world_size(group)))
    count = torch.tensor([number], device=device)
    counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, count, group=group)
    found = [int(number) for number in counts]
    if len(set(found)) > 1:
        raise RuntimeError(
            "ranks must have made the same number of process groups before MultiTaskOptimizer makes"
            f" one, got {found}: call new_group on every rank"
        )


def grid_rows(ranks: int) -> int:
    """The number of rows of the most nearly square grid; 1, a ring, for few ranks."""
    if ranks < _GRID_FROM:
        return 1
    return max(rows for rows in range(1, isqrt(ranks) + 1) if ranks % rows == 0)


class Transport:
    """Carries values between the hosts of the given ranks.

    Args:
        numbers: The numbers of the ranks in the default group, in order.
        group: A process group of these ranks, which sets the timeout.
        device: The device of the group's collectives.

    Raises:
        ValueError: This process is not among the ranks.

    """

    def __init__(
        self, numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        if dist.get_rank() not in numbers:
            raise ValueError(
                f"process_group must contain this process, of rank {dist.get_rank()}, but has the"
                f" ranks {list(numbers)}"
            )
        self.numbers = list(numbers)
        self.rank = self.numbers.index(dist.get_rank())
        self.size = len(self.numbers)
        # Longer than the group's timeout, because a failed rank waits for an answer to its message
        # while other ranks still wait for it in collectives.
        self._timeout = 2 * timeout_of(group, device) + timedelta(seconds=10)
        self._made: list[dist.ProcessGroup] = []
        _check_names(group, device)
        (self._hosts,) = self._of_hosts([range(self.size)])
        self._rings = [self._hosts]
        """The groups in which a message is exchanged, one after the other."""
        rows = grid_rows(self.size)
        if rows > 1:
            width = self.size // rows
            of_row = [range(row * width, (row + 1) * width) for row in range(rows)]
            of_column = [range(column, self.size, width) for column in range(width)]
            self._rings = [*self._of_hosts(of_row), *self._of_hosts(of_column)]

    def _of_hosts(self, groups: Iterable[Sequence[int]]) -> list[dist.ProcessGroup]:
        """Makes process groups for messages; returns the ones that contain this rank."""
        made = []
        for members in groups:
            group = self.new_group([self.numbers[n] for n in members], self._timeout, "gloo")
            made += [group] if self.rank in members else []
        return made

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, backend: str
    ) -> dist.ProcessGroup:
        """Makes a group of these ranks, for use until `close`; all ranks in `numbers` call it."""
        is_whole = self.size == dist.get_world_size()
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, use_local_synchronization=not is_whole
        )
        if names_are_counted(self.size) and dist.get_rank() in ranks:
            self._made.append(group)
        return group

    def close(self) -> None:
        """Destroys the groups that `new_group` made, and their threads.

        Before torch 2.14, the groups of a transport without all ranks of the default group are not
        destroyed, because a later group could get the same name.
        """
        while self._made:
            with contextlib.suppress(ValueError):  # The caller destroyed all groups before.
                dist.destroy_process_group(self._made.pop())

    def gather(self, value: Any) -> list[Any]:
        """Gathers a picklable value from every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers numbers from all ranks, the same count from each."""
        received = torch.tensor(numbers, device="cpu")
        for ring in self._rings:
            sent = received
            received = sent.new_empty(dist.get_world_size(ring) * len(sent))
            all_gather(received, sent, group=ring)
        found: list[list[int]] = received.view(self.size, -1).tolist()
        return found
