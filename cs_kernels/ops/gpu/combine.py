"""Gramian, weighted sum and sign dropping on a GPU: plan, address table, launches.

An item is a few tiles of one tensor. The items of a tensor group are adjacent. The last block to
finish in a group adds up the group's products in the order of the items.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from struct import pack, unpack
from typing import ClassVar

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Ints
from cs_kernels.ops.checks import DTYPES
from cs_kernels.ops.compiled.combine import CombineOperators
from cs_kernels.ops.gpu.device import (
    host_buffer,
    keep,
    multiprocessors,
    numbered,
    on_device,
    on_host,
    refuse_capture,
    send,
    stream_of,
)
from cs_kernels.ops.operands import Operands, Shapes

_LEAST_ITEMS = 16
"""Minimum items per multiprocessor; items get more than one tile only above this number."""


class GradientField(IntEnum):
    """Columns of the tensor table, which is the same in every call."""

    SIZE = 0
    GROUP = 1
    FIRST_ITEM = 2
    """The group's first item."""
    GROUP_ITEMS = 3
    TILES = 4
    """Tiles per item."""
    FIRST_INDEX = 5
    """The index of the first element, for sign dropping."""


class GradientCallField(IntEnum):
    """Columns of the address table, which is rebuilt on every call."""

    UPDATE = 0
    ALIGNED = 1
    GRADIENTS = 2


@dataclass(frozen=True)
class GradientPlan:
    """The items and tables of a launch over all gradients."""

    items: Tensor
    """int32 [items, 2]: tensor, index among the tensor's items. A group's items are adjacent."""
    tensors: Tensor
    """int64 [tensors, fields]."""
    empty_groups: tuple[int, ...]
    """Groups without items."""
    stream: int
    """The handle of the stream on which the tables were made."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        return self.items, self.tensors


def gradient_plan(
    sizes: tuple[int, ...],
    group_of: tuple[int, ...],
    groups: int,
    mask: tuple[bool, ...],
    elements: int,
    most_tiles: int,
    device: torch.device,
    offsets: tuple[int, ...] | None = None,
) -> GradientPlan:
    """Makes the plan for tensors of these sizes.

    Args:
        sizes: In elements.
        group_of: The group of each tensor.
        groups: The number of groups.
        mask: Whether each tensor has items.
        elements: Elements per tile.
        most_tiles: Maximum tiles per item.
        device: The device of the tables.
        offsets: The index of each tensor's first element; None numbers all elements in order.

    """
    refuse_capture(device)
    tiles = [-(-size // elements) if on else 0 for size, on in zip(sizes, mask, strict=True)]
    per_item = min(most_tiles, max(1, sum(tiles) // (_LEAST_ITEMS * multiprocessors(device))))
    items = [-(-n // per_item) for n in tiles]
    group_items = [0] * groups
    for t, group in enumerate(group_of):
        group_items[group] += items[t]
    first_item = [sum(group_items[:group]) for group in range(groups)]
    if offsets is None:
        offsets = tuple(accumulate(sizes, initial=0))
    fields = []
    for t, size in enumerate(sizes):
        group = group_of[t]
        row = {
            GradientField.SIZE: size,
            GradientField.GROUP: group,
            GradientField.FIRST_ITEM: first_item[group],
            GradientField.GROUP_ITEMS: group_items[group],
            GradientField.TILES: per_item,
            GradientField.FIRST_INDEX: offsets[t],
        }
        fields.append([row[field] for field in GradientField])
    order = sorted(range(len(sizes)), key=lambda t: group_of[t])
    return GradientPlan(
        torch.cat([numbered([t], items[t]) for t in order]).to(device),
        torch.tensor(fields, dtype=torch.int64, device="cpu").to(device),
        tuple(group for group, n in enumerate(group_items) if n == 0),
        stream_of(device),
    )


@lru_cache(maxsize=64)
def _plan(
    shapes: Shapes,
    code: int,
    group_of: tuple[int, ...],
    groups: int,
    elements: int,
    most_tiles: int,
    device: torch.device,
    offsets: tuple[int, ...] | None,
) -> GradientPlan:
    """The plan for one dtype's operands, cached because each step has the same arguments."""
    mask = tuple(other == code for other in shapes.native.types)
    sizes = tuple(shapes.native.sizes)
    return gradient_plan(sizes, group_of, groups, mask, elements, most_tiles, device, offsets)


