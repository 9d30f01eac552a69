"""What Phase 2's plan on a GPU says of its memory traffic, without a GPU.

A PROJECT item reads again what its SUM item has read and written. This counts the bytes that other
items move in between, for every network of the benchmarks, and the share that will have left an L2
cache that replaces what was used longest ago. Then a model of the time: see `bench/NOTES.md`.

    python bench/traffic.py [--multiprocessors 132] [--cache 40] [--streamed]
"""

import argparse
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
FIXED = {2: 10e-6, 4: 13e-6, 8: 18e-6}
"""Seconds beside the bytes, by tasks: launch, first reads, tail."""


@dataclass(frozen=True)
class Traffic:
    """The memory traffic of one launch, in bytes."""

    moved: int
    """N weights, K * N gradients and N updates."""
    distance: float
    """Between a SUM item and its PROJECT item: the mean over elements."""
    missed: float
    """The share of elements whose gradient and update have left the cache."""


def traffic(
    network: str, tasks: int, dtype: torch.dtype, multiprocessors: int, cache: float, streamed: bool
) -> Traffic:
    """Counts along the plan's items, in their order.

    Args:
        network: One of `NETWORKS`.
        tasks: K.
        dtype: The type of weights and gradients.
        multiprocessors: The GPU's number of multiprocessors.
        cache: Bytes of the L2 cache that keep what was used last.
        streamed: Whether what is not read again is evicted first, and so takes no room.

    """
    shapes = NETWORKS[network]
    layouts = tuple((1, 1, shape[0], prod(shape[1:])) for shape in shapes)
    tiling = cuda.CudaOperators().tiling(tasks, dtype)
    kernel_sizes = tuple(prod(shape[2:]) for shape in shapes)
    eps = (1e-5,) * (tasks * len(shapes))
    with mock.patch.object(phase2_plan, "multiprocessors", return_value=multiprocessors):
        plan = phase2_plan.phase2_plan.__wrapped__(
            layouts, kernel_sizes, eps, (True,) * len(shapes), tiling, torch.device("cpu")
        )
    fields = plan.tensors.tolist()
    size = dtype.itemsize
    kept = 2 if streamed else tasks + 1
    at = 0
    summed: dict[tuple[int, int], int] = {}
    distances: list[tuple[int, int]] = []
    for kind, t, index in plan.items.tolist():
        tensor = fields[t]
        each = tensor[TensorField.TILES] * tiling.elements
        all_elements = tensor[TensorField.ROWS] * tensor[TensorField.LENGTH]
        elements = min(each, all_elements - index * each)
        if kind == ItemKind.SUM:
            summed[t, index] = at
            at += kept * size * elements
        elif kind == ItemKind.PROJECT:
            distances.append((at - summed[t, index], elements))
    numel = sum(elements for _, elements in distances)
    return Traffic(
        moved=(tasks + 2) * size * numel,
        distance=sum(distance * elements for distance, elements in distances) / numel,
        missed=sum(elements for distance, elements in distances if distance > cache) / numel,
    )


def fraction_of_limit(found: Traffic, tasks: int, hidden: float = 0.4) -> float:
    """The model: random gradients, of which a share conflicts and is visited again."""
    conflicting = 1 - 2.0 ** (1 - tasks)
    again = 3 / (tasks + 2) * conflicting * found.moved
    seconds = (
        found.moved / (0.9 * BANDWIDTH)
        + again * found.missed / (0.85 * BANDWIDTH)
        + again * (1 - found.missed) / CACHE_BANDWIDTH * (1 - hidden)
        + FIXED[tasks]
    )
    return found.moved / BANDWIDTH / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--multiprocessors", type=int, default=132, help="of the GPU")
    parser.add_argument("--cache", type=float, default=40, help="MB of the L2 cache that serve")
    parser.add_argument("--streamed", action="store_true", help="what is read once takes no room")
    options = parser.parse_args(arguments)
    print("| network | dtype | " + " | ".join(f"K = {tasks}" for tasks in FIXED) + " |")
    print("| --- | --- |" + " --- |" * len(FIXED))
    for network in ("resnet18", "resnet50", "hrnet18", "wide"):
        for dtype in (torch.float32, torch.bfloat16):
            cells = []
            for tasks in FIXED:
                found = traffic(
                    network,
                    tasks,
                    dtype,
                    options.multiprocessors,
                    1e6 * options.cache,
                    options.streamed,
                )
                cells.append(
                    f"{found.distance / 1e6:.0f} MB, {found.missed:.0%},"
                    f" {fraction_of_limit(found, tasks):.2f}"
                )
            print(f"| {network} | {name_of(dtype)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
