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
from cs_kernels.ops.gpu.phase2_plan import TensorField
from cs_kernels.ops.solvers import SOLVERS

pytestmark = [
    pytest.mark.kernel("cuda"),
    pytest.mark.skipif(EMULATION is None, reason="CS_KERNELS_EMULATION has the CUDA kernels"),
]

_ops = torch.ops.cs_kernels

_ROOM_BYTES = 2 * 6 * 128 * 16
"""What a SUM item takes that a block of Phase 2 holds."""
_ROOMS = 4
"""Items that a block can hold at most."""


def _order(tasks: int, seed: int, resident: int, rooms: int) -> None:
    """Sets the order of blocks and threads, and the items that a block of Phase 2 can hold."""
    fixed = cuda._kernels.shared_memory(tasks)["phase2"]
    cuda._kernels.order(seed, resident, fixed + _ROOM_BYTES * rooms)


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
    for seed, rooms in enumerate((0, _ROOMS, 1, 2)):
        _order(tasks, seed, 1 + seed, rooms)
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
    """Nothing, all that fits, or some items: rows of whole vectors, others, several runs."""
    launches = []
    launch_phase2 = cuda.operators.launch_phase2

    def recorded(launch: Phase2Launch) -> None:
        launches.append(launch)
        launch_phase2(launch)

    monkeypatch.setattr(cuda.operators, "launch_phase2", recorded)
    # PROJECT items right behind their layer, while other blocks are not done with it.
    tiling = replace(cuda.operators.tiling(tasks, dtype), lag=0)
    monkeypatch.setattr(cuda.operators, "tiling", lambda *_: tiling)
    unit = tiling.unit
    # Of few units, of many, ends in no vector, many short rows, unaligned; one without priorities.
    shapes = [(64, 3 * unit), (20, 40 * unit), (37, 5 * unit - 3), (300, 21), (40, unit), (9, unit)]
    shapes += [(12, 7, 2, 4), (5, unit)]
    dims = [0] * 6 + [1]
    grads = [
        laid_out(torch.randn(shape).to(dtype), "misaligned" if t == 4 else "contiguous")
        for t, shape in enumerate(shapes)
        for _ in range(tasks)
    ]
    grads[tasks] = None
    channels = [shape[dim] for shape, dim in zip(shapes, dims, strict=False)]
    priorities = [torch.randint(-1, tasks, (n,)) for n in channels]
    priorities[0][:8] = -1
    layers = dims, [1] * len(dims), tasks
    updates = [torch.empty(shape, dtype=dtype) for shape in shapes]

    def left(seed: int, resident: int, rooms: int) -> list[int]:
        """The SUM items of every layer that no block held."""
        launches.clear()
        _order(tasks, seed, resident, rooms)
        _ops.project_conflicts_(updates, grads, priorities, *layers)
        (launch,) = launches
        items = launch.plan.tensors[: len(dims), TensorField.SUM_ITEMS].tolist()
        if not rooms:
            return items
        return [int(part.sum()) for part in launch.left.split(items)]

    with cs.use_backend("cuda"):
        items = left(0, 1, 0)
        expected = [update.clone() for update in updates]
        assert left(1, 200, _ROOMS) == [0, 0, 0, 0, items[4], 0, 0]
        assert_equal(updates, expected)
        for seed, resident, rooms in [(2, 1, 1), (3, 2, 2), (4, 7, 1)]:
            for update in updates:
                update.fill_(torch.nan)
            assert items[4] < sum(left(seed, resident, rooms)) < sum(items)
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
