"""Task weights from Gramians on every backend: hand values, laws, and what some methods keep."""

import math

import pytest
import torch
from layers import SMALL
from networks import GRAMIAN_METHODS
from torch import Tensor

import cs_kernels as cs
from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.ops.reference.solvers import pcgrad_order
from cs_kernels.ops.solvers import NASH_RIDGE

CONFLICT = torch.tensor([[1.0, -1.0], [-1.0, 4.0]], dtype=torch.float64)
ORTHOGONAL = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("method", "gramian", "expected"),
    [
        # g_1 = (1, 0) and g_2 = (-1, sqrt 3): each loses -1 / |other|^2 of the other.
        (cs.PCGrad(), CONFLICT, [2.0, 1.25]),
        (cs.PCGrad("mean"), CONFLICT, [1.0, 0.625]),
        (cs.UPGrad(), CONFLICT, [1.0, 0.625]),
        # (g_2 - g_1) w = 0 on the segment: w_1 = (4 + 1) / 7.
        (cs.MGDA(), CONFLICT, [5 / 7, 2 / 7]),
        (cs.MGDA("l2"), CONFLICT, [0.5, 0.5]),
        # G v = (1, 2) has v = (2, 1).
        (cs.IMTLG(), CONFLICT, [2 / 3, 1 / 3]),
        # a_1^2 - a_1 a_2 = 1 = 4 a_2^2 - a_1 a_2: a_1 = 2 a_2 = sqrt 2; the norm is sqrt 2.
        (cs.NashMTL(max_norm=0), CONFLICT, [2**0.5, 0.5**0.5]),
        (cs.NashMTL(), CONFLICT, [1.0, 0.5]),
        (cs.AlignedMTL("min"), ORTHOGONAL, [0.5, 1.0]),
        (cs.AlignedMTL("median"), ORTHOGONAL, [0.5, 1.0]),
        (cs.AlignedMTL("rmse"), ORTHOGONAL, [2.5**0.5 / 2, 2.5**0.5]),
        # g_0 = (1, 1/2); all of the radius 0.4 sqrt(1.25) goes to the second, which gains less.
        (cs.CAGrad(0.4, rescale=0), ORTHOGONAL, [0.5, 0.5 + 0.4 * 1.25**0.5]),
        # Along g_0 by symmetry: |d| = 1 + c of it.
        (cs.CAGrad(0.4, rescale=0), torch.eye(2), [0.7, 0.7]),
        (cs.CAGrad(0.4, rescale=1), torch.eye(2), [0.7 / 1.16, 0.7 / 1.16]),
        (cs.CAGrad(0.4, rescale=2), torch.eye(2), [0.5, 0.5]),
        (cs.CAGrad(0.0), CONFLICT, [0.5, 0.5]),
    ],
    ids=repr,
)
def test_hand_computed_weights(
    backend: str, method: cs.GramianMethod, gramian: Tensor, expected: list[float]
) -> None:
    expected_weights = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(method.weights(gramian), expected_weights, rtol=1e-8, atol=1e-8)


DETERMINISTIC = [method for method in GRAMIAN_METHODS if not isinstance(method, cs.PCGrad)]
DETERMINISTIC += [cs.MGDA("l2"), cs.AlignedMTL("median"), cs.AlignedMTL("rmse")]


