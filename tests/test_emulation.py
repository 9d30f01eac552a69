"""The CUDA kernels on this processor: the order of blocks and threads changes no bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layers import EMULATION, KINDS, laid_out, sample, solver_options, trunk_arguments
from networks import assert_equal
from torch import Tensor

import cs_kernels as cs
from cs_kernels.ops import cuda
from cs_kernels.ops.gpu import Phase2Launch
from cs_kernels.ops.solvers import SOLVERS

pytestmark = [
    pytest.mark.kernel("cuda"),
    pytest.mark.skipif(EMULATION is None, reason="CS_KERNELS_EMULATION has the CUDA kernels"),
]

_ops = torch.ops.cs_kernels

_TILE_BYTES = 128 * 16
_SLOT_BYTES = 2 * _TILE_BYTES + 128
_SLOTS = 16
"""Tiles that a block can hold at most."""


def _order(tasks: int, seed: int, resident: int, slots: int) -> None:
    """Sets the order of blocks and threads, and the tiles that a block of Phase 2 can hold."""
    fixed = cuda._kernels.shared_memory(tasks)["phase2"]
    cuda._kernels.order(seed, resident, fixed + _SLOT_BYTES * slots)


def _step(dtype: torch.dtype, tasks: int) -> list[Tensor]:
    """Everything that the operators of a trunk write; some gradients are missing or misaligned."""
    layers = [sample(kind, tasks, dtype) for kind in KINDS]
    arguments = trunk_arguments(layers)
    updates = arguments["updates"]
    grads = arguments["grads"] = [grad.contiguous() for grad in arguments["grads"]]
    grads[tasks] = None
    grads[2 * tasks] = laid_out(grads[2 * tasks], "misaligned")
    priorities = _ops.phase2_update_(*arguments.values())
    written = [priorities, *(update.clone() for update in updates)]
    group_of = [t % 3 for t in range(len(layers))]
    gramian = _ops.gramian(grads, group_of, 3, tasks)
    _ops.combine_(updates, grads, gramian.sum(1), group_of, tasks)
    written += [gramian, *(update.clone() for update in updates)]
    offsets = [2**32 - 50 * t for t in range(len(layers))]
    _ops.drop_signs_(updates, grads, [0.1] * tasks, 1, 2, tasks, None, offsets)
    return written + updates


def _assert_same_in_any_order(tasks: int, run: Callable[[], object]) -> None:
    results = []
    for seed, slots in enumerate((0, _SLOTS, 1, 3)):
        _order(tasks, seed, 1 + seed, slots)
        torch.manual_seed(0)
        with cs.use_backend("cuda"):
            results.append(run())
    assert_equal(results[1:], 3 * results[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tasks", [1, 4, 7, 9])
def test_same_bits_in_any_order(dtype: torch.dtype, tasks: int) -> None:
    _assert_same_in_any_order(tasks, lambda: _step(dtype, tasks))


@pytest.mark.parametrize(
    ("dtype", "tasks"),
    [(torch.float32, 2), (torch.bfloat16, 3), (torch.bfloat16, 5), (torch.float32, 8)],
    ids=str,
)
def test_same_bits_whatever_blocks_hold(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tasks: int
) -> None:
    """Nothing, all, or the last tiles of some items: rows of whole vectors, others, unaligned."""
    launches = []
    launch_phase2 = cuda.operators.launch_phase2

    def recorded(launch: Phase2Launch) -> None:
        launches.append(launch)
        launch_phase2(launch)

    monkeypatch.setattr(cuda.operators, "launch_phase2", recorded)
    # PROJECT items right behind their layer, while other blocks are not done with it.
    tiling = replace(cuda.operators.tiling(tasks, dtype), lag=0)
    monkeypatch.setattr(cuda.operators, "tiling", lambda *_: tiling)
    tile = _TILE_BYTES // dtype.itemsize
    shapes = [(64, tile), (37, tile - 3), (tile + 5, 21), (3, 11 * tile + 8)] + 8 * [(3, tile)]
    memory = 3 * ["contiguous"] + 9 * ["misaligned"]
    grads = [
        laid_out(torch.randn(shape).to(dtype), layout)
        for shape, layout in zip(shapes, memory, strict=True)
        for _ in range(tasks)
    ]
    grads[tasks] = None
    priorities = [torch.randint(-1, tasks, shape[:1]) for shape in shapes[:-1]]
    priorities[0][:8] = -1
    layers = [0] * len(priorities), [1] * len(priorities), tasks
    updates = [torch.empty(shape, dtype=dtype) for shape in shapes]

    def held(seed: int, resident: int, slots: int) -> tuple[int, int]:
        """The tiles of layers that were held, and those left to PROJECT items."""
        launches.clear()
        _order(tasks, seed, resident, slots)
        _ops.project_conflicts_(updates, grads, priorities, *layers)
        (launch,) = launches
        all_tiles = sum(-(-update.numel() // tile) for update in updates[:-1])
        left = int(launch.left.sum()) if slots else all_tiles
        return all_tiles - left, left

    with cs.use_backend("cuda"):
        assert held(0, 1, 0)[0] == 0
        expected = [update.clone() for update in updates]
        assert held(1, 200, _SLOTS)[1] == 0
        assert_equal(updates, expected)
        for seed, resident, slots in [(2, 1, 1), (3, 2, 6), (4, 7, 3)]:
            for update in updates:
                update.fill_(torch.nan)
            assert min(held(seed, resident, slots)) > 0
            assert_equal(updates, expected)
        # The items of a kind alone hold nothing.
        products = _ops.phase2_products_(updates, grads, priorities, *layers)
        _ops.phase2_apply_(updates, grads, priorities, products, *layers)
        assert_equal(updates, expected)


@pytest.mark.parametrize("tasks", [3, 10, 33])
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_in_any_order(solver: str, tasks: int) -> None:
    """The order of a warp's lanes, and of UPGrad's warps."""
    if solver == "upgrad" and tasks > 10:
        pytest.skip("takes a minute; its problems are MGDA's and CAGrad's")
    rows = torch.randn(2, tasks, 2 * tasks, dtype=torch.float64)
    rows[1] = rows[1, :, : tasks // 2 + 1] @ rows[1, : tasks // 2 + 1]
    gramian, solve = rows @ rows.mT, getattr(_ops, f"{solver}_weights")
    _assert_same_in_any_order(tasks, lambda: solve(gramian, *solver_options(solver, gramian)))
