"""The plan of Phase 2 on a GPU: items and tables, made once per trunk and cached on the device.

Phase 2 is one launch per dtype for a whole trunk. The work is cut into items, ordered so that each
item depends only on earlier ones:

    ENERGY   Computes the energies of a few rows (output channels) of a weight. The layer's last
             item to finish derives the layer's priorities.
    SUM      Handles a few tiles of a tensor: writes the plain sum of its gradients, and the
             products of each channel group's reference gradient G_i with all gradients. The
             layer's last item to finish adds up the products and derives a_i.
    PROJECT  Revisits the tiles of a few SUM items. Where a_i > 0: update += a_i * G_i.

A tile is a few segments; a segment lies within one row, and therefore within one channel group.

Blocks draw items in order from a ticket counter. An item waits only for items that running blocks
have already drawn, so no block schedule can deadlock. A layer's PROJECT items come late enough
after its SUM items that they rarely wait, and early enough that the gradients are still in the L2
cache.

Sums have a fixed order, so every run gives the same bits; only integers are added atomically.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from cs_kernels.ops.gpu.device import multiprocessors, numbered, refuse_capture, stream_of
from cs_kernels.ops.operands import ChannelLayout

MOST_SUM_ITEMS = 1024
"""The maximum number of SUM items per layer. One block adds up the products of all of them, while
other blocks work on other layers."""

# Kernels count segments and elements in 32 bits, and count slightly past the end.
_MOST_SEGMENTS = 1 << 30
_MOST_ELEMENTS = (1 << 32) - (1 << 16)


class ItemKind(IntEnum):
    ENERGY = 0
    SUM = 1
    PROJECT = 2


class TensorField(IntEnum):
    """Columns of the tensor table, whose contents depend only on the tensors' layouts."""

    ROWS = 0
    LENGTH = 1
    """Elements of a row."""
    CHANNELS = 2
    """Rows per convolution group."""
    INNER = 3
    """Contiguous elements of a row."""
    SEGMENT = 4
    """Elements of a segment."""
    ROW_SEGMENTS = 5
    SIZE = 6
    """In segments."""
    KERNEL_SIZE = 7
    LAYER = 8
    """-1 for a tensor without prioritized channels."""
    FIRST_ROW = 9
    """The index of the layer's first row among the rows of all layers."""
    FIRST_SUM = 10
    """The index of the layer's first SUM item among the SUM items of all layers."""
    SUM_ITEMS = 11
    TILES = 12
    """Tiles per SUM item."""
    ENERGY_ITEMS = 13
    ENERGY_ROWS = 14
    """Rows per ENERGY item."""
    PROJECT_SUMS = 15
    """SUM items per PROJECT item."""


class CallField(IntEnum):
    """Columns of the address table, which is rebuilt on every call."""

    UPDATE = 0
    WEIGHT = 1
    PRIORITY = 2
    ALIGNED = 3
    """Whether 16-byte accesses are allowed."""
    GRADIENTS = 4
    """The first task's gradient; the other tasks' gradients follow."""


class Counter(IntEnum):
    """A layer's counters; zero before the launch."""

    ENERGIES_DONE = 0
    PRIORITY_READY = 1
    SUMS_DONE = 2
    COEFFICIENTS_READY = 3


