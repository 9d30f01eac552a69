"""Phase 2 on every backend against the float64 oracle: dtypes, tasks, layers, memory layouts."""

import pytest
import torch
from layers import (
    EMULATION,
    FORMATS,
    INTERPRETED,
    KINDS,
    SMALL,
    Kind,
    Sample,
    laid_out,
    sample,
    trunk_arguments,
)
from plain import closed_form_rows, projected_rows, rows, strength
from torch import Tensor

import cs_kernels as cs

pytestmark = pytest.mark.kernel

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TASKS = (1, 2, 3, 4, 8, 9) if EMULATION else (2, 4, 9) if INTERPRETED else range(1, 11)


def _check_priority(priority: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal wherever the two greatest strengths are not within rounding of each other."""
    if 1 in exact.shape:  # One channel is all of every task's layer: a tie, to the first task.
        assert priority.eq(0).all()
        return
    top = exact.topk(2, dim=0).values
    clear = top[0] - top[1] > 1e-12 * top[0]
    assert clear.float().mean() > 0.9
    assert torch.equal(priority[clear], exact.argmax(0)[clear])


def _check_update(update: torch.Tensor, args: Sample, priority: torch.Tensor) -> None:
    """At most twice the error of the plain formula in the same dtype."""
    kind = args.kind
    exact = projected_rows(args.grads.double(), priority, kind)
    plain = closed_form_rows(args.grads, priority, kind)
    error = (rows(update.double(), kind) - exact).abs().max()
    allowed = 2 * (plain.double() - exact).abs().max()
    # Where the plain formula happens to be exact, the roundings that storing takes: one, or two in
    # 16 bits (the sum, then what is added to it); in float64, where the plain formula is as good
    # as the oracle, one for each addition.
    roundings = {torch.float32: 1, torch.float64: len(args.grads) + 1}.get(update.dtype, 2)
    rounding = roundings * torch.finfo(update.dtype).eps / 2 * exact.abs().max()
    assert error <= max(allowed, rounding)


def _phase2(args: Sample, grads: Tensor | None = None) -> tuple[Tensor, Tensor]:
    kind = args.kind
    return cs.functional.phase2_update(
        args.weight,
        args.gamma,
        args.running_var,
        args.grads if grads is None else grads,
        eps=args.eps,
        out_channel_dim=kind.out_channel_dim,
        groups=kind.groups,
    )


def _check(args: Sample) -> Tensor:
    """Both results of an update; the priority."""
    update, priority = _phase2(args)
    assert update.shape == args.weight.shape
    assert update.dtype is args.weight.dtype
    wide = args.float64()
    exact = strength(wide.weight, wide.gamma, wide.running_var, wide.eps, args.kind)
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


@pytest.mark.each
@pytest.mark.parametrize(
    "shape",
    [(61, 64, 3, 3), (3, 9001), (500, 32)] if SMALL else [(256, 256, 3, 3), (5, 70001), (4099, 64)],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_layers(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """More than a chunk, more than a cache, groups visited on their own."""
    assert len(_check(sample(Kind("large", shape), 4, dtype)).unique()) >= 3


@pytest.mark.parametrize(("dtype", "tasks"), [(torch.float32, 4), (torch.bfloat16, 9)], ids=str)
def test_a_trunk_larger_than_the_caches(dtype: torch.dtype, tasks: int) -> None:
    """The same bits as one tensor at a time: also where the update is written past the caches.

    Each tensor alone moves less than the size from which that is done. The second layer's addresses
    are aligned to nothing; the first one has a group too large for any scratch.
    """
    priorities = [torch.zeros(650, dtype=torch.int64), torch.randint(-1, tasks, (300,))]
    shapes = [(650, 4001), (300, 5003), (1_000_001,)]
    grads = [
        laid_out(torch.randn(shape).to(dtype), memory)
        for shape, memory in zip(shapes, ["contiguous", "misaligned", "misaligned"], strict=True)
        for _ in range(tasks)
    ]
    whole = [laid_out(torch.empty_like(g), "misaligned") for g in grads[::tasks]]
    run = torch.ops.cs_kernels.project_conflicts_
    run(whole, grads, priorities, [0, 0], [1, 1], tasks)
    for t, update in enumerate(whole):
        alone = torch.empty_like(update)
        run([alone], grads[t * tasks :][:tasks], priorities[t : t + 1], [0], [1], tasks)
        assert torch.equal(update, alone)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_connection_strength(backend: str, kind: Kind, normalize: bool) -> None:
    args = sample(kind, 3, torch.float32)
    wide = args.float64()
    exact = strength(wide.weight, wide.gamma, wide.running_var, wide.eps, kind)
    if normalize:
        exact = exact / exact.sum(1, keepdim=True)
    result = cs.functional.connection_strength(
        args.weight,
        args.gamma,
        args.running_var,
        eps=args.eps,
        normalize=normalize,
        out_channel_dim=kind.out_channel_dim,
        groups=kind.groups,
    )
    assert result.dtype is torch.float64
    torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_connection_strength_reads_every_dtype(backend: str, dtype: torch.dtype) -> None:
    """The weight, gamma and variance, subnormal values included."""
    kind = Kind("conv", (4, 3, 3, 3))
    weight = torch.randn(kind.shape).to(dtype)
    gamma = (torch.randn(2, 4) * torch.tensor([1.0, 1e-6]).unsqueeze(1)).to(dtype)
    var = torch.rand(2, 4).to(dtype)
    result = cs.functional.connection_strength(weight, gamma, var, normalize=False)
    exact = strength(weight.double(), gamma.double(), var.double(), [1e-5] * 2, kind)
    torch.testing.assert_close(result, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_16_bit_results(backend: str, dtype: torch.dtype) -> None:
    """A sum of two is exact in float, so the result is the correctly rounded one, everywhere."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype)
    other = every[torch.randperm(len(every))]
    grads = torch.stack([every, other]).unsqueeze(1)
    update = cs.functional.project_conflicts(grads.flatten(1).unsqueeze(1), torch.zeros(1).long())
    # There is a NaN in the only group, so no dot product is negative and nothing is projected.
    expected = (every.float() + other.float()).to(dtype)
    assert torch.equal(update.flatten().isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(update.flatten()[number], expected[number])


def test_hand_computed_update(backend: str) -> None:
    """Two channels, two tasks; channel 0 belongs to task 1 and channel 1 to task 0.

    Group of task 1, channel 0: G_1 = (1, 0), G_0 = (-2, 3), d = -2: G_0 becomes (0, 3).
    Group of task 0, channel 1: G_0 = (1, 1), G_1 = (2, -1), d = 1: no conflict.
    """
    grads = torch.tensor([[[-2.0, 3.0], [1.0, 1.0]], [[1.0, 0.0], [2.0, -1.0]]])
    update = cs.functional.project_conflicts(grads, torch.tensor([1, 0]))
    assert update.tolist() == [[1.0, 3.0], [3.0, 0.0]]


def test_a_group_is_one_vector(backend: str) -> None:
    """Channels of a group are projected together: here the conflict of one outweighs the other."""
    grads = torch.tensor([[[1.0], [1.0]], [[-3.0], [1.0]]])
    update = cs.functional.project_conflicts(grads, torch.tensor([0, 0]))
    # d = -3 + 1 = -2, d_00 = 2, a = 1: update = sum + G_0.
    assert update.tolist() == [[-1.0], [3.0]]


def test_hand_computed_strength(backend: str) -> None:
    """A 2 x 2 x 1 x 2 kernel: k^2 stands for the two elements of the window."""
    weight = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]], [[[2.0, 0.0]], [[0.0, 0.0]]]])
    gamma = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    var = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
    strength = cs.functional.connection_strength(
        weight, gamma, var, eps=[1.0, 1.0], normalize=False
    )
    # Energies (1 + 4 + 9) / 2 = 7 and 4 / 2 = 2.
    assert strength.tolist() == [[3.5, 2.0], [21.0, 2.0]]


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
    kind = Kind("linear", (6, 5))
    args = sample(kind, 3, torch.float32)
    zero = torch.zeros_like(args.gamma)
    strength = cs.functional.connection_strength(args.weight, zero, args.running_var)
    assert torch.equal(strength, torch.zeros(3, 6, dtype=torch.float64))
    update, priority = cs.functional.phase2_update(args.weight, zero, args.running_var, args.grads)
    assert torch.equal(priority, torch.zeros(6, dtype=torch.int64))
    _check_update(update, args, priority)


