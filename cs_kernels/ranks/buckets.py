"""Flat buckets of gradients, which are reduced over the ranks during the backward pass.

A bucket is cut into equal parts, one per rank, regardless of parameter boundaries. Every rank sends
the buckets in the same order, regardless of the order in which gradients arrive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.ranks.collectives import all_gather, all_reduce, reduce_scatter
from cs_kernels.ranks.pieces import ChannelArray, channel_array

BUCKET_BYTES = 25 << 20
"""The same size as in DistributedDataParallel: large enough to use the interconnect's bandwidth."""

_ALIGNMENT = 16
"""In bytes; aligned parts allow vector loads in kernels."""


class _Work(Protocol):
    def wait(self) -> object: ...


class Slot(NamedTuple):
    """The location of a parameter's elements in a bucket."""

    bucket: int
    start: int
    """The index in the bucket of the parameter's first element."""
    first: int
    """The index in the parameter of its first element in this rank's part."""
    last: int
    """One past the last element in this rank's part; equal to `first` if there is none."""


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Channels-last strides if the parameter has them without gaps, else contiguous strides."""
    kept = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if kept is None or not parameter.is_contiguous(memory_format=kept):
        kept = torch.contiguous_format
    return torch.empty_like(parameter, device="meta", memory_format=kept).stride()


class Buckets:
    """The buckets of the given parameters.

    Args:
        parameters: The parameters, by index among the shared parameters.
        group: The process group of the ranks.

    """

    def __init__(self, parameters: dict[int, nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.slots: dict[int, Slot] = {}
        self.flat: list[Tensor] = []
        """The memory of each bucket: gradients in flight, later updates."""
        self.views: dict[int, Tensor] = {}
        """A view of each parameter's elements in its bucket, in the parameter's shape."""
        self.members: list[list[int]] = []
        """The parameters in each bucket."""
        self._part: list[int] = []
        """For each bucket: the number of elements per part."""
        self._parameters = parameters
        # In reverse, because backward passes reach the last parameters first.
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, parameter in reversed(parameters.items()):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(i)
        for indices in kinds.values():
            self._fill(indices)
        self._works: list[_Work | None] = [None] * len(self.flat)

    def _fill(self, indices: Iterable[int]) -> None:
        """Makes the buckets for parameters of one dtype and device."""
        members: list[int] = []
        nbytes = 0
        for i in indices:
            if members and nbytes + self._parameters[i].nbytes > BUCKET_BYTES:
                self._add(members)
                members, nbytes = [], 0
            members.append(i)
            nbytes += self._parameters[i].nbytes
        if members:
            self._add(members)

    def _add(self, members: list[int]) -> None:
        like = self._parameters[members[0]]
        numel = sum(self._parameters[i].numel() for i in members)
        aligned = _ALIGNMENT // like.itemsize
        part = -(-numel // (self.size * aligned)) * aligned
        # Zeros, because the padding at the end is summed too.
        flat = torch.zeros(part * self.size, dtype=like.dtype, device=like.device)
        bucket, start = len(self.flat), 0
        first_of_part, last_of_part = self.rank * part, (self.rank + 1) * part
        for i in members:
            parameter = self._parameters[i]
            numel = parameter.numel()
            first = min(max(first_of_part - start, 0), numel)
            last = max(min(last_of_part - start, numel), first)
            self.slots[i] = Slot(bucket, start, first, last)
            self.views[i] = flat.as_strided(parameter.shape, _dense_strides(parameter), start)
            start += numel
        self.flat.append(flat)
        self.members.append(members)
        self._part.append(part)

    def array(self, i: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """Describes a weight's elements in its bucket as an array of output channels."""
        view = self.views[i]
        return channel_array(view.shape, view.stride(), out_channel_dim, groups)

    def new_parts(self) -> list[Tensor]:
        """Allocates tensors for this rank's part of each bucket."""
        return [flat.new_empty(part) for flat, part in zip(self.flat, self._part, strict=True)]

    def own_parts(self) -> list[Tensor]:
        """Views of this rank's part of each bucket."""
        return [
            flat[self.rank * part : (self.rank + 1) * part]
            for flat, part in zip(self.flat, self._part, strict=True)
        ]

    def part_of(self, i: int, parts: Sequence[Tensor]) -> Tensor:
        """The elements of a parameter in this rank's parts, flat."""
        slot = self.slots[i]
        start = slot.start - self.rank * self._part[slot.bucket]
        return parts[slot.bucket][start + slot.first : start + slot.last]

    def gathered(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Gathers all ranks' parts into new memory; returns a tensor per parameter."""
        wholes = [torch.empty_like(flat) for flat in self.flat]
        pairs = zip(wholes, parts, strict=True)
        works = [all_gather(w, part, group=self._group, async_op=True) for w, part in pairs]
        for work in works:
            if work is not None:
                work.wait()
        return {
            i: wholes[self.slots[i].bucket].as_strided(
                view.shape, view.stride(), view.storage_offset()
            )
            for i, view in self.views.items()
        }

    def flat_of(self, i: int, tensor: Tensor) -> Tensor:
        """Flattens a tensor of a parameter's shape, in the order of the parameter's bucket."""
        view = self.views[i]
        if tensor.stride() != view.stride():
            tensor = torch.empty_like(view).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def send(self, bucket: int, parts: Sequence[Tensor] | None) -> None:
        """Starts the sum of a bucket's gradients, which are moved out of `.grad`.

        Args:
            bucket: The index of the bucket.
            parts: Tensors that receive this rank's part of each sum; None to sum buckets in place.

        """
        self.wait(bucket)
        targets, grads = [], []
        for i in self.members[bucket]:
            grad = self._parameters[i].grad
            if grad is None:
                self.views[i].zero_()
            else:
                targets.append(self.views[i])
                grads.append(grad)
                self._parameters[i].grad = None
        if targets:
            torch._foreach_copy_(targets, grads)
        flat = self.flat[bucket]
        if parts is None:
            self._works[bucket] = all_reduce(flat, group=self._group, async_op=True)
        else:
            self._works[bucket] = reduce_scatter(
                parts[bucket], flat, group=self._group, async_op=True
            )

    def gather(self, buckets: Iterable[int]) -> None:
        """Gathers all ranks' parts of the buckets."""
        parts = self.own_parts()
        for bucket in buckets:
            self._works[bucket] = all_gather(
                self.flat[bucket], parts[bucket], group=self._group, async_op=True
            )
        self.wait_all()

    def wait(self, bucket: int) -> None:
        """Waits for the last collective of a bucket; on a GPU, only the stream waits."""
        work, self._works[bucket] = self._works[bucket], None
        if work is not None:
            work.wait()

    def wait_all(self) -> None:
        """Waits for the collectives of all buckets."""
        for bucket in range(len(self.flat)):
            self.wait(bucket)


class Overlap:
    """Sends the buckets of one pass in order, each as soon as its gradients are complete.

    Earlier passes of the same kind show how often each gradient is accumulated: more than once if
    reentrant checkpointing recomputes a layer that runs twice. The first pass of a kind therefore
    sends nothing early. A bucket waits for the gradients of all its parameters, because a layer
    that was skipped before may run again.

    Args:
        parameters: The parameters, by index among the shared parameters.

    """

    def __init__(self, parameters: dict[int, nn.Parameter]) -> None:
        self._known: dict[object, Counter[int]] = {}
        """For each kind of pass: the maximum number of accumulations of each gradient."""
        self._seen = Counter[int]()
        """The number of accumulations of each gradient in this pass."""
        self._order: Sequence[int] = ()
        self._sent = 0
        """The number of buckets sent."""
        self._missing: dict[int, int] = {}
        """For each bucket: the number of accumulations still to come."""
        self._expected = Counter[int]()
        self._bucket_of: dict[int, int] = {}
        self._send: Callable[[int], None] | None = None
        this = weakref.proxy(self)  # The parameters' hooks must not keep this object alive.
        for i, parameter in parameters.items():
            handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, i=i: this.accumulated(i)
            )
            weakref.finalize(self, handle.remove)

    def reset(self, order: Sequence[int]) -> None:
        """Prepares for a pass; its buckets are sent in this order, which is equal on all ranks."""
        self._seen.clear()
        self._order, self._sent, self._send = order, 0, None

    def start(
        self, kind: object, members: Sequence[Sequence[int]], send: Callable[[int], None]
    ) -> None:
        """Announces the last backward pass, in which buckets may be sent.

        Args:
            kind: The kind of pass; passes of one kind usually accumulate the same gradients.
            members: The parameters in each bucket.
            send: Called to send a bucket.

        """
        known = self._known.get(kind)
        if known is not None:
            self._bucket_of = {i: b for b, of_bucket in enumerate(members) for i in of_bucket}
            self._expected = Counter({i: max(1, known[i]) for i in self._bucket_of})
            self._missing = {
                b: sum(self._expected[i] for i in of_bucket) for b, of_bucket in enumerate(members)
            }
            self._send = send

    def accumulated(self, i: int) -> None:
        """Called after a gradient was accumulated into `.grad`."""
        if self._send is not None:
            # Sends before this parameter is counted, so that the parameter's other hooks run before
            # its bucket is sent.
            while self._sent < len(self._order) and not self._missing[self._order[self._sent]]:
                self._send(self._order[self._sent])
                self._sent += 1
            if self._seen[i] < self._expected[i]:
                self._missing[self._bucket_of[i]] -= 1
        self._seen[i] += 1

    def finish(self, kind: object, send: Callable[[int], None]) -> None:
        """Records the counts of this pass, and sends the remaining buckets."""
        self._send = None
        if self._seen:
            self._known[kind] = self._known.get(kind, Counter()) | self._seen
        while self._sent < len(self._order):
            send(self._order[self._sent])
            self._sent += 1

    def fail(self) -> None:
        """Ends a failed pass, and discards its counts."""
        self._seen.clear()

    def forget(self) -> None:
        """Forgets the counts of earlier passes."""
        self._known.clear()
