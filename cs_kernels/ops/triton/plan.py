"""Which program does what: made once for a trunk, kept on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cs_kernels.ops.operands import ChannelLayout
from cs_kernels.ops.triton import phase2
from cs_kernels.ops.triton.device import processors, refuse_capture

MOST_SUM_ITEMS = 256
"""Of a layer: one program adds up what they leave, while the others work on other layers."""

MOST_TASKS = 64

_SEGMENT: int = phase2.SEGMENT.value
_ENERGY_ROWS: int = phase2.ENERGY_ROWS.value


@dataclass(frozen=True)
class Phase2Plan:
    """The items of a Phase 2 launch, and the tensors that they are of."""

    items: Tensor
    """int32 [programs, 3]."""
    tensors: Tensor
    """int64 [tensors, TENSOR_FIELDS]."""
    epsilon: Tensor
    """float64 [layers, tasks]; empty where priorities are given."""
    rows: int
    """Of all layers."""
    sum_items: int
    """Of all layers."""


# Elements of a tile by itemsize and tasks: as many as a program's registers hold.
_TILE = {
    2: {2: 2048, 4: 1024, 8: 1024, 64: 512},
    4: {2: 2048, 4: 1024, 8: 512, 64: 256},
    8: {2: 1024, 4: 512, 8: 256, 64: 128},
}
# Tiles of an item: finding out what to do takes as long as about three of them.
_MOST_TILES = 8
# Items for each multiprocessor, before they are made larger: the last ones leave it idle in part.
_LEAST_ITEMS = 16
# SUM items between the last of a layer and its first FIX item, for each multiprocessor: as many as
# run at once.
_LAG = 4


def power_of_two(n: int) -> int:
    """The least one that is not less."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Variant:
    """The compile-time numbers of the kernel."""

    tasks: int
    segments: int
    vector: int

    @property
    def elements(self) -> int:
        """Of a tile."""
        return self.segments * _SEGMENT

    @staticmethod
    def of(tasks: int, dtype: torch.dtype) -> "Variant":
        """Few of them: the number of tasks is rounded up to 2, 4, 8 or 64."""
        rounded = 64 if tasks > 8 else max(2, power_of_two(tasks))
        segments = _TILE[dtype.itemsize][rounded] // _SEGMENT
        return Variant(rounded, segments, 16 // dtype.itemsize)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether 16 bytes can be read at once at each of these."""
    together = 0
    for address in addresses:
        together |= address
    return together % 16 == 0


def vector_accesses(layout: ChannelLayout, itemsize: int, addresses: Sequence[int]) -> bool:
    """Whether every row of the tensors at these addresses can be read 16 bytes at a time."""
    _, outer, _, inner = layout
    return outer == 1 and (inner * itemsize) % 16 == 0 and aligned(addresses)


@lru_cache(maxsize=64)
def phase2_plan(
    layouts: tuple[ChannelLayout, ...],
    kernel_sizes: tuple[int, ...],
    eps: tuple[float, ...] | None,
    chosen: tuple[bool, ...],
    tasks: int,
    variant: Variant,
    device: torch.device,
) -> Phase2Plan:
    """The plan of a trunk whose first tensors are layers with prioritized channels.

    Args:
        layouts: Of all tensors.
        kernel_sizes: k^2 of the layers.
        eps: Of each layer and task, or None where the priorities are given.
        chosen: Which tensors the launch is for.
        tasks: K.
        variant: Of the kernel.
        device: Where it is to lie.

    """
    refuse_capture(device)
    multiprocessors = processors(device)
    all_tiles = sum(g * c * -(-(o * i) // _SEGMENT) for g, o, c, i in layouts) // variant.segments
    most_tiles = min(_MOST_TILES, max(1, all_tiles // (_LEAST_ITEMS * multiprocessors)))
    fields: list[list[int]] = []
    first_row = first_sum = 0
    for t, (groups, outer, channels, inner) in enumerate(layouts):
        layer = t if t < len(kernel_sizes) else -1
        rows, length = groups * channels, outer * inner
        row_segments = -(-length // _SEGMENT)
        segments = rows * row_segments
        if segments >= 2**30:  # counted in 32 bits, also past the end
            raise ValueError(
                f"updates must have less than 2^30 segments of {_SEGMENT} elements, got {segments}"
            )
        tiles = -(-segments // variant.segments)
        per_item = max(most_tiles, -(-tiles // MOST_SUM_ITEMS) if layer >= 0 else 1)
        sum_items = -(-tiles // per_item) if chosen[t] else 0
        energies = chosen[t] and layer >= 0 and eps is not None and length > 0
        of_tensor = {
            phase2.ROWS: rows,
            phase2.LENGTH: length,
            phase2.CHANNELS: channels,
            phase2.INNER: max(inner, 1),
            phase2.ROW_SEGMENTS: max(row_segments, 1),
            phase2.SEGMENTS: segments,
            phase2.KERNEL_SIZE: kernel_sizes[t] if layer >= 0 else 1,
            phase2.LAYER: layer,
            phase2.FIRST_ROW: first_row,
            phase2.FIRST_SUM: first_sum,
            phase2.SUM_ITEMS: sum_items,
            phase2.TILES: per_item,
            phase2.ENERGY_ITEMS: -(-rows // _ENERGY_ROWS) if energies else 0,
        }
        fields.append([number for _, number in sorted(of_tensor.items(), key=lambda f: f[0].value)])
        if layer >= 0:
            first_row += rows
            first_sum += sum_items
    return Phase2Plan(
        _items(fields, _LAG * multiprocessors).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        torch.tensor(eps or [], dtype=torch.float64, device="cpu").to(device),
        first_row,
        first_sum,
    )


def _items(fields: Sequence[Sequence[int]], lag: int) -> Tensor:
    """int32 [programs, 3]: ENERGY items first, then SUM items with FIX items behind them."""
    sum_items, energy_items = phase2.SUM_ITEMS.value, phase2.ENERGY_ITEMS.value
    pieces = [_piece([phase2.ENERGY.value, t], f[energy_items]) for t, f in enumerate(fields)]
    waiting: list[tuple[int, int]] = []  # layers, and how many SUM items stand before their end
    summed = 0
    for t, f in enumerate(fields):
        pieces.append(_piece([phase2.SUM.value, t], f[sum_items]))
        summed += f[sum_items]
        if f[phase2.LAYER.value] >= 0:
            waiting.append((t, summed))
        while waiting and summed - waiting[0][1] >= lag:
            done, _ = waiting.pop(0)
            pieces.append(_fix(done, fields[done][sum_items]))
    pieces += [_fix(done, fields[done][sum_items]) for done, _ in waiting]
    return torch.cat(pieces)


def _fix(tensor: int, number: int) -> Tensor:
    """Backwards: what was read last is in the cache."""
    return _piece([phase2.FIX.value, tensor], number).flip(0)


def _piece(what: Sequence[int], number: int) -> Tensor:
    """Items of one kind and tensor, in order: what, index."""
    piece = torch.empty((number, len(what) + 1), dtype=torch.int32, device="cpu")
    piece[:, :-1] = torch.tensor(what, dtype=torch.int32, device="cpu")
    piece[:, -1] = torch.arange(number, dtype=torch.int32, device="cpu")
    return piece


@dataclass(frozen=True)
class GradientPlan:
    """The items of a launch, and the tensors that they are of."""

    items: Tensor
    """int32 [programs, 2]."""
    tensors: Tensor
    """int64 [tensors, TENSOR_FIELDS]."""
    empty_groups: tuple[int, ...]
    """Those without an item."""


@lru_cache(maxsize=64)
def gradient_plan(
    sizes: tuple[int, ...],
    group_of: tuple[int, ...],
    groups: int,
    chosen: tuple[bool, ...],
    elements: int,
    most_tiles: int,
    device: torch.device,
) -> GradientPlan:
    """The plan for tensors of these sizes.

    Args:
        sizes: In elements.
        group_of: The group of each tensor.
        groups: Their number.
        chosen: Which tensors the launch is for.
        elements: Of a tile.
        most_tiles: Of an item.
        device: Where it is to lie.

    """
    refuse_capture(device)
    tiles = [-(-size // elements) if here else 0 for size, here in zip(sizes, chosen, strict=True)]
    per_item = min(most_tiles, max(1, sum(tiles) // (_LEAST_ITEMS * processors(device))))
    number = [-(-n // per_item) for n in tiles]
    of_group = [0] * groups
    for t, group in enumerate(group_of):
        of_group[group] += number[t]
    first_item = [sum(of_group[:group]) for group in range(groups)]
    fields, place = [], 0
    for t, size in enumerate(sizes):
        group = group_of[t]
        fields.append([size, group, first_item[group], of_group[group], per_item, place])
        place += size
    order = sorted(range(len(sizes)), key=lambda t: group_of[t])
    return GradientPlan(
        torch.cat([_piece([t], number[t]) for t in order]).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        tuple(group for group, n in enumerate(of_group) if n == 0),
    )
