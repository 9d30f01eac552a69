"""Phase 2 on every backend against the float64 oracle: dtypes, tasks, layers, memory layouts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layers import (
    FORMATS,
    GPU_BACKENDS,
    INTERPRETED,
    KINDS,
    SMALL,
    TASKS,
    Kind,
    Sample,
    laid_out,
    sample,
    trunk_arguments,
)
from networks import assert_equal
from plain import closed_form_rows, projected_rows, rows, strength
from torch import Tensor

import cs_kernels as cs

pytestmark = pytest.mark.kernel

_ops = torch.ops.cs_kernels

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _check_priority(priority: Tensor, exact: Tensor) -> None:
    """Asserts equal priorities where the two largest strengths differ by more than rounding."""
    if 1 in exact.shape:  # With one channel, all strengths are 1: a tie.
        assert priority.eq(0).all()
        return
    top = exact.topk(2, dim=0).values
    clear = top[0] - top[1] > 1e-12 * top[0]
    assert clear.float().mean() > 0.9
    assert torch.equal(priority[clear], exact.argmax(0)[clear])


def _check_update(update: Tensor, args: Sample, priority: Tensor) -> None:
    """Asserts that the error is at most twice the plain formula's in the same dtype."""
    kind = args.kind
    exact = projected_rows(args.grads.double(), priority, kind)
    plain = closed_form_rows(args.grads, priority, kind)
    error = (rows(update.double(), kind) - exact).abs().max()
    allowed = 2 * (plain.double() - exact).abs().max()
    # Stores round even where the plain formula is exact: once, or twice in 16 bits (the sum, then
    # the correction). In float64, where the plain formula is as exact as the oracle, each addition
    # rounds.
    roundings = {torch.float32: 1, torch.float64: len(args.grads) + 1}.get(update.dtype, 2)
    rounding = roundings * torch.finfo(update.dtype).eps / 2 * exact.abs().max()
    assert error <= max(allowed, rounding)


def _phase2(args: Sample, **options: Tensor) -> tuple[Tensor, Tensor]:
    given = args.weight, args.gamma, args.running_var, args.grads
    return cs.functional.phase2_update(*given, eps=args.eps, **args.kind.layout, **options)


def _strength(args: Sample) -> Tensor:
    wide = args.float64()
    return strength(wide.weight, wide.gamma, wide.running_var, wide.eps, args.kind)


def _check_products(products: Tensor, layers: list[Sample], priorities: Iterable[Tensor]) -> None:
    """Checks d_ij = <G_i, G_j> of every channel group."""
    for d, layer, priority in zip(products, layers, priorities, strict=True):
        of_rows = torch.stack([rows(g.double(), layer.kind) for g in layer.grads])
        for i in range(len(d)):
            group = of_rows[:, priority == i].flatten(1)
            torch.testing.assert_close(d[i], group @ group[i], rtol=1e-5, atol=1e-5)


def _check(args: Sample) -> Tensor:
    """Checks both results of an update; returns the priority."""
    update, priority = _phase2(args)
    assert update.shape == args.weight.shape
    assert update.dtype is args.weight.dtype
    exact = _strength(args)
    _check_priority(priority, exact / exact.sum(1, keepdim=True))
    _check_update(update, args, priority)
    return priority


@pytest.mark.pairwise
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phase2_update_agrees_with_float64(
    backend: str, dtype: torch.dtype, tasks: int, kind: Kind, memory: str
) -> None:
    _check(sample(kind, tasks, dtype, memory))


LARGE = [(256, 256, 3, 3), (5, 70001), (4099, 64)]
if INTERPRETED:  # Barely more than one program, tile or iteration of each kind.
    LARGE = [(61, 64, 3, 3), (3, 5501), (200, 32)]
elif SMALL:
    LARGE = [(61, 64, 3, 3), (3, 9001), (500, 32)]