def test_a_zero_reference_changes_nothing(backend: str) -> None:
    grads = torch.randn(3, 8, 10)
    grads[1] = 0
    priority = torch.ones(8, dtype=torch.int64)
    update = cs.functional.project_conflicts(grads, priority)
    torch.testing.assert_close(update, grads.sum(0))


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_scales_of_float32(backend: str, scale: float) -> None:
    """Finite and equivariant: scaling by a power of two is exact, so the result is too."""
    args = sample(Kind("conv", (16, 8, 3, 3)), 4, torch.float32)
    factor = 2.0 ** round(torch.log2(torch.tensor(scale)).item())
    priority = torch.arange(16) % 4
    update = cs.functional.project_conflicts(args.grads, priority)
    scaled = cs.functional.project_conflicts(args.grads * factor, priority)
    assert scaled.isfinite().all()
    torch.testing.assert_close(scaled / factor, update, rtol=1e-5, atol=1e-6)


def test_gradients_of_different_scale(backend: str) -> None:
    """a_i is beyond float32's range, but a_i * G_i is not."""
    reference = torch.tensor([[1.0, 0.0]]) * 1e-25
    rival = torch.tensor([[-1.0, 1.0]]) * 1e20
    update = cs.functional.project_conflicts(torch.stack([reference, rival]), torch.zeros(1).long())
    torch.testing.assert_close(update, torch.tensor([[0.0, 1e20]]), rtol=1e-6, atol=1e14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("task", [0, 1])
def test_nan_and_inf_reach_the_update(backend: str, bad: float, task: int) -> None:
    grads = torch.randn(2, 4, 50)
    grads[task, 1, 7] = bad
    priority = torch.tensor([0, 0, 1, 1])
    update = cs.functional.project_conflicts(grads, priority)
    assert not update[1, 7].isfinite()
    assert update[2:].isfinite().all()


@pytest.mark.each
@pytest.mark.parametrize("tasks", [2, 3, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_stages(backend: str, dtype: torch.dtype, tasks: int) -> None:
    """Energies, priorities, products, then the projection: the same as the fused update."""
    layers = [sample(kind, tasks, dtype) for kind in KINDS]
    arguments = trunk_arguments(layers)
    plain = torch.randn(tasks, 700).to(dtype)
    arguments["updates"] += [torch.empty_like(plain[0])]
    arguments["grads"] += list(plain)
    arguments["grads"][1] = arguments["grads"][2 * tasks] = None
    arguments["grads"][4 * tasks : 5 * tasks] = [None] * tasks
    written = torch.empty(len(layers), tasks, tasks, dtype=torch.float64)
    fused = torch.ops.cs_kernels.phase2_update_(*arguments.values(), products=written)
    channels = [layer.kind.channels for layer in layers]
    dims, groups = arguments["out_channel_dims"], arguments["groups"]
    energies = torch.ops.cs_kernels.channel_energies(arguments["weights"], dims, groups)
    priorities = torch.ops.cs_kernels.energy_priority(
        energies, arguments["gamma"], arguments["running_var"], arguments["eps"], channels
    )
    assert torch.equal(priorities, fused)
    updates = [torch.empty_like(update) for update in arguments["updates"]]
    split = priorities.split(channels)
    grads = arguments["grads"]
    products = torch.ops.cs_kernels.phase2_products_(updates, grads, split, dims, groups, tasks)
    torch.testing.assert_close(written, products, rtol=1e-6, atol=1e-6)
    for layer, d in enumerate(products):
        present = [
            torch.zeros_like(updates[layer]) if g is None else g
            for g in grads[layer * tasks : (layer + 1) * tasks]
        ]
        of_rows = torch.stack([rows(g.double(), layers[layer].kind) for g in present])
        for i in range(tasks):
            group = of_rows[:, split[layer] == i].flatten(1)
            torch.testing.assert_close(d[i], group @ group[i], rtol=1e-5, atol=1e-5)
    sums = [update.clone() for update in updates]
    torch.ops.cs_kernels.phase2_apply_(updates, grads, split, products, dims, groups, tasks)
    # The reference rounds the sum once more.
    tolerance = 0 if backend == "cpu" else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(updates, arguments["updates"], rtol=tolerance, atol=tolerance)
    assert torch.equal(updates[-1], sums[-1])
    assert any(not torch.equal(a, b) for a, b in zip(updates, sums, strict=True))


def test_products_of_layers_of_several_dtypes(backend: str) -> None:
    """A GPU has a launch for each dtype; all write into the same tensor."""
    tasks, dtypes = 3, (torch.float32, torch.bfloat16, torch.float32, torch.float64)
    layers = [sample(Kind("linear", (8, 5)), tasks, dtype) for dtype in dtypes]
    arguments = trunk_arguments(layers)
    products = torch.empty(len(layers), tasks, tasks, dtype=torch.float64)
    priorities = torch.ops.cs_kernels.phase2_update_(*arguments.values(), products=products)
    for layer, priority, d in zip(layers, priorities.split(8), products, strict=True):
        for i in range(tasks):
            group = layer.grads.double()[:, priority == i].flatten(1)
            torch.testing.assert_close(d[i], group @ group[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", [2, 3])
def test_stages_over_parts_of_the_channels_inputs(backend: str, shards: int) -> None:
    """Energies and products of parts add up to those of the whole: gradients on several devices."""
    ops = torch.ops.cs_kernels
    tasks, weight = 3, torch.randn(8, 24)
    grads = [torch.randn(8, 24) for _ in range(tasks)]
    gamma, var, eps = torch.rand(tasks, 8), torch.rand(tasks, 8) + 0.1, [1e-5] * tasks
    whole = torch.empty(8, 24)
    fused = ops.phase2_update_([whole], grads, [weight], gamma, var, eps, [0], [1], tasks)

    def parts(tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(shards, 1)]

    energies = sum(ops.channel_energies([part], [0], [1]) for part in parts(weight))
    priority = ops.energy_priority(energies, gamma, var, eps, [8])
    assert torch.equal(priority, fused)
    updates = [torch.empty_like(part) for part in parts(weight)]
    of_parts = list(zip(*map(parts, grads), strict=True))
    products = sum(
        ops.phase2_products_([update], list(of_part), [priority], [0], [1], tasks)
        for update, of_part in zip(updates, of_parts, strict=True)
    )
    for update, of_part in zip(updates, of_parts, strict=True):
        ops.phase2_apply_([update], list(of_part), [priority], products, [0], [1], tasks)
    torch.testing.assert_close(torch.cat(updates, 1), whole)


@pytest.mark.parametrize("stride", [0, 2])
def test_priorities_of_energies_that_are_not_contiguous(backend: str, stride: int) -> None:
    channels, tasks = [4, 5], 3
    energies = (torch.rand(18, dtype=torch.float64) ** 8).as_strided((9,), (stride,))
    statistics = torch.randn(tasks * 9), torch.rand(tasks * 9) + 0.1, [1e-5] * (2 * tasks)
    found = torch.ops.cs_kernels.energy_priority(energies, *statistics, channels)
    with cs.use_backend("reference"):
        expected = torch.ops.cs_kernels.energy_priority(energies.clone(), *statistics, channels)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (torch.zeros(1, 2, 3).double(), r"\(1, 2, 2\), got torch.float64 .*\(1, 2, 3\)"),
        (torch.zeros(1, 2, 2), "products must be float64 .*got torch.float32"),
    ],
)
def test_products_that_do_not_fit(products: Tensor, message: str) -> None:
    update, grads, priorities = torch.zeros(4, 3), [torch.ones(4, 3)] * 2, [torch.zeros(4).long()]
    with pytest.raises(ValueError, match=message):
        torch.ops.cs_kernels.phase2_apply_([update], grads, priorities, products, [0], [1], 2)
    assert update.eq(0).all()


def test_stages_of_updates_that_are_not_dense(backend: str) -> None:
    """They are written through a copy, which starts from the sums."""
    ops = torch.ops.cs_kernels
    grads, priority = [torch.randn(4, 3) for _ in range(2)], [torch.tensor([0, 1, 0, 1])]
    grads[1] = torch.randn(4, 3) - grads[0]
    expected, update = torch.empty(4, 3), torch.zeros(4, 6)[:, ::2]
    ops.project_conflicts_([expected], grads, priority, [0], [1], 2)
    products = ops.phase2_products_([update], grads, priority, [0], [1], 2)
    ops.phase2_apply_([update], grads, priority, products, [0], [1], 2)
    torch.testing.assert_close(update, expected)


def test_a_trunk_in_one_call(backend: str) -> None:
    """All layers, and tensors without priority, as layer by layer; missing gradients are zero."""
    layers = [sample(kind, 3, torch.float32) for kind in KINDS]
    arguments = trunk_arguments(layers)
    plain = [torch.randn(3, *shape) for shape in ((7,), (40000,), ())]
    arguments["updates"] += [torch.empty_like(p[0]) for p in plain]
    arguments["grads"] += [g for p in plain for g in p]
    grads = arguments["grads"]
    grads[1] = None  # First layer, task 1.
    for i in range(3):
        grads[3 * 4 + i] = None  # Fifth layer, every task.
    grads[3 * len(layers)] = None  # First plain tensor, task 0.
    flat = torch.ops.cs_kernels.phase2_update_(*arguments.values())
    priorities = flat.split([layer.kind.channels for layer in layers])
    updates = arguments["updates"]
    for i, (layer, update, priority) in enumerate(
        zip(layers, updates[: len(layers)], priorities, strict=True)
    ):
        dense = layer.grads.clone()
        if i == 0:
            dense[1] = 0
        if i == 4:
            dense[:] = 0
        expected, expected_priority = _phase2(layer, dense)
        assert torch.equal(priority, expected_priority)
        torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-6)
    first = sum(g for g in grads[3 * len(layers) : 3 * len(layers) + 3] if g is not None)
    torch.testing.assert_close(updates[len(layers)], first)
    second = sum(grads[3 * len(layers) + 3 : 3 * len(layers) + 6])
    torch.testing.assert_close(updates[len(layers) + 1], second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_on_any_number_of_threads(backend: str, dtype: torch.dtype) -> None:
    if backend == "reference":
        return  # torch's own sums are split by the number of threads
    channels = 32 if SMALL else 256
    args = sample(Kind("conv", (channels, channels, 3, 3)), 3, dtype)
    call = (args.weight, args.gamma, args.running_var, args.grads)
    default = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        update, priority = cs.functional.phase2_update(*call)
        for threads in (1 if SMALL else 3) * (1, 3, 4):
            torch.set_num_threads(threads)
            again, priority_again = cs.functional.phase2_update(*call)
            assert torch.equal(update.view(torch.int8), again.view(torch.int8))
            assert torch.equal(priority, priority_again)
    finally:
        torch.set_num_threads(default)


def test_empty_layers(backend: str) -> None:
    for shape in ((3, 0), (0, 4)):
        grads, priority = torch.zeros(2, *shape), torch.zeros(shape[0]).long()
        assert cs.functional.project_conflicts(grads, priority).shape == shape
    call = torch.zeros(3, 0), torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3, 0)
    update, priority = cs.functional.phase2_update(*call)
    assert update.shape == (3, 0)
    assert priority.tolist() == [0, 0, 0]