def _random_rows(tasks: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tasks, tasks + 4, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("tasks", [1, 2, 5] if SMALL else [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("method", DETERMINISTIC, ids=repr)
def test_permuting_tasks_permutes_weights(
    backend: str, method: cs.GramianMethod, tasks: int
) -> None:
    rows = _random_rows(tasks, tasks)
    order = torch.randperm(tasks)
    direct = method.weights(rows @ rows.T)
    permuted = method.weights(rows[order] @ rows[order].T)
    torch.testing.assert_close(permuted, direct[order], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rank", ["full", "half"])
@pytest.mark.parametrize("tasks", [6] if SMALL else [6, 40])
@pytest.mark.parametrize("method", [cs.PCGrad(), *DETERMINISTIC], ids=repr)
def test_updates_of_many_tasks(
    backend: str, method: cs.GramianMethod, tasks: int, rank: str
) -> None:
    """Equal to the reference's. An update that should be zero is as long as the ridge's root."""
    generator = torch.Generator().manual_seed(tasks)
    elements = 4 * tasks if rank == "full" else tasks // 2 + 1
    rows = torch.randn(tasks, elements, dtype=torch.float64, generator=generator)
    gramian = rows @ rows.T
    with cs.use_backend("reference"):
        expected = method.weights(gramian) @ rows
    update = method.weights(gramian) @ rows
    scale = float(method.weights(gramian).abs() @ rows.norm(dim=1))
    bound = 1e-9 if rank == "full" else 1e-5
    torch.testing.assert_close(update, expected, rtol=0, atol=bound * scale)


@pytest.mark.parametrize("rank", [1] if SMALL else [1, 2])
@pytest.mark.parametrize("method", [cs.UPGrad(), cs.MGDA(), cs.CAGrad(1.0)], ids=repr)
def test_rounded_gramians_of_dependent_gradients(
    backend: str, method: cs.GramianMethod, rank: int
) -> None:
    """In float32, they are not positive semidefinite, by more than the ridge."""
    for seed in range(2 if SMALL else 20):
        rows = torch.randn(3 if SMALL else 5, rank, generator=torch.Generator().manual_seed(seed))
        update = method.weights(rows @ rows.T).float() @ rows
        assert update.isfinite().all()
        assert update.norm() <= 10 * rows.norm()


@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e15])
@pytest.mark.parametrize("method", [cs.PCGrad(), *DETERMINISTIC], ids=repr)
def test_scaling_all_gradients(backend: str, method: cs.GramianMethod, scale: float) -> None:
    """The weights stay: the update scales. Nash-MTL's, whose norm is fixed, scale inversely."""
    rows = _random_rows(4, 0)
    direct = method.weights(rows @ rows.T)
    scaled = method.weights((scale * rows) @ (scale * rows).T)
    if isinstance(method, cs.NashMTL):
        scaled = scaled * scale
    torch.testing.assert_close(scaled, direct, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4 if SMALL else 20))
@pytest.mark.parametrize(
    "method", [cs.UPGrad(), cs.MGDA(), cs.MGDA("l2"), cs.NashMTL(), cs.CAGrad(1.0)], ids=repr
)
def test_update_in_conflict_with_no_task(backend: str, method: cs.GramianMethod, seed: int) -> None:
    """These methods promise it; MGDA with normalized gradients, for the normalized ones."""
    rows = _random_rows(2 + seed % 6, seed)
    assert method.weights(rows @ rows.T).isfinite().all()
    if getattr(method, "normalize", None) == "l2":
        rows = rows / rows.norm(dim=1, keepdim=True)
    update = method.weights(rows @ rows.T) @ rows
    assert (rows @ update).min() >= -1e-8 * rows.norm() * update.norm()


def test_impartial_and_bargaining_ignore_lengths(backend: str) -> None:
    """IMTL-G's direction and Nash-MTL's update do not change when one gradient is scaled."""
    rows = _random_rows(3, 1)
    longer = rows * torch.tensor([[1.0], [1e3], [1.0]], dtype=torch.float64)
    for method in (cs.NashMTL(), cs.IMTLG()):
        updates = [method.weights(r @ r.T) @ r for r in (rows, longer)]
        if isinstance(method, cs.IMTLG):
            updates = [update / update.norm() for update in updates]
        torch.testing.assert_close(*updates, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (cs.PCGrad(), 1.0),
        (cs.CAGrad(rescale=0), 1 / 3),
        (cs.MGDA(), 1 / 3),
        (cs.UPGrad(), 1 / 3),
        (cs.NashMTL(), 0.0),
        (cs.IMTLG(), 0.0),
        (cs.AlignedMTL(), 1.0),
    ],
    ids=repr,
)
def test_gradients_of_zero(backend: str, method: cs.GramianMethod, expected: float) -> None:
    """The documented weights, finite ones, where there is nothing to solve."""
    weights = method.weights(torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.full((3,), expected, dtype=torch.float64))


