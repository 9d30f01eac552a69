"""The plan of Phase 2 on a GPU: its items and tables, made once for a trunk and kept on the device.

Phase 2 is one launch for a whole trunk. The work is cut into items, in an order in which every item
depends only on earlier ones:

    ENERGY   the energies of some rows (output channels) of a weight. The last item of a layer
             derives the layer's priorities.
    SUM      one or some tiles of a tensor: writes the plain sum of its gradients, and the products
             of each channel group's reference gradient G_i with all. The last item of a layer adds
             them up and derives a_i.
    PROJECT  the tiles of some SUM items again, where a_i > 0: update += a_i * G_i.

A tile is some segments; a segment is a part of one row, so of one channel group.

A block draws the next item as a ticket. An item waits only for items that running blocks hold, so
waiting ends in any schedule of blocks. PROJECT items follow their layer's SUM items at
a distance at which they rarely wait and still find the gradients in the L2 cache.

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
"""Per layer: one block adds up their products while the others work on other layers."""

# Kernels count these in 32 bits, also past the end.
_MOST_SEGMENTS = 1 << 30
_MOST_ELEMENTS = (1 << 32) - (1 << 16)


class ItemKind(IntEnum):
    """The kinds of items."""

    ENERGY = 0
    SUM = 1
    PROJECT = 2


class TensorField(IntEnum):
    """A row of the table of tensors, made from their layouts."""

    ROWS = 0
    LENGTH = 1
    """Elements of a row."""
    CHANNELS = 2
    """Rows of a group."""
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
    """The layer's, among the rows of all layers."""
    FIRST_SUM = 10
    """The layer's, among the SUM items of all layers."""
    SUM_ITEMS = 11
    TILES = 12
    """Tiles of a SUM item."""
    ENERGY_ITEMS = 13
    ENERGY_ROWS = 14
    """Rows of an ENERGY item."""
    PROJECT_SUMS = 15
    """SUM items of a PROJECT item."""


class CallField(IntEnum):
    """A row of the table of addresses, made in every call."""

    UPDATE = 0
    WEIGHT = 1
    PRIORITY = 2
    ALIGNED = 3
    """Whether 16-byte accesses are allowed."""
    GRADIENTS = 4
    """The first task's; the others follow."""


class Counter(IntEnum):
    """The counters of a layer; zero before the launch."""

    ENERGIES_DONE = 0
    PRIORITY_READY = 1
    SUMS_DONE = 2
    COEFFICIENTS_READY = 3


