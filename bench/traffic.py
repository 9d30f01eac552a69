"""What Phase 2's plan on a GPU says of its memory traffic, without a GPU.

Blocks hold tiles on the chip until the layer's coefficients are known; a PROJECT item reads again
what a SUM item has read and written of the others. This runs through the plan's items as blocks
would, for every network of the benchmarks, and counts the elements left to PROJECT items, the bytes
that other items move before these read them, and the share of them that will have left an L2 cache
that replaces what was used longest ago. Then a model of the time: see `bench/NOTES.md`.

    python bench/traffic.py [--multiprocessors 132] [--cache 40] [--slots -1] [--fixed 1]
"""

import argparse
import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from unittest import mock

import torch
from harness.problems import name_of
from harness.shapes import NETWORKS

from cs_kernels.ops import cuda
from cs_kernels.ops.gpu import phase2_plan
from cs_kernels.ops.gpu.phase2_plan import ItemKind, TensorField

BANDWIDTH = 4.3e12
"""Bytes a second of a copy on an H200."""
CACHE_BANDWIDTH = 5e12
SHARED_MEMORY = {"multiprocessor": 228 << 10, "block": 227 << 10, "reserved": 1 << 10}
"""Bytes of an H200."""
LATENCY = 0.7e-6
"""Seconds of a loaded memory access."""
PRODUCTS_AT_ONCE = 128 * 32
"""Numbers that a block loads at once when it adds up the products of a layer's items."""
FIXED = {2: 10e-6, 4: 13e-6, 8: 18e-6}
"""Seconds beside the bytes, by tasks: launch, first reads, tail."""


@dataclass(frozen=True)
class Gpu:
    """The GPU of the model."""

    multiprocessors: int
    cache: float
    """Bytes of the L2 cache that keep what was used last."""
    slots: int
    """Tiles that a block holds; -1: as many as the kernel would."""


@dataclass(frozen=True)
class Traffic:
    """The memory traffic of one launch."""

    moved: int
    """Bytes of N weights, K * N gradients and N updates."""
    left: float
    """The share of elements left to PROJECT items."""
    distance: float
    """Bytes between a SUM item and its PROJECT item: the mean over the elements left."""
    missed: float
    """The share of these whose gradient and update have left the cache."""


@dataclass
class _Block:
    """A block's ring of held tiles, an item each: its layer and number of tiles."""

    slots: int
    held: deque[tuple[int, int]]

    def hold(self, layer: int, tiles: int) -> int:
        """Takes as many tiles as there are free slots; the number."""
        taken = min(tiles, self.slots - sum(n for _, n in self.held))
        if taken:
            self.held.append((layer, taken))
        return taken


def _plan(
    network: str, tasks: int, tiling: phase2_plan.Tiling, multiprocessors: int
) -> phase2_plan.Phase2Plan:
    shapes = NETWORKS[network]
    layouts = tuple((1, 1, shape[0], prod(shape[1:])) for shape in shapes)
    kernel_sizes = tuple(prod(shape[2:]) for shape in shapes)
    eps = (1e-5,) * (tasks * len(shapes))
    with mock.patch.object(phase2_plan, "multiprocessors", return_value=multiprocessors):
        return phase2_plan.phase2_plan(
            layouts, kernel_sizes, eps, (True,) * len(shapes), tiling, torch.device("cpu")
        )


