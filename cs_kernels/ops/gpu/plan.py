"""Which block of threads does what: made once for a trunk, kept on the device.

Phase 2 is one launch for a whole trunk. The work is cut into items, listed in an order in which
every item depends on earlier ones only:

    ENERGY   the energies of some rows (output channels) of a weight. The last one of a layer finds
             the layer's priorities.
    SUM      some tiles of a tensor: the plain sum of its gradients is written, and the products of
             each channel group's own gradient with all are kept. The last one of a layer adds them
             up and finds a_i.
    FIX      the same tiles once more, where a_i > 0: update += a_i * G_i.

A block draws the next item as its ticket, so what an item waits for is being computed by a block
that runs already: waiting ends, however blocks are scheduled. A layer's FIX items stand so far
behind its SUM items that they rarely wait and still find the gradients in the L2 cache.

Whoever adds numbers up does so in the order of their places: the same bits in every run. Counters
are integers; no floating-point number is added atomically.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from cs_kernels.ops.gpu.device import processors, refuse_capture, stream_of
from cs_kernels.ops.operands import ChannelLayout

MOST_SUM_ITEMS = 256
"""Of a layer: one block adds up what they leave, while the others work on other layers."""

# Of a launch over all gradients, for each multiprocessor, before items are made larger.
_LEAST_ITEMS = 16


class ItemKind(IntEnum):
    """What an item is."""

    ENERGY = 0
    SUM = 1
    FIX = 2


class TensorField(IntEnum):
    """What is known of a tensor from its layout; a row of the table of tensors."""

    ROWS = 0
    LENGTH = 1
    """Of a row, in elements."""
    CHANNELS = 2
    """Of a group."""
    INNER = 3
    """Elements of a row that lie next to each other."""
    ROW_SEGMENTS = 4
    SEGMENTS = 5
    KERNEL_SIZE = 6
    LAYER = 7
    """Its number; -1 for a tensor without prioritized channels."""
    FIRST_ROW = 8
    """Of the layer, among those of all layers."""
    FIRST_SUM = 9
    """Its SUM items, among those of all layers."""
    SUM_ITEMS = 10
    TILES = 11
    """Of a SUM or FIX item."""
    ENERGY_ITEMS = 12
    ENERGY_ROWS = 13
    """Of an ENERGY item."""


class CallField(IntEnum):
    """What is known of a tensor in a call; a row of the table of addresses."""

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
    FACTORS_READY = 3


class GradientField(IntEnum):
    """What a kernel over all gradients knows of a tensor from its size."""

    SIZE = 0
    GROUP = 1
    FIRST_ITEM = 2
    """Of the group."""
    GROUP_ITEMS = 3
    TILES = 4
    """Of an item."""
    FIRST_PLACE = 5
    """Its elements, among those of all tensors."""


class GradientCallField(IntEnum):
    """What it knows of a tensor in a call."""

    UPDATE = 0
    ALIGNED = 1
    GRADIENTS = 2


@dataclass(frozen=True)
class Tiling:
    """How a backend cuts tensors into tiles, and tiles into items."""

    elements: int
    """Of a tile."""
    segment: int
    """Elements of a row that are worked on together; 1 where a tile goes on in the next row."""
    energy_elements: int
    """Of an ENERGY item, about."""
    least_energy_rows: int
    most_tiles: int
    """Of a SUM item."""
    least_items: int
    """For each multiprocessor, before they are made larger: the last ones leave it idle in part."""
    lag: int
    """SUM items between the last of a layer and its first FIX item, for each multiprocessor."""
    most_segments: int = 1 << 62
    """Of a tensor."""

    def segments(self, layout: ChannelLayout) -> int:
        """Of a tensor."""
        groups, outer, channels, inner = layout
        return groups * channels * -(-(outer * inner) // self.segment)

    def tiles(self, layout: ChannelLayout) -> int:
        """Of a tensor."""
        return -(-self.segments(layout) // (self.elements // self.segment))

    def energy_rows(self, length: int) -> int:
        """Of an ENERGY item of a layer whose rows are so long."""
        return max(self.least_energy_rows, self.energy_elements // max(1, length))


@dataclass(frozen=True)
class Phase2Plan:
    """The items of a Phase 2 launch, and the tensors that they are of."""

    items: Tensor
    """int32 [items, 3]: kind, tensor, index among the tensor's items of this kind."""
    tensors: Tensor
    """int64 [tensors, fields]."""
    epsilon: Tensor
    """float64 [layers, tasks]; empty where priorities are given."""
    rows: int
    """Of all layers."""
    sum_items: int
    """Of all layers."""
    stream: int
    """The one it was made on."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """What launches read."""
        return self.items, self.tensors, self.epsilon


def power_of_two(n: int) -> int:
    """The least one that is not less."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=64)
