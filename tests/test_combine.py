"""The Gramian, the weighted sum and sign dropping, against precise results or the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from layers import FORMATS, SMALL, laid_out
from networks import assert_equal
from torch import Tensor

import cs_kernels as cs
from cs_kernels.ops.random import random_key, uniform_numbers
from cs_kernels.ops.reference import combine as reference

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(7, 1), (12, 5, 3), (9, 14, 2, 2), (3, 700)]

_ops = torch.ops.cs_kernels


def _trunk(
    tasks: int, dtype: torch.dtype, memory: str = "contiguous", missing: bool = False
) -> list[Tensor | None]:
    """Gradients of a tensor of each shape; with `missing`, some are None."""
    grads: list[Tensor | None] = [
        laid_out(torch.randn(shape).to(dtype), memory) for shape in SHAPES for _ in range(tasks)
    ]
    if missing:
        grads[1::3] = [None] * len(grads[1::3])
        grads[-tasks:] = [None] * tasks
    return grads


def _rows(grads: list[Tensor | None], tasks: int, dtype: torch.dtype) -> Tensor:
    """The gradients of all tensors, [K, N], with zeros where they are missing."""
    of_tensors = [
        torch.stack([torch.zeros(shape) if g is None else g for g in grads[t * tasks :][:tasks]])
        for t, shape in enumerate(SHAPES)
    ]
    return torch.cat([of_tensor.to(dtype).flatten(1) for of_tensor in of_tensors], 1)


def _written(operator: Callable[..., None], like: Tensor, memory: str, *arguments: Any) -> Tensor:
    """Concatenates an operator's updates of one tensor per shape."""
    updates = [laid_out(like.new_empty(shape), memory) for shape in SHAPES]
    operator(updates, *arguments)
    return torch.cat([update.flatten() for update in updates]).double()


def _dropped(grads: Any, leak: float = 0.0, step: int = 0, *draw: Any) -> Tensor:
    """The update of one tensor with seed 3; `draw` is a counter and offsets."""
    update = torch.full_like(grads[0], torch.nan)
    _ops.drop_signs_([update], list(grads), [leak] * len(grads), 3, step, len(grads), *draw)
    return update