@pytest.mark.each
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_layers(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Layers larger than a chunk or a cache, with channel groups visited one by one."""
    assert len(_check(sample(Kind("large", shape), 4, dtype)).unique()) >= 3


@pytest.mark.parametrize(("dtype", "tasks"), [(torch.float32, 4), (torch.bfloat16, 9)], ids=str)
def test_a_trunk_larger_than_the_caches(dtype: torch.dtype, tasks: int) -> None:
    """Updates equal, bit for bit, those of one tensor at a time, even with streaming stores.

    A single tensor is too small for streaming stores. The second layer is misaligned; the first one
    has a group too large for any workspace.
    """
    priorities = [torch.zeros(650, dtype=torch.int64), torch.randint(-1, tasks, (300,))]
    shapes = [(650, 4001), (300, 5003), (1_000_001,)]
    grads = [
        laid_out(torch.randn(shape).to(dtype), memory)
        for shape, memory in zip(shapes, ["contiguous", "misaligned", "misaligned"], strict=True)
        for _ in range(tasks)
    ]
    whole = [laid_out(torch.empty_like(g), "misaligned") for g in grads[::tasks]]
    run = _ops.project_conflicts_
    run(whole, grads, priorities, [0, 0], [1, 1], tasks)
    for t, update in enumerate(whole):
        alone = torch.empty_like(update)
        of_tensor, layers = grads[t * tasks :][:tasks], priorities[t : t + 1]
        run([alone], of_tensor, layers, [0] * len(layers), [1] * len(layers), tasks)
        assert torch.equal(update, alone)


@pytest.mark.pairwise
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_connection_strength(backend: str, dtype: torch.dtype, kind: Kind, normalize: bool) -> None:
    """Weight, gamma and variance may have any dtype, and subnormal values."""
    args = sample(kind, 3, dtype)
    gamma = args.gamma * torch.tensor([[1.0], [1e-6], [1.0]])
    args = replace(args, gamma=gamma.to(dtype), running_var=args.running_var.to(dtype))
    exact = _strength(args)
    if normalize:
        exact = exact / exact.sum(1, keepdim=True)
    given = args.weight, args.gamma, args.running_var
    options = {"eps": args.eps, "normalize": normalize, **kind.layout}
    result = cs.functional.connection_strength(*given, **options)
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_16_bit_results(backend: str, dtype: torch.dtype) -> None:
    """Rounding a sum of two values to float32 first does no harm; results are correctly rounded."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype)
    other = every[torch.randperm(len(every))]
    grads = torch.stack([every, other]).unsqueeze(1)
    update = cs.functional.project_conflicts(grads, torch.zeros(1).long())
    # There is a NaN in the only group, so no dot product is negative and nothing is projected.
    expected = (every.float() + other.float()).to(dtype)
    torch.testing.assert_close(update[0], expected, rtol=0, atol=0, equal_nan=True)


def test_priority_ties_and_nan(backend: str) -> None:
    nan, inf = float("nan"), float("inf")
    strength = torch.tensor(
        [
            [0.5, nan, 0.0, 0.1, nan, 1.0, nan],
            [0.5, 0.0, 0.0, 0.3, nan, inf, 0.1],
            [0.2, nan, 0.0, 0.3, nan, nan, 0.2],
        ]
    )
    assert cs.functional.task_priority(strength).tolist() == [0, 1, 0, 1, 0, 1, 2]


def test_all_gamma_zero_gives_the_first_task(backend: str) -> None:
    args = sample(Kind("linear", (6, 5)), 3, torch.float32)
    args = replace(args, gamma=torch.zeros_like(args.gamma))
    assert cs.functional.connection_strength(args.weight, args.gamma, args.running_var).eq(0).all()
    update, priority = _phase2(args)
    assert priority.tolist() == [0] * 6
    _check_update(update, args, priority)


@pytest.mark.parametrize("other", [-1, -5, 3, 70, None])
def test_channels_with_the_plain_sum(backend: str, other: int | None) -> None:
    """Such channels have no top-priority task, or a reference gradient of zero."""
    grads, update = torch.randn(3, 6, 40), torch.empty(6, 40)
    priority = torch.tensor([0, other or 1, 1, 2, other or 1, 0])
    if other is None:
        grads[1] = 0
    _ops.project_conflicts_([update], [*grads], [priority], [0], [1], 3)
    plain = priority == (other or 1)
    torch.testing.assert_close(update[plain], grads.sum(0)[plain])
    assert other is None or not torch.equal(update, grads.sum(0))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_scales_of_float32(backend: str, scale: float) -> None:
    """Results are finite and scale with the gradients, here by powers of two."""
    if backend in GPU_BACKENDS and not 1e-18 <= scale <= 1e18:
        return  # Products of a tile are in float32.
    args = sample(Kind("conv", (16, 64, 3, 3)), 4, torch.float32)
    factor = 2.0 ** round(torch.log2(torch.tensor(scale)).item())
    priority = torch.arange(16) % 4
    update, scaled = (
        cs.functional.project_conflicts(grads, priority)
        for grads in (args.grads, args.grads * factor)
    )
    assert scaled.isfinite().all()
    torch.testing.assert_close(scaled / factor, update, rtol=1e-5, atol=1e-6)


def test_products_beyond_float32_are_not_ignored(backend: str) -> None:
    """d_ii and d_ij exceed float32's range; the projection must not vanish silently."""
    grads = torch.stack([torch.full((2, 500), 1e19), torch.full((2, 500), -0.5e19)])
    update = cs.functional.project_conflicts(grads, torch.zeros(2, dtype=torch.int64))
    finite = update[update.isfinite()]
    torch.testing.assert_close(finite, torch.full_like(finite, 1e19))


def test_gradients_of_different_scale(backend: str) -> None:
    """a_i may be beyond float32's range where a_i * G_i is not; on a GPU, a_i is in float32."""
    small, large = (1e-18, 1e18) if backend in GPU_BACKENDS else (1e-25, 1e20)
    reference = torch.tensor([[1.0, 0.0]]) * small
    rival = torch.tensor([[-1.0, 1.0]]) * large
    update = cs.functional.project_conflicts(torch.stack([reference, rival]), torch.zeros(1).long())
    expected = torch.tensor([[0.0, large]])
    torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-6 * large)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("task", [0, 1])