@dataclass(frozen=True)
class GradientLaunch:
    """The arguments of every kernel over the gradients of one dtype."""

    items: Tensor
    empty_groups: tuple[int, ...]
    tensors: Tensor
    table: Tensor
    """int64 [tensors, GradientCallField.GRADIENTS + tasks], addresses."""
    extra: Tensor
    """int64: operands sent along with the table."""
    tasks: int
    dtype: torch.dtype


class GpuCombine(CombineOperators):
    """Subclasses define the tiling and the launches; each operator has one launch per dtype."""

    @abstractmethod
    def gradient_tiling(self, dtype: torch.dtype, tasks: int) -> tuple[int, int]:
        """Returns the elements per tile and the maximum tiles per item."""

    one_tile: ClassVar[bool] = False
    """Whether the items of the weighted sum and of sign dropping have one tile each."""

    @abstractmethod
    def launch_gramian(
        self, launch: GradientLaunch, counters: Tensor, products: Tensor, out: Tensor
    ) -> None:
        """`counters` is int32 [groups], zeros; `products`, float64 [items, K, K], is workspace."""

    @abstractmethod
    def launch_combine(
        self, launch: GradientLaunch, weights: Tensor, protected: int | None
    ) -> None:
        """`weights` has shape [groups, tasks]."""

    @abstractmethod
    def launch_drop_signs(
        self, launch: GradientLaunch, leaks: Tensor, state: int, counter: Tensor | None
    ) -> None:
        """`leaks` is float64 [tasks]; the kernel adds the counter to the random state."""

    def _gradient_launches(
        self,
        operands: Operands,
        group_of: Ints,
        groups: int,
        extra: Ints = (),
        *,
        one_tile: bool,
        offsets: Ints | None = None,
    ) -> Iterator[GradientLaunch]:
        tasks = operands.tasks
        if not operands.outputs:
            return
        device = operands.outputs[0].device
        tensors = len(operands.outputs)
        width = GradientCallField.GRADIENTS + tasks
        buffer = host_buffer(tensors * width + len(extra), device)
        operands.native.write_table(
            buffer.data_ptr(), width, GradientCallField.ALIGNED, layers=0, whole_rows=False
        )
        buffer[tensors * width :] = on_host(extra)
        numbers = send(buffer, device)
        shapes = operands.shapes
        for code in dict.fromkeys(operands.native.types):
            dtype = DTYPES[code]
            elements, most_tiles = self.gradient_tiling(dtype, tasks)
            plan = _plan(
                shapes,
                code,
                tuple(group_of),
                groups,
                elements,
                1 if one_tile else most_tiles,
                device,
                None if offsets is None else tuple(offsets),
            )
            keep(plan, device)
            with on_device(device):
                yield GradientLaunch(
                    plan.items,
                    plan.empty_groups,
                    plan.tensors,
                    numbers,
                    numbers[tensors * width :],
                    tasks,
                    dtype,
                )

    def run_gramian(self, operands: Operands, group_of: Ints, groups: int) -> Tensor:
        shape = (groups, operands.tasks, operands.tasks)
        results: list[Tensor] = []
        zeros = [0] * -(-groups // 2)
        for launch in self._gradient_launches(
            operands, group_of, groups, zeros * len(DTYPES), one_tile=False
        ):
            result = torch.empty(shape, dtype=torch.float64, device=operands.outputs[0].device)
            for group in launch.empty_groups:
                result[group] = 0
            counters = launch.extra[len(results) * len(zeros) :].view(torch.int32)
            products = result.new_empty((len(launch.items), *shape[1:]))
            if len(launch.items):
                self.launch_gramian(launch, counters, products, result)
            results.append(result)
        return results[0] if len(results) == 1 else torch.stack(results).sum(0)

    def run_combine(
        self, operands: Operands, weights: Tensor, group_of: Ints, protected: int | None
    ) -> None:
        for launch in self._gradient_launches(
            operands, group_of, len(weights), one_tile=self.one_tile
        ):
            if len(launch.items):
                self.launch_combine(launch, weights, protected)

    def run_drop_signs(
        self,
        operands: Operands,
        leaks: Floats,
        state: int,
        counter: Tensor | None,
        offsets: Ints | None,
    ) -> None:
        tasks, group_of = operands.tasks, [0] * len(operands.outputs)
        extra = unpack(f"{tasks}q", pack(f"{tasks}d", *leaks))
        for launch in self._gradient_launches(
            operands, group_of, 1, extra, one_tile=self.one_tile, offsets=offsets
        ):
            if len(launch.items):
                self.launch_drop_signs(launch, launch.extra.view(torch.float64), state, counter)