@pytest.mark.pairwise
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("tasks", [3, 8, 9] if SMALL else [1, 2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gramian_and_weighted_sum(
    backend: str, dtype: torch.dtype, tasks: int, memory: str, missing: bool
) -> None:
    """Errors are at most twice torch's in the gradients' dtype, or a few roundings."""
    grads, group_of = _trunk(tasks, dtype, memory, missing), [0] * len(SHAPES)
    rows = _rows(grads, tasks, dtype)
    result = _ops.gramian(grads, group_of, 1, tasks)[0]
    wide = rows.double().numpy().astype(np.longdouble)
    exact = torch.from_numpy((wide @ wide.T).astype(np.float64))
    plain = (rows @ rows.T).double()
    rounding = 8 * torch.finfo(torch.float64).eps * exact.abs().max()
    assert (result - exact).abs().max() <= max(2 * (plain - exact).abs().max(), rounding)
    assert torch.equal(result, result.T)

    weights = torch.randn(1, tasks, dtype=torch.float64)
    result = _written(_ops.combine_, rows, memory, grads, weights, group_of, tasks)
    exact = weights[0] @ rows.double()
    plain = torch.zeros_like(rows[0])
    for w, row in zip(weights[0].to(dtype), rows, strict=True):
        plain += w * row
    # Each addition in float64 rounds; other dtypes are added in a higher precision.
    roundings = tasks if dtype is torch.float64 else 1
    rounding = roundings * torch.finfo(dtype).eps * exact.abs().max()
    assert (result - exact).abs().max() <= max(2 * (plain.double() - exact).abs().max(), rounding)


@pytest.mark.pairwise
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("tasks", [3, 9] if SMALL else [1, 2, 8, 9, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_over_gradients(
    backend: str, dtype: torch.dtype, tasks: int, memory: str, missing: bool
) -> None:
    """An update has the same bits if it is written over one of its tensor's gradients."""
    weights = torch.randn(1, tasks, dtype=torch.float64)
    kept = _trunk(tasks, dtype, memory, missing)
    calls: list[Callable[..., None]] = [
        lambda out, grads: _ops.combine_(out, grads, weights, [0] * len(out), tasks),
        lambda out, grads: _ops.combine_(out, grads, weights, [0] * len(out), tasks, 1 % tasks),
        lambda out, grads: _ops.drop_signs_(out, grads, [0.25] * tasks, 3, 0, tasks),
    ]
    for call in calls:
        for place in (0, -1):
            grads = [None if g is None else laid_out(g.clone(), memory) for g in kept]
            own = [[g for g in grads[t * tasks :][:tasks] if g is not None] for t in range(4)]
            over = [
                of[place] if of else torch.empty(SHAPES[t]).to(dtype) for t, of in enumerate(own)
            ]
            beside = [torch.empty_like(update) for update in over]
            call(beside, kept)
            call(over, grads)
            assert_equal(over, beside)


@pytest.mark.parametrize("shape", [None, ()])
def test_groups(backend: str, shape: tuple[int, ...] | None) -> None:
    """The tensors of a group share one Gramian and its weights; the tensors may be scalars."""
    grads, group_of = _trunk(3, torch.float64), [1, 0, 2, 1]
    if shape == ():
        grads = [grad.flatten()[0] for grad in grads]
    together = _ops.gramian(grads, group_of, 3, 3)
    weights = torch.randn(3, 3, dtype=torch.float64)
    updates = [torch.empty_like(grad) for grad in grads[::3]]
    _ops.combine_(updates, grads, weights, group_of, 3)
    products = torch.zeros_like(together)
    for t, group in enumerate(group_of):
        rows = torch.stack([g.flatten() for g in grads[3 * t : 3 * t + 3]])
        products[group] += rows @ rows.T
        torch.testing.assert_close(updates[t].flatten(), weights[group] @ rows)
    torch.testing.assert_close(together, products)


@pytest.mark.pairwise
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize(("tasks", "protected"), [(1, 0), (2, 1), (4, 0), (9, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_sum_with_the_signs_of_a_protected_gradient(
    backend: str, dtype: torch.dtype, tasks: int, protected: int, memory: str, missing: bool
) -> None:
    grads, weights = _trunk(tasks, dtype, memory, missing), torch.ones(1, tasks).double()
    weights[:, protected] = 0
    rows, group_of = _rows(grads, tasks, dtype), [0] * len(SHAPES)
    update = _written(_ops.combine_, rows, memory, grads, weights, group_of, tasks, protected)
    guide, z = rows[protected].double(), weights[0] @ rows.double()
    expected = torch.where((z.sign() == guide.sign()) | (guide == 0), z, guide)
    assert (update * guide >= 0).all()
    assert update[guide != 0].any() or tasks == 1
    clear = (z.abs() > 1e-2) | (z == 0)  # The sign of a sum near zero depends on rounding.
    rounding = tasks * torch.finfo(dtype).eps
    torch.testing.assert_close(update[clear], expected[clear], rtol=rounding, atol=rounding)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_protected_and_other_non_finite_gradients_are_not_dropped(
    backend: str, dtype: torch.dtype, row: int, wrong: float
) -> None:
    grads = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 1.0]], dtype=dtype)
    grads[row] = wrong
    update = torch.empty(3, dtype=dtype)
    weights = torch.tensor([[0.0, 1.0]])
    torch.ops.cs_kernels.combine_([update], [*grads], weights, [0], 2, 0)
    assert not update.isfinite().any()


def test_a_protected_task_that_does_not_exist(backend: str) -> None:
    update, grads = torch.zeros(3), [torch.ones(3)] * 2
    for protected in (-1, 2):
        with pytest.raises(ValueError, match=r"protected must be None or lie in \[0, 2\), got"):
            torch.ops.cs_kernels.combine_([update], grads, torch.ones(1, 2), [0], 2, protected)


@pytest.mark.pairwise
@pytest.mark.parametrize("leak", [0.0, 0.25])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("tasks", [4, 9] if SMALL else [1, 2, 4, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drop_signs(backend: str, dtype: torch.dtype, tasks: int, memory: str, leak: float) -> None:
    """Each element's choice equals the reference's, in every memory layout."""
    grads = _trunk(tasks, dtype, memory, missing=tasks > 2)
    rows = _rows(grads, tasks, dtype)
    arguments = rows, memory, grads, [leak * i for i in range(tasks)], 3, 11, tasks
    results = [_written(run, *arguments) for run in (reference.drop_signs_, _ops.drop_signs_)]
    error = (results[0] - results[1]).abs()
    # The choice may differ where the drawn number is within rounding of the positive share, in one
    # of 2^24 elements.
    assert (error <= 2 * torch.finfo(dtype).eps * rows.double().abs().sum(0)).all()


def test_drop_signs_with_a_counter(backend: str) -> None:
    """The sum of step and counter determines the draw; the counter may be negative."""
    grads = torch.randn(3, 1000)
    expected = _dropped(grads, 0.1, 7)
    for step, counter in ((2, 5), (0, 7), (9, -2), (7, 0)):
        assert torch.equal(_dropped(grads, 0.1, step, torch.tensor([counter])), expected)
        assert not torch.equal(_dropped(grads, 0.1, step, torch.tensor([8])), expected)


@pytest.mark.parametrize("first", [2**32 - 300, 5 * 2**32 - 1, 2**63 - 1000])
def test_draws_beyond_2_to_the_32_elements(backend: str, first: int) -> None:
    """A tile may span two ranges of 2^32 elements; the last possible index is 2^63 - 1."""
    update = _dropped([torch.ones(1000), -torch.ones(1000)], 0.0, 5, None, [first])
    numbers = uniform_numbers(random_key(3, 5), first, 1000, update.device)
    assert torch.equal(update, torch.where(numbers < 0.5, 1.0, -1.0))


@pytest.mark.pairwise
@pytest.mark.parametrize("offsets", [None, (7, 2**32 - 900), (3 * 2**32 - 1, 0)], ids=str)
@pytest.mark.parametrize("leak", [0.0, 0.25])
@pytest.mark.parametrize("tasks", [3, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_draw_as_the_whole(
    backend: str, dtype: torch.dtype, tasks: int, leak: float, offsets: tuple[int, int] | None
) -> None:
    """Parts draw the same bits in any order; some are empty, some unaligned."""
    cuts = [[300, 0, 1, 1030, 169], [13, 1500, 487]]
    sizes = [sum(of_tensor) for of_tensor in cuts]
    # Sums of small integers are exact in any order, so only the draws could differ.
    whole: list[Tensor | None] = [
        torch.randint(-8, 9, (size,)).to(dtype) for size in sizes for _ in range(tasks)
    ]
    whole[1] = None
    arguments = [leak] * tasks, 3, 11, tasks, None
    results = [[torch.full((n,), torch.nan, dtype=dtype) for n in sizes] for _ in range(3)]
    _ops.drop_signs_(results[0], whole, *arguments, offsets)
    reference.drop_signs_(results[1], whole, *arguments, offsets)
    updates, grads, firsts = [], [], []
    parts = [(t, sum(of[:i]), n) for t, of in enumerate(cuts) for i, n in enumerate(of)]
    for t, start, size in reversed(parts):
        part = slice(start, start + size)
        updates.append(results[2][t][part])
        grads += [None if row is None else row[part] for row in whole[t * tasks :][:tasks]]
        firsts.append((offsets or (0, sizes[0]))[t] + start)
    _ops.drop_signs_(updates, grads, *arguments, firsts)
    assert_equal(results[1:], [results[0]] * 2)


def test_other_offsets_draw_other_numbers(backend: str) -> None:
    """Later calls on the same tensors do not reuse a plan for other offsets."""
    grads = [torch.ones(1000), -torch.ones(1000)]
    drawn = [_dropped(grads, 0.0, 5, None, offsets) for offsets in ([0], [10], [0], [10], None)]
    assert_equal(drawn[2:], [*drawn[:2], drawn[0]])
    assert torch.equal(drawn[0][10:], drawn[1][:-10])
    assert not torch.equal(*drawn[:2])


def test_draws_are_independent(backend: str) -> None:
    """Neighbors and steps are uncorrelated; positive gradients win in 2/3 of the draws."""
    count = 20_000 if SMALL else 100_000
    grads = torch.tensor([[3.0], [-1.0], [-0.5]]).expand(3, count).contiguous()
    first, second = ((_dropped(grads, step=step) == 3).double() - 2 / 3 for step in (0, 1))
    for sample in (first, first[1:] * first[:-1] * 1.5, first * second * 1.5):
        assert abs(sample.mean()) < 4 * (2 / 9 / count) ** 0.5


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_gradients_are_not_dropped(
    backend: str, dtype: torch.dtype, wrong: float
) -> None:
    grads = torch.randn(3, 100).to(dtype)
    grads[1, 17] = wrong
    for step in range(10):
        update = _dropped(grads, (0.0, 0.25, 1.0)[step % 3], step)
        assert (~update.isfinite()).nonzero().tolist() == [[17]]


@pytest.mark.parametrize(("dtype", "tasks"), [(torch.float32, 4), (torch.bfloat16, 9)], ids=str)
def test_a_trunk_larger_than_the_caches(dtype: torch.dtype, tasks: int) -> None:
    """Bits do not depend on threads, splits or streaming stores."""
    sizes = [2_500_001, 1_500_000, 999]
    flat = [torch.randn(sum(sizes)).to(dtype) for _ in range(tasks)]
    weights = torch.randn(1, tasks, dtype=torch.float64)

    def run(sizes: list[int]) -> list[Tensor]:
        """The weighted sum and the sign-dropped update of tensors of these sizes."""
        pieces = zip(*(g.split(sizes) for g in flat), strict=True)
        grads = [piece for of_tensor in pieces for piece in of_tensor]
        combined, dropped = (torch.empty_like(flat[0]) for _ in range(2))
        _ops.combine_(combined.split(sizes), grads, weights, [0] * len(sizes), tasks)
        _ops.drop_signs_(dropped.split(sizes), grads, [0.1] * tasks, 0, 0, tasks)
        return [combined, dropped]

    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([*run([sum(sizes)]), _ops.gramian(flat, [0], 1, tasks)])
    finally:
        torch.set_num_threads(before)
    assert_equal(*results)
    assert_equal(run(sizes), results[0][:2])
    small = torch.empty(999, dtype=dtype)  # not streamed
    _ops.combine_([small], [g[-999:] for g in flat], weights, [0], tasks)
    assert torch.equal(small, results[0][0][-999:])


def test_products_of_very_different_size(backend: str) -> None:
    """With 2^-60 and 2^60 in float32, nothing overflows or vanishes, not even in long sums.

    The products are exact in float32, so zeros stay zero with fused multiply-adds.
    """
    small, large = 2.0**-60, 2.0**60
    rows = torch.tensor([[small, small], [large, -large], [large, large]]).repeat(1, 2500)
    expected = torch.tensor(
        [[small**2, 0, 1], [0, large**2, 0], [1, 0, large**2]], dtype=torch.float64
    )
    assert torch.equal(cs.functional.gramian(rows), 5000 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functional(backend: str, dtype: torch.dtype) -> None:
    """`out=` gets the same bits as a new tensor, and no graph even if it requires gradients."""
    grads, weights = torch.randint(-8, 9, (4, 5, 3)).to(dtype), torch.randint(-8, 9, (4,)).float()
    rows = grads.flatten(1).double()
    torch.testing.assert_close(cs.functional.gramian(grads), rows @ rows.T)
    combined = cs.functional.combine(grads, weights)
    assert_equal(combined, (weights.double() @ rows).view(5, 3).to(dtype))
    for out in (torch.empty_like(combined), torch.empty(3, 5, dtype=dtype).T):
        out.requires_grad_()
        assert cs.functional.combine(grads, weights, out=out) is out
        assert_equal(out.detach(), combined)
        assert out.is_leaf


@pytest.mark.slow
def test_drop_signs_equals_torchjd(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both libraries use the same uniform numbers and leaks."""
    rows = torch.randn(4, 1000, dtype=torch.float64)
    leaks = [0.0, 0.1, 0.5, 1.0]
    update = torch.empty(1000, dtype=torch.float64)
    _ops.drop_signs_([update], list(rows), leaks, 3, 5, 4)
    numbers = uniform_numbers(random_key(3, 5), 0, 1000, rows.device)
    monkeypatch.setattr(torch, "rand", lambda *size, **options: numbers)
    theirs = pytest.importorskip("torchjd.aggregation").GradDrop(
        leak=torch.tensor(leaks, dtype=torch.float64)
    )
    torch.testing.assert_close(update, theirs(rows))


@pytest.mark.parametrize("tasks", [1, 3, 9])
def test_few_or_no_gradients(backend: str, tasks: int) -> None:
    """In one tensor, only the last task has a gradient; in another, no task has one."""
    last = torch.randn(300)
    grads = [*(tasks - 1) * [None], last, *tasks * [None]]
    updates = [torch.full((300,), torch.nan), torch.full((5,), torch.nan)]
    gramian = _ops.gramian(grads, [0, 1], 2, tasks)
    assert gramian[0, -1, -1].item() == pytest.approx(last.double().square().sum().item())
    assert gramian.count_nonzero() == 1
    _ops.combine_(updates, grads, torch.full((2, tasks), 2.0), [0, 1], tasks)
    assert_equal(updates, [2 * last, torch.zeros(5)])
    _ops.drop_signs_(updates, grads, [0.0] * tasks, 1, 2, tasks)
    assert_equal(updates, [last, torch.zeros(5)])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((dtype, scale) for dtype in DTYPES[::2] for scale in (1e-18, 1e18)),
        *((torch.float16, 1e-7), (torch.float16, 1e4)),
        *((torch.float64, 1e-150), (torch.float64, 1e150)),
    ],
    ids=str,
)
def test_products_at_the_ends_of_their_range(
    backend: str, dtype: torch.dtype, scale: float
) -> None:
    """The limits of docs/limits.md."""
    rows = (torch.tensor([[1.0], [-0.5]]) * (1 + torch.rand(4096)) * scale).to(dtype)
    wide = rows.double() / scale
    products = cs.functional.gramian(rows) / scale / scale
    torch.testing.assert_close(products, wide @ wide.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nearly_parallel_gradients(backend: str, dtype: torch.dtype) -> None:
    """The loss of digits that docs/limits.md states, relative to the update's length."""
    common = torch.randn(20_000)
    rows = [((1 + k) * (common + 0.003 * torch.randn(20_000))).to(dtype) for k in range(4)]
    gramian = _ops.gramian(rows, [0], 1, 4)[0]
    exact = torch.stack(rows).double()
    step = cs.Step(tasks=tuple("abcd"))
    rounded = dtype is torch.bfloat16 or backend in ("cuda", "triton")  # Blocks sum in float32.
    loose = {"AlignedMTL": 1e-3, "IMTLG": 1e-4, "ConFIG": 1e-6} if rounded else {}
    others = "PCGrad", "CAGrad", "UPGrad", "MGDA", "NashMTL", "FairGrad"
    for name in ("AlignedMTL", "IMTLG", "ConFIG", *others):
        method: cs.GramianMethod = getattr(cs, name)()
        found = method.weights(gramian, step) @ exact
        with cs.use_backend("reference"):
            expected = method.weights(exact @ exact.T, step) @ exact
        assert (found - expected).norm() <= loose.get(name, 1e-7) * expected.norm(), name
