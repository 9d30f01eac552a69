"""The emulated CUDA kernels: the order of blocks and threads changes no bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layers import (
    EMULATION,
    KINDS,
    Kind,
    laid_out,
    sample,
    solver_options,
    trunk_arguments,
)
from networks import assert_equal
from torch import Tensor

import cs_kernels as cs
from cs_kernels.ops import cuda
from cs_kernels.ops.gpu import phase2, phase2_plan
from cs_kernels.ops.solvers import SOLVERS

pytestmark = [
    pytest.mark.kernel("cuda"),
    pytest.mark.skipif(EMULATION is None, reason="CS_KERNELS_EMULATION is not set"),
]

_ops = torch.ops.cs_kernels


def _step(dtype: torch.dtype, tasks: int) -> list[Tensor]:
    """Returns everything that the operators on a trunk write.

    Some gradients are missing or misaligned. In one layer, each row is read by a block, in another
    by a warp, and a third layer has several ENERGY items. Some tensors have no priorities, so their
    SUM items have no barrier.
    """
    shapes = [(2, (64 << 10) // dtype.itemsize + 40), (3, (36 << 10) // dtype.itemsize), (300, 150)]
    kinds = [*KINDS, *(Kind("large", shape) for shape in shapes)]
    layers = [sample(kind, tasks, dtype) for kind in kinds]
    arguments = trunk_arguments(layers)
    updates = arguments["updates"]
    grads = arguments["grads"] = [grad.contiguous() for grad in arguments["grads"]]
    grads[tasks] = None
    grads[2 * tasks] = laid_out(grads[2 * tasks], "misaligned")
    plain = [torch.randn(tasks, n).to(dtype) for n in (7, 20_000, 300)]
    updates += [torch.empty_like(p[0]) for p in plain]
    grads += [g for p in plain for g in p]
    priorities = _ops.phase2_update_(*arguments.values())
    written = [priorities, *(update.clone() for update in updates)]
    group_of = [t % 3 for t in range(len(updates))]
    gramian = _ops.gramian(grads, group_of, 3, tasks)
    _ops.combine_(updates, grads, gramian.sum(1), group_of, tasks)
    written += [gramian, *(update.clone() for update in updates)]
    offsets = [2**32 - 50 * t for t in range(len(updates))]
    _ops.drop_signs_(updates, grads, [0.1] * tasks, 1, 2, tasks, None, offsets)
    sketch = torch.zeros(512)
    _ops.sketch_(sketch, [grads[0], plain[1][0]], [300, 5], 1)
    before, weight = updates[0].clone(), torch.tensor(0.7).double()
    _ops.sketch_and_weight_(sketch, [before], [grads[0]], [300], 1, weight, True)
    return [*written, *updates, sketch, before]


def _assert_same_in_any_order(run: Callable[[], object], *resident: int) -> None:
    """Compares runs with different seeds and numbers of resident blocks."""
    results = []
    for seed, blocks in enumerate(resident):
        cuda._kernels.order(seed, blocks)
        torch.manual_seed(0)
        with cs.use_backend("cuda"):
            results.append(run())
    assert_equal(results[1:], (len(results) - 1) * results[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tasks", [1, 4, 7, 9])
def test_same_bits_in_any_order(dtype: torch.dtype, tasks: int) -> None:
    _assert_same_in_any_order(lambda: _step(dtype, tasks), 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("dtype", "tasks"),
    [(torch.float32, 2), (torch.bfloat16, 3), (torch.bfloat16, 5), (torch.float32, 8)],
    ids=str,
)
def test_rows_of_every_kind(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tasks: int
) -> None:
    """PROJECT items right after their SUM items give the same bits as one launch per kind."""
    tiling = replace(cuda.operators.tiling(tasks, dtype), lag=0)
    monkeypatch.setattr(cuda.operators, "tiling", lambda *_: tiling)
    unit = tiling.unit
    # Rows of 3 units, of 40 units, that end within a vector, that are short, that are misaligned,
    # of one unit, and of several contiguous runs. The last tensor has no priorities.
    shapes = [(64, 3 * unit), (20, 40 * unit), (37, 5 * unit - 3), (300, 21), (40, unit)]
    shapes += [(9, unit), (12, 7, 2, 4), (5, unit)]
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

    def whole() -> list[Tensor]:
        updates = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
        _ops.project_conflicts_(updates, grads, priorities, *layers)
        return updates

    def apart() -> list[Tensor]:
        updates = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
        products = _ops.phase2_products_(updates, grads, priorities, *layers)
        _ops.phase2_apply_(updates, grads, priorities, products, *layers)
        return updates

    _assert_same_in_any_order(whole, 1, 200, 2, 7)
    with cs.use_backend("cuda"):
        assert_equal(apart(), whole())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_of_large_layers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Lanes get different numbers of vectors; float32 overflows after a few hundred squares."""
    monkeypatch.setattr(phase2_plan, "MOST_SUM_ITEMS", 2)
    phase2._plan.cache_clear()
    shapes = [(40, 3000), (70, 1001), (9, 40, 8, 2)]
    grads = [(torch.randn(3, *shape) * 1e18).to(dtype) for shape in shapes]
    priorities = [torch.randint(3, (shape[t // 2],)) for t, shape in enumerate(shapes)]

    def run(backend: str, grads: list[Tensor]) -> list[Tensor]:
        updates = [torch.empty_like(g[0]) for g in grads]
        of_tasks = [g for of_layer in grads for g in of_layer]
        with cs.use_backend(backend):
            _ops.project_conflicts_(updates, of_tasks, priorities, [0, 0, 1], [1] * 3, 3)
        return updates

    exact = run("reference", [g.double() for g in grads])
    for update, wide in zip(run("cuda", grads), exact, strict=True):
        error = (update.double() - wide).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * wide.abs().max()
    phase2._plan.cache_clear()


@pytest.mark.parametrize("tasks", [3, 10, 33])
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_in_any_order(solver: str, tasks: int) -> None:
    """The order of a warp's lanes or of UPGrad's warps does not change results."""
    if solver == "upgrad" and tasks > 10:
        pytest.skip("takes a minute; MGDA and CAGrad test the same inner solver")
    rows = torch.randn(2, tasks, 2 * tasks, dtype=torch.float64)
    rows[1] = rows[1, :, : tasks // 2 + 1] @ rows[1, : tasks // 2 + 1]
    gramian, solve = rows @ rows.mT, getattr(_ops, f"{solver}_weights")
    _assert_same_in_any_order(lambda: solve(gramian, *solver_options(solver, gramian)), 1, 2, 3, 4)
