"""Sketches: the same bits on every backend, and unbiased estimates of dot products."""

import pytest
import torch
from layers import FORMATS, SMALL, laid_out
from torch import Tensor

import cs_kernels as cs

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _sketched(*tensors: Tensor, size: int = 1024, seed: int = 3, offset: int = 0) -> Tensor:
    """The sketch of consecutive tensors."""
    offsets = [offset]
    for tensor in tensors[:-1]:
        offsets.append(offsets[-1] + tensor.numel())
    sketch = torch.zeros(size)
    torch.ops.cs_kernels.sketch_(sketch, [*tensors], offsets, seed)
    return sketch


@pytest.mark.pairwise
@pytest.mark.parametrize("offset", [0, 3, 2**37 - 1000, 2**63 - 2**31])
@pytest.mark.parametrize("numbers", [1, 256, 1000] if SMALL else [1, 7, 256, 1000, 70003])
@pytest.mark.parametrize("size", [256, 512, 1024, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_give_the_same_bits(
    backend: str, dtype: torch.dtype, size: int, numbers: int, offset: int
) -> None:
    tensors = [torch.randn(numbers).to(dtype), torch.randn(5, 3, 2).to(dtype)]
    found = _sketched(*tensors, size=size, offset=offset)
    with cs.use_backend("reference"):
        assert torch.equal(found, _sketched(*tensors, size=size, offset=offset))


@pytest.mark.parametrize("memory", FORMATS)
def test_the_logical_index_counts(backend: str, memory: str) -> None:
    """An element's position in memory does not change the sketch."""
    x = torch.randn(6, 20, 3, 3)
    assert torch.equal(_sketched(laid_out(x, memory)), _sketched(x))


def test_shards_add_up(backend: str) -> None:
    """Elements have the same signs and bins, however tensors are split."""
    x = torch.randn(5000)
    whole = _sketched(x, offset=77)
    assert torch.equal(_sketched(*x.split([1, 300, 4699]), offset=77), whole)
    parts = [_sketched(x[:1300], offset=77), _sketched(x[1300:], offset=1377)]
    torch.testing.assert_close(sum(parts), whole)


def test_one_element_of_a_block_per_bin(backend: str) -> None:
    numbers = torch.arange(1.0, 1025.0)
    for seed in range(3):
        assert _sketched(numbers, seed=seed).abs().sort().values.equal(numbers)


@pytest.mark.kernel("cpu")
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_give_the_same_bits(threads: int) -> None:
    x, before = torch.randn(200_000), torch.get_num_threads()
    with cs.use_backend("reference"):
        expected = _sketched(x, size=65536, offset=77)
    torch.set_num_threads(threads)
    try:
        with cs.use_backend("cpu"):
            assert torch.equal(_sketched(x, size=65536, offset=77), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.kernel("cpu")
@pytest.mark.parametrize("hot", [False, True])
def test_dot_products_are_unbiased(hot: bool) -> None:
    """Estimates deviate as documented, even if almost all energy is in one column of a matrix."""
    size, draws = 1024, 400
    x = torch.randn(20_000)
    if hot:
        x *= torch.where(torch.arange(len(x)) % 512 == 3, 30.0, 0.01)
    y = 0.3 * x + x.roll(1) if hot else 0.3 * x + torch.randn(20_000)
    deviation = ((x @ x) * (y @ y) + (x @ y) ** 2).div(size).sqrt()
    found = [
        _sketched(x, size=size, seed=n) @ _sketched(y, size=size, seed=n) for n in range(draws)
    ]
    errors = (torch.stack(found) - x @ y) / deviation
    assert abs(errors.mean()) < 3 / draws**0.5
    assert 0.7 < errors.std() < 1.15


def test_types(backend: str) -> None:
    with pytest.raises(TypeError, match=r"sketch must be torch.float32, got torch.float16"):
        torch.ops.cs_kernels.sketch_(torch.zeros(256).half(), [torch.ones(4)], [0], 0)
    with pytest.raises(TypeError, match=r"tensors must be one of .*, got torch.int64"):
        torch.ops.cs_kernels.sketch_(torch.zeros(256), [torch.ones(4).long()], [0], 0)


def test_special_values_arrive(backend: str) -> None:
    for value in (torch.inf, torch.nan):
        assert _sketched(torch.tensor([1.0, value])).isfinite().logical_not().sum() == 1
    assert torch.equal(_sketched(torch.empty(0), torch.ones(3)), _sketched(torch.ones(3)))


@pytest.mark.pairwise
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("place", ["own", "other", "added"])
@pytest.mark.parametrize("weight", [0.7, 0.0, -1e-3])
@pytest.mark.parametrize("shape", [(6, 20, 3, 3), (3, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighting(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], weight: float, place: str, memory: str
) -> None:
    """Sketches equal those of `sketch_`, bit for bit; updates are rounded as in float32."""
    x = laid_out(torch.randn(shape).to(dtype), memory)
    update = x if place == "own" else laid_out(torch.randn(shape).to(dtype), memory)
    before, plain = update.double() if place == "added" else 0.0, _sketched(x, offset=77)
    expected = (before + weight * x.double()).to(dtype)
    sketch, scalar = torch.zeros(1024), torch.tensor(weight, dtype=torch.float64)
    given = sketch, [update], [x], [77], 3, scalar, place == "added"
    torch.ops.cs_kernels.sketch_and_weight_(*given)
    assert torch.equal(sketch, plain)
    torch.testing.assert_close(update, expected)


_ONES = torch.ones(6, 4)


@pytest.mark.parametrize(
    ("tensor", "update"),
    [
        (_ONES.T, None),
        (_ONES[:, 1:], None),
        (_ONES.long(), None),
        (_ONES, _ONES.double()),
        (_ONES, torch.ones(4, 6)),
        (_ONES, torch.ones(4, 6).T),
        (_ONES[:1].expand(6, 4), None),
    ],
)
def test_memory_that_kernels_cannot_use(
    backend: str, tensor: Tensor, update: Tensor | None
) -> None:
    """`run_sketch` says so, and changes nothing."""
    run, sketch = cs.ops.run_sketch("cpu"), torch.zeros(256)
    weight = torch.tensor(0.7, dtype=torch.float64)
    before = None if update is None else update.clone()
    assert not run(sketch, tensor, 0, 7, update, weight, True)
    assert not sketch.any()
    assert before is None or torch.equal(before, update)
    assert run(sketch, _ONES.clone(), 0, 7, _ONES.clone(), weight, True)
    assert sketch.any()


@pytest.mark.kernel("cpu")
@pytest.mark.parametrize("place", ["own", "other", "added"])
def test_weighting_of_large_tensors(place: str) -> None:
    """Every element is weighted once, wherever threads and blocks end."""
    x = torch.randn(1_200_000)
    for numbers, offset in ((1_200_000, 77), (70_001, 65_536), (9_000, 3)):
        grad, sketch = x[:numbers].clone(), torch.zeros(65536)
        update = grad if place == "own" else torch.ones(numbers)
        given = [grad], [offset], 3, torch.tensor(0.7).double(), place == "added"
        torch.ops.cs_kernels.sketch_and_weight_(sketch, [update], *given)
        assert torch.equal(sketch, _sketched(x[:numbers], size=65536, offset=offset))
        torch.testing.assert_close(update, float(place == "added") + 0.7 * x[:numbers])


@pytest.mark.kernel("cpu")
@pytest.mark.parametrize("add", [False, True])
def test_a_weight_below_floats_range(add: bool) -> None:
    x, update = torch.full((70,), 1e35), torch.full((70,), 3e-9)
    given = [x], [0], 3, torch.tensor(1e-44, dtype=torch.float64), add
    torch.ops.cs_kernels.sketch_and_weight_(torch.zeros(256), [update], *given)
    torch.testing.assert_close(update, torch.full((70,), 4e-9 if add else 1e-9), rtol=1e-6, atol=0)


def test_a_weight_of_zero_shows_what_is_not_finite(backend: str) -> None:
    for add in (False, True):
        update, zero = torch.ones(2), torch.zeros((), dtype=torch.float64)
        given = [torch.tensor([torch.inf, 1.0])], [0], 3, zero, add
        torch.ops.cs_kernels.sketch_and_weight_(torch.zeros(256), [update], *given)
        assert update.isnan().tolist() == [True, False]
        assert update[1] == float(add)