def phase2_plan(
    layouts: tuple[ChannelLayout, ...],
    kernel_sizes: tuple[int, ...],
    eps: tuple[float, ...] | None,
    chosen: tuple[bool, ...],
    tiling: Tiling,
    device: torch.device,
) -> Phase2Plan:
    """The plan of a trunk whose first tensors are layers with prioritized channels.

    Args:
        layouts: Of all tensors.
        kernel_sizes: k^2 of the layers.
        eps: Of each layer and task, or None where the priorities are given.
        chosen: Which tensors the launch is for.
        tiling: Of the kernel.
        device: Where it is to lie.

    """
    refuse_capture(device)
    multiprocessors = processors(device)
    all_tiles = sum(tiling.tiles(layout) for layout in layouts)
    most_tiles = min(tiling.most_tiles, max(1, all_tiles // (tiling.least_items * multiprocessors)))
    fields: list[list[int]] = []
    first_row = first_sum = 0
    for t, (groups, outer, channels, inner) in enumerate(layouts):
        layer = t if t < len(kernel_sizes) else -1
        rows, length = groups * channels, outer * inner
        segments, tiles = tiling.segments(layouts[t]), tiling.tiles(layouts[t])
        if segments >= tiling.most_segments:
            raise ValueError(
                f"updates must have less than {tiling.most_segments} segments of {tiling.segment}"
                f" elements, got {segments}"
            )
        per_item = max(most_tiles, -(-tiles // MOST_SUM_ITEMS) if layer >= 0 else 1)
        sum_items = -(-tiles // per_item) if chosen[t] else 0
        energies = chosen[t] and layer >= 0 and eps is not None and length > 0
        energy_rows = tiling.energy_rows(length)
        of_tensor = {
            TensorField.ROWS: rows,
            TensorField.LENGTH: length,
            TensorField.CHANNELS: channels,
            TensorField.INNER: max(inner, 1),
            TensorField.ROW_SEGMENTS: max(-(-length // tiling.segment), 1),
            TensorField.SEGMENTS: segments,
            TensorField.KERNEL_SIZE: kernel_sizes[t] if layer >= 0 else 1,
            TensorField.LAYER: layer,
            TensorField.FIRST_ROW: first_row,
            TensorField.FIRST_SUM: first_sum,
            TensorField.SUM_ITEMS: sum_items,
            TensorField.TILES: per_item,
            TensorField.ENERGY_ITEMS: -(-rows // energy_rows) if energies else 0,
            TensorField.ENERGY_ROWS: energy_rows,
        }
        fields.append([of_tensor[field] for field in TensorField])
        if layer >= 0:
            first_row += rows
            first_sum += sum_items
    return Phase2Plan(
        _items(fields, tiling.lag * multiprocessors).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        torch.tensor(eps or [], dtype=torch.float64, device="cpu").to(device),
        first_row,
        first_sum,
        stream_of(device),
    )


@lru_cache(maxsize=1024)
def layer_plan(
    layout: ChannelLayout,
    kernel_size: int,
    eps: tuple[float, ...],
    tiling: Tiling,
    device: torch.device,
) -> Phase2Plan:
    """That of one layer, for its strengths; apart, as there may be more than a trunk's plans."""
    return phase2_plan.__wrapped__((layout,), (kernel_size,), eps, (True,), tiling, device)


def _items(fields: Sequence[Sequence[int]], lag: int) -> Tensor:
    """ENERGY items first, then SUM items with FIX items behind them.

    The large layers come first and what has no FIX items last, so that little is left to wait for
    when the items end.
    """
    sum_items, energy_items = TensorField.SUM_ITEMS, TensorField.ENERGY_ITEMS
    order = sorted(
        range(len(fields)),
        key=lambda t: (fields[t][TensorField.LAYER] < 0, -fields[t][TensorField.SEGMENTS]),
    )
    pieces = [_piece([ItemKind.ENERGY, t], fields[t][energy_items]) for t in order]
    waiting: list[tuple[int, int]] = []  # layers, and how many SUM items stand before their end
    summed = 0
    for t in order:
        pieces.append(_piece([ItemKind.SUM, t], fields[t][sum_items]))
        summed += fields[t][sum_items]
        if fields[t][TensorField.LAYER] >= 0:
            waiting.append((t, summed))
        while waiting and summed - waiting[0][1] >= lag:
            done, _ = waiting.pop(0)
            pieces.append(_fix(done, fields[done][sum_items]))
    pieces += [_fix(done, fields[done][sum_items]) for done, _ in waiting]
    return torch.cat(pieces)


def _fix(tensor: int, number: int) -> Tensor:
    """Backwards: what was read last is in the cache."""
    return _piece([ItemKind.FIX, tensor], number).flip(0)


def _piece(what: Sequence[int], number: int) -> Tensor:
    """Items of one kind and tensor, in order: what, index."""
    piece = torch.empty((number, len(what) + 1), dtype=torch.int32, device="cpu")
    piece[:, :-1] = torch.tensor(what, dtype=torch.int32, device="cpu")
    piece[:, -1] = torch.arange(number, dtype=torch.int32, device="cpu")
    return piece


@dataclass(frozen=True)
class GradientPlan:
    """The items of a launch over all gradients, and the tensors that they are of."""

    items: Tensor
    """int32 [items, 2]: tensor, index among its items. Those of a group together."""
    tensors: Tensor
    """int64 [tensors, fields]."""
    empty_groups: tuple[int, ...]
    """Those without an item."""
    stream: int
    """The one it was made on."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """What launches read."""
        return self.items, self.tensors


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
        of_tensor = {
            GradientField.SIZE: size,
            GradientField.GROUP: group,
            GradientField.FIRST_ITEM: first_item[group],
            GradientField.GROUP_ITEMS: of_group[group],
            GradientField.TILES: per_item,
            GradientField.FIRST_PLACE: place,
        }
        fields.append([of_tensor[field] for field in GradientField])
        place += size
    order = sorted(range(len(sizes)), key=lambda t: group_of[t])
    return GradientPlan(
        torch.cat([_piece([t], number[t]) for t in order]).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        tuple(group for group, n in enumerate(of_group) if n == 0),
        stream_of(device),
    )