def traffic(network: str, tasks: int, dtype: torch.dtype, gpu: Gpu) -> Traffic:
    """Runs through the plan's items: the block that is done first takes the next.

    An item takes the time of its bytes at an equal share of the bandwidth.
    """
    tiling = cuda.CudaOperators().tiling(tasks, dtype)
    plan = _plan(network, tasks, tiling, gpu.multiprocessors)
    on_gpu = cuda._kernels.phase2_blocks(tasks=tasks, **SHARED_MEMORY)
    slots = on_gpu["slots"] if gpu.slots < 0 else gpu.slots
    number = gpu.multiprocessors * on_gpu["resident"]
    blocks = [_Block(slots, deque()) for _ in range(number)]
    done_at = [(0.0, b) for b in range(number)]
    seconds = dtype.itemsize * number / BANDWIDTH  # of an element
    fields = plan.tensors.tolist()
    to_sum = [tensor[TensorField.SUM_ITEMS] for tensor in fields]
    summed_at = [0.0] * len(fields)
    ready_at = [float("inf")] * len(fields)
    moved = 0  # bytes that stay in the cache until others replace them
    summed: dict[tuple[int, int], tuple[int, int]] = {}
    distances: dict[int, int] = defaultdict(int)
    for kind, t, index in plan.items.tolist():
        tensor = fields[t]
        sum_items, numel = tensor[TensorField.SUM_ITEMS], tensor[TensorField.SIZE]
        time, b = heapq.heappop(done_at)
        block = blocks[b]
        if kind == ItemKind.ENERGY:
            all_of_item = tensor[TensorField.ENERGY_ROWS] * tensor[TensorField.LENGTH]
            time += seconds * min(all_of_item, numel)
        elif kind == ItemKind.SUM:
            each = tensor[TensorField.TILES] * tiling.elements
            elements = min(each, numel - index * each)
            tiles = -(-elements // tiling.elements)
            left = min((tiles - block.hold(t, tiles)) * tiling.elements, elements)
            summed[t, index] = moved, left
            # Gradients are evicted first, other than the reference gradient of what is left.
            moved += dtype.itemsize * (elements + left)
            time += seconds * (tasks + 1) * elements
            to_sum[t] -= 1
            summed_at[t] = max(summed_at[t], time)
            if not to_sum[t]:
                # The arrival of the last item, the loads of all items' products, the flag.
                rounds = -(-sum_items * tasks * tasks // PRODUCTS_AT_ONCE)
                ready_at[t] = summed_at[t] + LATENCY * (2 + rounds)
        else:
            first = index * tensor[TensorField.PROJECT_SUMS]
            time = max(time, ready_at[t])
            for n in range(first, min(first + tensor[TensorField.PROJECT_SUMS], sum_items)):
                before, left = summed[t, n]
                distances[moved - before] += left
                time += seconds * 3 * left
        while block.held and ready_at[block.held[0][0]] <= time:
            block.held.popleft()
        heapq.heappush(done_at, (time, b))
    all_elements = sum(tensor[TensorField.SIZE] for tensor in fields)
    left = sum(distances.values())
    return Traffic(
        moved=(tasks + 2) * dtype.itemsize * all_elements,
        left=left / all_elements,
        distance=sum(distance * n for distance, n in distances.items()) / max(left, 1),
        missed=sum(n for distance, n in distances.items() if distance > gpu.cache) / max(left, 1),
    )


def fraction_of_limit(found: Traffic, tasks: int, fixed: float, hidden: float = 0.4) -> float:
    """The model: random gradients, of which a share conflicts and, if left, is visited again."""
    conflicting = 1 - 2.0 ** (1 - tasks)
    again = 3 / (tasks + 2) * conflicting * found.left * found.moved
    seconds = (
        found.moved / (0.9 * BANDWIDTH)
        + again * found.missed / (0.85 * BANDWIDTH)
        + again * (1 - found.missed) / CACHE_BANDWIDTH * (1 - hidden)
        + fixed * FIXED[tasks]
    )
    return found.moved / BANDWIDTH / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--multiprocessors", type=int, default=132, help="of the GPU")
    parser.add_argument("--cache", type=float, default=40, help="MB of the L2 cache that serve")
    parser.add_argument("--slots", type=int, default=-1, help="tiles that a block holds")
    parser.add_argument("--fixed", type=float, default=1, help="of the seconds beside the bytes")
    options = parser.parse_args(arguments)
    gpu = Gpu(options.multiprocessors, 1e6 * options.cache, options.slots)
    print("| network | dtype | " + " | ".join(f"K = {tasks}" for tasks in FIXED) + " |")
    print("| --- | --- |" + " --- |" * len(FIXED))
    for network in ("resnet18", "resnet50", "hrnet18", "wide"):
        for dtype in (torch.float32, torch.bfloat16):
            cells = []
            for tasks in FIXED:
                found = traffic(network, tasks, dtype, gpu)
                cells.append(
                    f"{found.left:.0%}, {found.distance / 1e6:.0f} MB, {found.missed:.0%},"
                    f" {fraction_of_limit(found, tasks, options.fixed):.2f}"
                )
            print(f"| {network} | {name_of(dtype)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