def test_one_gradient_of_zero(backend: str) -> None:
    gramian = torch.diag(torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64))
    assert cs.MGDA().weights(gramian).tolist() == [0.0, 1.0, 0.0]
    assert cs.NashMTL().weights(gramian)[1] == 0
    assert cs.IMTLG().weights(gramian)[1] == 0
    assert cs.PCGrad().weights(gramian).tolist() == [1.0, 1.0, 1.0]
    for method in DETERMINISTIC:
        assert method.weights(gramian).isfinite().all()


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("method", [cs.PCGrad(), *DETERMINISTIC], ids=repr)
def test_degenerate_gramians_give_finite_weights(
    backend: str, method: cs.GramianMethod, scale: float
) -> None:
    opposed = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    equal = torch.ones(4, 3)
    line = torch.tensor([[1.0], [-2.0], [3.0], [1e-15], [1e15]])
    cancelling = torch.tensor([[1.0, 0.0], [-0.5, 3**0.5 / 2], [-0.5, -(3**0.5) / 2]])
    for rows in (opposed, equal, line, cancelling, opposed[:1]):
        rows = scale * rows.double()
        weights = method.weights(rows @ rows.T)
        assert weights.isfinite().all()
        assert (weights @ rows).isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("method", [cs.PCGrad(), *DETERMINISTIC], ids=repr)
def test_what_is_not_finite_reaches_the_weights(
    backend: str, method: cs.GramianMethod, wrong: float
) -> None:
    gramian = torch.eye(3, dtype=torch.float64)
    gramian[1, 1] = wrong
    assert method.weights(gramian).isnan().all()


@pytest.mark.parametrize("method", DETERMINISTIC, ids=repr)
def test_several_gramians_at_once(backend: str, method: cs.GramianMethod) -> None:
    rows = torch.randn(5, 3, 7, dtype=torch.float64)
    together = method.weights(rows @ rows.mT)
    one_by_one = torch.stack([method.weights(r @ r.T) for r in rows])
    torch.testing.assert_close(together, one_by_one, rtol=1e-9, atol=1e-12)