@dataclass(frozen=True)
class Tiling:
    """How a backend cuts tensors into segments, tiles and items."""

    tile_segments: int
    """Segments of a tile."""
    unit: int
    """Elements; a segment has a number of units."""
    energy_elements: int
    """Elements of an ENERGY item, about."""
    least_energy_rows: int
    least_items: int
    """Minimum SUM items per multiprocessor; items grow only beyond it, to keep the tail short."""
    lag: int
    """SUM items between the last of a layer and its first PROJECT item, per multiprocessor."""
    most_units: int = 1
    """Units of a segment."""
    most_tiles: int = 1
    """Tiles of a SUM item, in a layer that is not too large for `MOST_SUM_ITEMS`."""
    project_sums: int = 1
    """SUM items of a PROJECT item."""

    def units(self, layout: ChannelLayout) -> int:
        """Units of a row."""
        _, outer, _, inner = layout
        return max(1, -(-(outer * inner) // self.unit))

    def segment(self, layout: ChannelLayout, most: int) -> int:
        """Elements of a segment, with at most so many units.

        The last segment of a row may be shorter, while its lanes wait for others'. What a segment
        costs beside its elements is as much as about two units.
        """
        units = self.units(layout)
        most = min(most, units, self.most_units)
        per = min(range(1, most + 1), key=lambda n: (-(-units // n) * (n + 2), -n))
        return per * self.unit

    def energy_rows(self, length: int) -> int:
        """Rows of an ENERGY item, for rows of this length."""
        return max(self.least_energy_rows, power_of_two(self.energy_elements // max(1, length)))


@dataclass(frozen=True)
class Phase2Plan:
    """The items and tables of a Phase 2 launch."""

    items: Tensor
    """int32 [items, 3]: kind, tensor, index among the tensor's items of this kind."""
    tensors: Tensor
    """int64 [tensors, fields]."""
    epsilon: Tensor
    """float64 [layers, tasks]; empty where priorities are given."""
    rows: int
    """Rows of all layers."""
    sum_items: int
    """SUM items of all layers."""
    stream: int
    """The stream on which the tables were made."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """The tensors that launches read."""
        return self.items, self.tensors, self.epsilon


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def phase2_plan(
    layouts: tuple[ChannelLayout, ...],
    kernel_sizes: tuple[int, ...],
    eps: tuple[float, ...] | None,
    chosen: tuple[bool, ...],
    tiling: Tiling,
    device: torch.device,
    kinds: tuple[ItemKind, ...] = tuple(ItemKind),
) -> Phase2Plan:
    """The plan of a trunk whose first tensors are layers with prioritized channels.

    Args:
        layouts: One for each tensor.
        kernel_sizes: k^2 of each layer.
        eps: One for each layer and task, or None if priorities are given.
        chosen: A mask of the tensors that have items.
        tiling: The tiling of the kernel.
        device: The device of the tables.
        kinds: The kinds of items.

    """
    refuse_capture(device)
    sms = multiprocessors(device)
    small = sum(
        groups * channels * tiling.units(layout) // tiling.tile_segments
        for layout in layouts
        for groups, _, channels, _ in [layout]
    )
    most = max(1, small // (tiling.least_items * sms))
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
                f"updates must have less than {_MOST_SEGMENTS} segments of {segment} elements, got"
                f" {segments}"
            )
        if layer >= 0 and length >= _MOST_ELEMENTS:
            raise ValueError(
                f"output channels must have less than {_MOST_ELEMENTS} elements, got {length}"
            )
        per_item = min(tiling.most_tiles, most)
        if layer >= 0:
            per_item = max(per_item, -(-tiles // MOST_SUM_ITEMS))
        sum_items = -(-tiles // per_item) if chosen[t] else 0
        energies = chosen[t] and layer >= 0 and eps is not None and length > 0
        energy_rows = tiling.energy_rows(length)
        of_tensor = {
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
            TensorField.ENERGY_ITEMS: -(-rows // energy_rows) if energies else 0,
            TensorField.ENERGY_ROWS: energy_rows,
            TensorField.PROJECT_SUMS: tiling.project_sums,
        }
        fields.append([of_tensor[field] for field in TensorField])
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
    """The plan of one layer's energies; its own cache, as a trunk has many layers."""
    return phase2_plan((layout,), (kernel_size,), (), (True,), tiling, device, (ItemKind.ENERGY,))


@dataclass(frozen=True)
class Epsilon:
    """Float64 [K] on a device."""

    on_device: tuple[Tensor, ...]
    stream: int


@lru_cache(maxsize=1024)
def layer_epsilon(eps: tuple[float, ...], device: torch.device) -> Epsilon:
    """The epsilons of one layer, kept on the device."""
    refuse_capture(device)
    epsilon = torch.tensor(eps, dtype=torch.float64, device="cpu").to(device)
    return Epsilon((epsilon,), stream_of(device))


def _items(fields: Sequence[Sequence[int]], lag: int, kinds: Sequence[ItemKind]) -> Tensor:
    """ENERGY items first, then SUM items, and among these a layer's PROJECT items, a lag behind.

    Large layers come first and tensors without PROJECT items last, which shortens the wait at the
    end.
    """
    sum_items = [of_tensor[TensorField.SUM_ITEMS] for of_tensor in fields]
    order = sorted(
        range(len(fields)),
        key=lambda t: (fields[t][TensorField.LAYER] < 0, -fields[t][TensorField.SIZE]),
    )

    def piece(kind: ItemKind, t: int, first: int, last: int) -> Tensor:
        return numbered([kind, t], last if kind in kinds else 0)[first:]

    def projections(t: int) -> Tensor:
        # Backwards: the last tiles read are in the cache.
        number = -(-sum_items[t] // fields[t][TensorField.PROJECT_SUMS])
        return piece(ItemKind.PROJECT, t, 0, number).flip(0)

    rows = [piece(ItemKind.ENERGY, t, 0, fields[t][TensorField.ENERGY_ITEMS]) for t in order]
    waiting: deque[tuple[int, int]] = deque()  # a layer, and the SUM items before its PROJECT items
    summed = 0
    for t in order:
        first = 0
        while waiting and waiting[0][1] < summed + sum_items[t]:
            done, after = waiting.popleft()
            rows.append(piece(ItemKind.SUM, t, first, after - summed))
            first = after - summed
            rows.append(projections(done))
        rows.append(piece(ItemKind.SUM, t, first, sum_items[t]))
        summed += sum_items[t]
        if fields[t][TensorField.LAYER] >= 0:
            waiting.append((t, summed + lag))
    rows += [projections(done) for done, _ in waiting]
    return torch.cat(rows)