def test_nan_and_inf_reach_the_update(backend: str, bad: float, task: int) -> None:
    grads = torch.randn(2, 4, 50)
    grads[task, 1, 7] = bad
    update = cs.functional.project_conflicts(grads, torch.tensor([0, 0, 1, 1]))
    assert not update[1, 7].isfinite()
    assert update[2:].isfinite().all()


def _trunk(tasks: int, dtype: torch.dtype) -> tuple[list[Sample], dict[str, Any]]:
    """Layers, and tensors without priorities; missing gradients are zeros in the samples."""
    layers = [sample(kind, tasks, dtype) for kind in KINDS]
    arguments = trunk_arguments(layers)
    plain = [
        torch.randn(tasks, *shape).to(dtype)
        for shape in ((7,), (12_000 if INTERPRETED else 40_000,), ())
    ]
    arguments["updates"] += [torch.empty_like(p[0]) for p in plain]
    grads = arguments["grads"] = [*arguments["grads"], *(g for p in plain for g in p)]
    all_of_a_layer = [(4, task) for task in range(tasks)]
    for t, task in [(0, 1), (2, 0), *all_of_a_layer, (len(layers), 0)]:
        grads[t * tasks + task] = None
        if t < len(layers):
            layers[t].grads[task] = 0
    return layers, arguments