@dataclass(frozen=True)
class Tiling:
    """How a backend cuts tensors into segments, tiles and items."""

    tile_segments: int
    """Segments per tile."""
    unit: int
    """Elements per unit; a segment is a whole number of units."""
    energy_elements: int
    """Approximate elements per ENERGY item."""
    least_energy_rows: int
    least_items: int
    """Minimum SUM items per multiprocessor. Items grow only above this number, so that few
    multiprocessors idle at the end."""
    lag: int
    """SUM items per multiprocessor between a layer's last SUM and first PROJECT item."""
    most_units: int = 1
    """Maximum units per segment."""
    most_tiles: int = 1
    """Maximum tiles per SUM item, unless the layer would exceed `MOST_SUM_ITEMS`."""
    project_sums: int = 1
    """SUM items per PROJECT item."""

    def row_units(self, layout: ChannelLayout) -> int:
        _, outer, _, inner = layout
        return max(1, -(-(outer * inner) // self.unit))

    def segment(self, layout: ChannelLayout, most: int) -> int:
        """The number of elements per segment, for segments of at most `most` units.

        A row's last segment costs as much as a full one even if it is shorter, because its unused
        lanes idle. The overhead of a segment equals the cost of about two units.
        """
        units = self.row_units(layout)
        most = min(most, units, self.most_units)
        best = min(range(1, most + 1), key=lambda n: (-(-units // n) * (n + 2), -n))
        return best * self.unit

    def energy_rows(self, length: int) -> int:
        """Rows per ENERGY item, for rows of this length."""
        return max(self.least_energy_rows, power_of_two(self.energy_elements // max(1, length)))


@dataclass(frozen=True)
class Phase2Plan:
    """The items and tables of a Phase 2 launch."""

    items: Tensor
    """int32 [items, 3]: kind, tensor, index among the tensor's items of this kind."""
    tensors: Tensor
    """int64 [tensors, fields]."""
    epsilon: Tensor
    """float64 [layers, tasks]; empty if priorities are given."""
    rows: int
    """Rows of all layers."""
    sum_items: int
    """SUM items of all layers."""
    stream: int
    """The handle of the stream on which the tables were made."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        return self.items, self.tensors, self.epsilon


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def phase2_plan(
    layouts: tuple[ChannelLayout, ...],
    kernel_sizes: tuple[int, ...],
    eps: tuple[float, ...] | None,
    mask: tuple[bool, ...],
    tiling: Tiling,
    device: torch.device,
    kinds: tuple[ItemKind, ...] = tuple(ItemKind),
) -> Phase2Plan:
    """Makes the plan for a trunk whose first tensors are layers with prioritized channels.

    Args:
        layouts: One per tensor.
        kernel_sizes: The number of elements of each layer's kernel window.
        eps: One per layer and task, or None if priorities are given.
        mask: Whether each tensor has items.
        tiling: The kernel's tiling.
        device: The device of the tables.
        kinds: The kinds of items to include.

    """
    refuse_capture(device)
    sms = multiprocessors(device)
    smallest_tiles = sum(
        groups * channels * tiling.row_units(layout) // tiling.tile_segments
        for layout in layouts
        for groups, _, channels, _ in [layout]
    )
    most = max(1, smallest_tiles // (tiling.least_items * sms))
    fields: list[list[int]] = []
    first_row = first_sum = 0
    for t, (groups, outer, channels, inner) in enumerate(layouts):
        layer = t if t < len(kernel_sizes) else -1
        rows, length = groups * channels, outer * inner
        segment = tiling.segment(layouts[t], most)
        row_segments = -(-length // segment)
        segments = rows * row_segments
        tiles = -(-segments // tiling.tile_segments)
        if segments >= _MOST_SEGMENTS:
            raise ValueError(
                f"updates must have fewer than {_MOST_SEGMENTS} segments of {segment} elements, got"
                f" {segments}"
            )
        if layer >= 0 and length >= _MOST_ELEMENTS:
            raise ValueError(
                f"each output channel must have fewer than {_MOST_ELEMENTS} elements, got {length}"
            )
        per_item = min(tiling.most_tiles, most)
        if layer >= 0:
            per_item = max(per_item, -(-tiles // MOST_SUM_ITEMS))
        sum_items = -(-tiles // per_item) if mask[t] else 0
        has_energies = mask[t] and layer >= 0 and eps is not None and length > 0
        energy_rows = tiling.energy_rows(length)
        row = {
            TensorField.ROWS: rows,
            TensorField.LENGTH: length,
            TensorField.CHANNELS: channels,
            TensorField.INNER: max(inner, 1),
            TensorField.SEGMENT: segment,
            TensorField.ROW_SEGMENTS: max(row_segments, 1),
            TensorField.SIZE: segments,
            TensorField.KERNEL_SIZE: kernel_sizes[t] if layer >= 0 else 1,
            TensorField.LAYER: layer,
            TensorField.FIRST_ROW: first_row,
            TensorField.FIRST_SUM: first_sum,
            TensorField.SUM_ITEMS: sum_items,
            TensorField.TILES: per_item,
            TensorField.ENERGY_ITEMS: -(-rows // energy_rows) if has_energies else 0,
            TensorField.ENERGY_ROWS: energy_rows,
            TensorField.PROJECT_SUMS: tiling.project_sums,
        }
        fields.append([row[field] for field in TensorField])
        if layer >= 0:
            first_row += rows
            first_sum += sum_items
    return Phase2Plan(
        _items(fields, tiling.lag * sms, kinds).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        torch.tensor(eps or [], dtype=torch.float64, device="cpu").to(device),
        first_row,
        first_sum,
        stream_of(device),
    )


@lru_cache(maxsize=1024)
def layer_plan(
    layout: ChannelLayout, kernel_size: int, tiling: Tiling, device: torch.device
) -> Phase2Plan:
    """The plan for one layer's energies, in its own cache because a trunk has many layers."""
    return phase2_plan((layout,), (kernel_size,), (), (True,), tiling, device, (ItemKind.ENERGY,))


@dataclass(frozen=True)
class Epsilon:
    """One layer's epsilons, float64 [K], with the interface of `Tables`."""

    on_device: tuple[Tensor, ...]
    stream: int


@lru_cache(maxsize=1024)
def layer_epsilon(eps: tuple[float, ...], device: torch.device) -> Epsilon:
    refuse_capture(device)
    epsilon = torch.tensor(eps, dtype=torch.float64, device="cpu").to(device)
    return Epsilon((epsilon,), stream_of(device))


def _items(fields: Sequence[Sequence[int]], lag: int, kinds: Sequence[ItemKind]) -> Tensor:
    """Orders the items: ENERGY, then SUM; a layer's PROJECT items follow its SUM items after a lag.

    Large layers come first and tensors without PROJECT items come last, which shortens the wait at
    the end.
    """
    sum_items = [row[TensorField.SUM_ITEMS] for row in fields]
    order = sorted(
        range(len(fields)),
        key=lambda t: (fields[t][TensorField.LAYER] < 0, -fields[t][TensorField.SIZE]),
    )

    def items(kind: ItemKind, t: int, first: int, last: int) -> Tensor:
        return numbered([kind, t], last if kind in kinds else 0)[first:]

    def projections(t: int) -> Tensor:
        # In reverse order: the tiles read last are still in cache.
        number = -(-sum_items[t] // fields[t][TensorField.PROJECT_SUMS])
        return items(ItemKind.PROJECT, t, 0, number).flip(0)

    rows = [items(ItemKind.ENERGY, t, 0, fields[t][TensorField.ENERGY_ITEMS]) for t in order]
    # (layer, number of SUM items that come before its PROJECT items)
    waiting: deque[tuple[int, int]] = deque()
    summed = 0
    for t in order:
        first = 0
        while waiting and waiting[0][1] < summed + sum_items[t]:
            layer, after = waiting.popleft()
            rows.append(items(ItemKind.SUM, t, first, after - summed))
            first = after - summed
            rows.append(projections(layer))
        rows.append(items(ItemKind.SUM, t, first, sum_items[t]))
        summed += sum_items[t]
        if fields[t][TensorField.LAYER] >= 0:
            waiting.append((t, summed + lag))
    rows += [projections(layer) for layer, _ in waiting]
    return torch.cat(rows)