def test_pcgrad_orders(backend: str) -> None:
    """They change with the step and the seed; a step always has the same ones."""
    rows = _random_rows(8, 3) - 0.5
    gramian = rows @ rows.T
    method = cs.PCGrad(seed=1)
    first = method.weights(gramian)
    second = method.weights(gramian, cs.Step(number=1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, cs.PCGrad(seed=2).weights(gramian))
    assert torch.equal(method.weights(gramian, cs.Step(number=0)), first)
    assert torch.equal(cs.PCGrad(seed=1).weights(gramian, cs.Step(number=1)), second)


def test_pcgrad_orders_with_a_counter(backend: str) -> None:
    """Those of step plus counter, for several Gramians too."""
    rows = torch.stack([_random_rows(8, 3) - 0.5, _random_rows(8, 3) - 0.3])
    solve = torch.ops.cs_kernels.pcgrad_weights
    expected = solve(rows @ rows.mT, 1, 7)
    for step, counter in ((2, 5), (0, 7), (9, -2), (7, 0)):
        assert torch.equal(solve(rows @ rows.mT, 1, step, torch.tensor([counter])), expected)
    assert not torch.equal(solve(rows @ rows.mT, 1, 7, torch.tensor([1])), expected)


def test_pcgrad_orders_are_uniform() -> None:
    """Every order of three others turns up equally often, for every task."""
    counts: dict[tuple[int, ...], int] = {}
    for step in range(4000):
        for i in range(4):
            order = pcgrad_order(splitmix64(random_key(0, step)), 4, i)
            relative = tuple((j - i) % 4 for j in order)
            counts[relative] = counts.get(relative, 0) + 1
    assert len(counts) == 6
    expected = 16000 / 6
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < 20.5  # exceeded by one in a thousand, at 5 degrees of freedom


@pytest.mark.parametrize(("tasks", "rank"), [(5, 1), (16, 9), (64, 33)])
def test_nash_mtl_of_dependent_gradients(backend: str, tasks: int, rank: int) -> None:
    """It is solved up to the ridge, though it takes weights of a hundred thousand."""
    factors = torch.randn(tasks, rank, dtype=torch.float64)
    rows = factors @ torch.randn(rank, 3 * tasks, dtype=torch.float64)
    gramian = rows @ rows.mT
    weights = cs.NashMTL(max_norm=0).weights(gramian)
    lengths = gramian.diagonal().sqrt()
    ridge = NASH_RIDGE * (weights * lengths).square()
    assert (weights > 0).all()
    assert (weights * (gramian @ weights) + ridge - 1).abs().max() < 1e-3


def test_nash_keeps_weights() -> None:
    """Weights are kept for `update_every` steps; those of an overflow are not."""
    method = cs.NashMTL(update_every=2, max_norm=0)
    steps = [cs.Step(number, ("a", "b")) for number in range(8)]
    first = method.weights(CONFLICT, steps[0])
    assert torch.equal(method.weights(2 * CONFLICT, steps[1]), first)
    assert not torch.equal(method.weights(2 * CONFLICT, steps[2]), first)
    kept = method.weights(CONFLICT, steps[3])
    assert method.weights(torch.full_like(CONFLICT, math.inf), steps[4]).isnan().all()
    assert torch.equal(method.weights(CONFLICT, steps[5]), kept)
    fresh = method.weights(torch.eye(3).double(), cs.Step(6, ("a", "b", "c")))
    assert fresh.shape == (3,)
    resumed = cs.NashMTL(update_every=2, max_norm=0)
    resumed.load_state_dict(method.state_dict())
    for other in (resumed, method):
        again = other.weights(4 * torch.eye(3).double(), cs.Step(7, ("a", "b", "c")))
        assert torch.equal(again, fresh)


def test_nash_keeps_no_weights_of_other_tasks() -> None:
    """Other tasks get weights of their own, even if their number is the same."""
    method = cs.NashMTL(update_every=4, max_norm=0)
    gramians = torch.diag_embed(torch.tensor([[1.0, 4.0], [9.0, 25.0]]).double())
    method.weights(gramians[0], cs.Step(0, ("a", "b")))
    second = method.weights(gramians[1], cs.Step(1, ("b", "c")))
    torch.testing.assert_close(second, torch.tensor([1 / 3, 1 / 5]).double())


def test_nash_mtl_of_other_layers() -> None:
    """Other layers get weights of their own, even if their number is the same."""
    method = cs.NashMTL(update_every=4, max_norm=0, groups="layer")
    gramians = torch.diag_embed(torch.tensor([[[1.0, 4.0]], [[9.0, 25.0]]]).double())
    method.weights(gramians[0], cs.Step(0, ("a", "b"), layers=("first",)))
    second = method.weights(gramians[1], cs.Step(1, ("a", "b"), layers=("second",)))
    torch.testing.assert_close(second, torch.tensor([[1 / 3, 1 / 5]]).double())


@pytest.mark.parametrize("tasks", [2, 3])
def test_opposed_gradients_of_16_bits(backend: str, tasks: int) -> None:
    """Rounding makes their Gramian indefinite: a cosine is below -1, by more than Nash's ridge."""
    gramian = torch.eye(tasks, dtype=torch.float64) * 2072.0
    gramian[:2, :2] = torch.tensor(
        [[2071.9355775117874, -2071.9355770349503], [-2071.9355770349503, 2071.9355759620667]]
    )
    methods = [cs.NashMTL(), cs.CAGrad(), cs.MGDA(), cs.UPGrad(), cs.IMTLG(), cs.AlignedMTL()]
    for method in methods:
        assert method.weights(gramian).isfinite().all(), method
    assert (cs.NashMTL().weights(gramian) > 0).all()