@pytest.mark.each
@pytest.mark.parametrize("tasks", [2, 3, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_stages(backend: str, dtype: torch.dtype, tasks: int) -> None:
    """Energies, priorities, products and the projection together equal the fused update.

    The fused update equals the update of each layer alone and, for other tensors, the plain sum;
    missing gradients count as zeros.
    """
    layers, arguments = _trunk(tasks, dtype)
    written = torch.empty(len(layers), tasks, tasks, dtype=torch.float64)
    fused = _ops.phase2_update_(*arguments.values(), products=written)
    channels = [layer.kind.channels for layer in layers]
    of_layers = zip(layers, arguments["updates"], fused.split(channels), strict=False)
    for layer, update, priority in of_layers:
        alone, same = _phase2(layer)
        assert torch.equal(priority, same)
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(update, alone, rtol=tolerance, atol=tolerance)
    for t in range(len(layers), len(arguments["updates"])):
        present = [g.double() for g in arguments["grads"][t * tasks :][:tasks] if g is not None]
        expected = sum(present).to(dtype)
        torch.testing.assert_close(
            arguments["updates"][t], expected, rtol=tolerance, atol=tolerance
        )
    dims, groups = arguments["out_channel_dims"], arguments["groups"]
    energies = _ops.channel_energies(arguments["weights"], dims, groups)
    statistics = (arguments[name] for name in ("gamma", "running_var", "eps"))
    assert torch.equal(_ops.energy_priority(energies, *statistics, channels), fused)
    updates = [torch.empty_like(update) for update in arguments["updates"]]
    priorities, grads = fused.split(channels), arguments["grads"]
    products = _ops.phase2_products_(updates, grads, priorities, dims, groups, tasks)
    torch.testing.assert_close(written, products, rtol=1e-6, atol=1e-6)
    _check_products(products, layers, priorities)
    sums = [update.clone() for update in updates]
    _ops.phase2_apply_(updates, grads, priorities, products, dims, groups, tasks)
    # Other backends may round the sum once more.
    tolerance = 0 if backend == "cpu" else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(updates, arguments["updates"], rtol=tolerance, atol=tolerance)
    changed = [not torch.equal(a, b) for a, b in zip(updates, sums, strict=True)]
    assert any(changed)
    assert not any(changed[len(layers) :])


def test_products_of_layers_of_several_dtypes(backend: str) -> None:
    """A GPU has one launch per dtype; all launches write into the same tensor."""
    dtypes = torch.float32, torch.bfloat16, torch.float32, torch.float64
    layers = [sample(Kind("linear", (8, 5)), 3, dtype) for dtype in dtypes]
    products = torch.empty(len(layers), 3, 3, dtype=torch.float64)
    priorities = _ops.phase2_update_(*trunk_arguments(layers).values(), products=products)
    _check_products(products, layers, priorities.split(8))


@pytest.mark.parametrize("shards", [2, 3])
def test_stages_over_shards(backend: str, shards: int) -> None:
    """Energies and products of shards add up to those of the whole, as on several devices."""
    tasks, weight, grads = 3, torch.randn(8, 24), torch.randn(3, 8, 24)
    statistics = torch.rand(tasks, 8), torch.rand(tasks, 8) + 0.1, [1e-5] * tasks
    whole = torch.empty(8, 24)
    fused = _ops.phase2_update_([whole], [*grads], [weight], *statistics, [0], [1], tasks)
    energies = sum(_ops.channel_energies([part], [0], [1]) for part in weight.chunk(shards, 1))
    priority = _ops.energy_priority(energies, *statistics, [8])
    assert torch.equal(priority, fused)
    parts = [
        ([torch.empty(part.shape[1:])], [*part.contiguous()], [priority])
        for part in grads.chunk(shards, 2)
    ]
    products = sum(_ops.phase2_products_(*part, [0], [1], tasks) for part in parts)
    for part in parts:
        _ops.phase2_apply_(*part, products, [0], [1], tasks)
    torch.testing.assert_close(torch.cat([update for (update,), *_ in parts], 1), whole)


@pytest.mark.parametrize("stride", [0, 2])
def test_priorities_of_energies_that_are_not_contiguous(backend: str, stride: int) -> None:
    channels, tasks = [4, 5], 3
    energies = (torch.rand(18, dtype=torch.float64) ** 8).as_strided((9,), (stride,))
    statistics = torch.randn(tasks * 9), torch.rand(tasks * 9), torch.rand(2 * tasks).tolist()
    found = _ops.energy_priority(energies, *statistics, channels)
    with cs.use_backend("reference"):
        expected = _ops.energy_priority(energies.clone(), *statistics, channels)
    assert torch.equal(found, expected)


def test_stages_of_updates_that_are_not_dense(backend: str) -> None:
    """Such updates are written through a copy that starts from the sums."""
    grads, priority = [torch.randn(4, 3) for _ in range(2)], [torch.tensor([0, 1, 0, 1])]
    grads[1] = torch.randn(4, 3) - grads[0]
    expected, update = torch.empty(4, 3), torch.zeros(4, 6)[:, ::2]
    _ops.project_conflicts_([expected], grads, priority, [0], [1], 2)
    products = _ops.phase2_products_([update], grads, priority, [0], [1], 2)
    _ops.phase2_apply_([update], grads, priority, products, [0], [1], 2)
    torch.testing.assert_close(update, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_on_any_number_of_threads(backend: str, dtype: torch.dtype) -> None:
    if backend == "reference":
        return  # Torch splits its sums by the number of threads.
    channels = 32 if SMALL else 128
    args = sample(Kind("conv", (channels, channels, 3, 3)), 3, dtype)
    default, results = torch.get_num_threads(), []
    try:
        for threads in (2, 1) if SMALL else (2, 1, 3, 4, 3):
            torch.set_num_threads(threads)
            results.append([t.view(torch.int8) for t in _phase2(args)])
    finally:
        torch.set_num_threads(default)
    assert_equal(results[1:], results[:1] * (len(results) - 1))


@pytest.mark.each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_update_into_a_tensor(backend: str, kind: Kind, dtype: torch.dtype) -> None:
    """Results equal those in a new tensor, bit for bit, whatever was in `out`."""
    args = sample(kind, 3, dtype)
    update, priority = _phase2(args)
    out = torch.full_like(update, torch.nan)
    written, same = _phase2(args, out=out)
    assert written is out
    assert torch.equal(out, update)
    assert torch.equal(same, priority)
    projected = cs.functional.project_conflicts(args.grads, priority, **kind.layout)
    given = {**kind.layout, "out": out.fill_(torch.nan)}
    assert cs.functional.project_conflicts(args.grads, priority, **given) is out
    assert torch.equal(out, projected)


def test_empty_layers(backend: str) -> None:
    for shape in ((3, 0), (0, 4)):
        grads, priority = torch.zeros(2, *shape), torch.zeros(shape[0]).long()
        assert cs.functional.project_conflicts(grads, priority).shape == shape
    for shape in ((4, 0, 3), (4, 2, 0)):
        grads, priority = torch.zeros(2, *shape), torch.zeros(2 * shape[1]).long()
        layout = {"out_channel_dim": 1, "groups": 2}
        assert cs.functional.project_conflicts(grads, priority, **layout).shape == shape
    gamma = torch.tensor([[torch.nan], [1.0]]).expand(2, 3)
    call = torch.zeros(3, 0), gamma, torch.ones(2, 3), torch.zeros(2, 3, 0)
    update, priority = cs.functional.phase2_update(*call)
    assert update.shape == (3, 0)
    assert priority.tolist() == [0, 0, 0]
