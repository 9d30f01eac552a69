"""Task weights from Gramians on every backend: known values, laws, and states of methods."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from layers import SMALL
from networks import GRAMIAN_METHODS
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

import cs_kernels as cs
from cs_kernels import GramianMethod
from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.ops.reference.solvers import random_order
from cs_kernels.ops.solvers import NASH_RIDGE

pytestmark = pytest.mark.kernel

CONFLICT = torch.tensor([[1.0, -1.0], [-1.0, 4.0]], dtype=torch.float64)
ORTHOGONAL = torch.diag(torch.tensor([4.0, 1.0], dtype=torch.float64))
ZEROS = torch.zeros(3, 3, dtype=torch.float64)
ONE_ZERO = torch.diag(torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64))

_ops = torch.ops.cs_kernels


@pytest.mark.parametrize(
    ("method", "gramian", "expected"),
    [
        # g_1 = (1, 0) and g_2 = (-1, sqrt 3): projection adds g_j / |g_j|^2 to the other gradient.
        (cs.PCGrad(), CONFLICT, [2.0, 1.25]),
        (cs.PCGrad("mean"), CONFLICT, [1.0, 0.625]),
        (cs.UPGrad(), CONFLICT, [1.0, 0.625]),
        # The shortest w_1 g_1 + w_2 g_2 is orthogonal to g_2 - g_1: w_1 = (4 + 1) / 7.
        (cs.MGDA(), CONFLICT, [5 / 7, 2 / 7]),
        (cs.MGDA("l2"), CONFLICT, [0.5, 0.5]),
        # G v = (1, 2) has the solution v = (2, 1).
        (cs.IMTLG(), CONFLICT, [2 / 3, 1 / 3]),
        # a_1^2 - a_1 a_2 = 1 = 4 a_2^2 - a_1 a_2: a_1 = 2 a_2 = sqrt 2; the norm is sqrt 2.
        (cs.NashMTL(max_norm=0), CONFLICT, [2**0.5, 0.5**0.5]),
        (cs.NashMTL(), CONFLICT, [1.0, 0.5]),
        (cs.AlignedMTL("min"), ORTHOGONAL, [0.5, 1.0]),
        (cs.AlignedMTL("median"), ORTHOGONAL, [0.5, 1.0]),
        (cs.AlignedMTL("rmse"), ORTHOGONAL, [2.5**0.5 / 2, 2.5**0.5]),
        # g_0 = (1, 1/2); all of the radius 0.4 sqrt(1.25) goes to task 2, which gains less.
        (cs.CAGrad(0.4, rescale=0), ORTHOGONAL, [0.5, 0.5 + 0.4 * 1.25**0.5]),
        # By symmetry, the update is along g_0; its length is (1 + c) |g_0|.
        (cs.CAGrad(0.4, rescale=0), torch.eye(2), [0.7, 0.7]),
        (cs.CAGrad(0.4, rescale=1), torch.eye(2), [0.7 / 1.16, 0.7 / 1.16]),
        (cs.CAGrad(0.4, rescale=2), torch.eye(2), [0.5, 0.5]),
        (cs.CAGrad(0.0), CONFLICT, [0.5, 0.5]),
        # C a = 1 has the solution (2, 2), with |a_1 u_1 + a_2 u_2| = 2; the length is (1 + 2) times
        # the cosine, 1 / 2.
        (cs.ConFIG(), CONFLICT, [1.5, 0.75]),
        (cs.FairGrad(), CONFLICT, [2**0.5, 0.5**0.5]),
        (cs.NTKMTL(), CONFLICT, [5**0.5, 1.25**0.5]),
        # The cosine is -1/2: adding |g_i| / |g_j| of the other gradient makes it 1/2.
        (cs.GradVac(0.5), CONFLICT, [3.0, 1.5]),
        (cs.GradVac(), CONFLICT, [2.0, 1.25]),
        # Where there is nothing to solve, weights are finite, as documented.
        (cs.PCGrad(), ZEROS, [1.0] * 3),
        (cs.AlignedMTL(), ZEROS, [1.0] * 3),
        (cs.GradVac(0.5), ZEROS, [1.0] * 3),
        (cs.CAGrad(rescale=0), ZEROS, [1 / 3] * 3),
        (cs.MGDA(), ZEROS, [1 / 3] * 3),
        (cs.UPGrad(), ZEROS, [1 / 3] * 3),
        (cs.PCGrad(), ONE_ZERO, [1.0] * 3),
        (cs.MGDA(), ONE_ZERO, [0.0, 1.0, 0.0]),
        (cs.NashMTL(max_norm=0), ONE_ZERO, [0.5, 0.0, 1.0]),
        (cs.FairGrad(), ONE_ZERO, [0.5, 0.0, 1.0]),
        (cs.IMTLG(), ONE_ZERO, [1 / 3, 0.0, 2 / 3]),
        (cs.ConFIG(), ONE_ZERO, [0.75, 0.0, 1.5]),
        (cs.NTKMTL(), ONE_ZERO, [1.25**0.5, 0.0, 5**0.5]),
        *((cs.FairGrad(alpha), ZEROS, [0.0] * 3) for alpha in (2, 0.5)),
        *((method(), ZEROS, [0.0] * 3) for method in (cs.NashMTL, cs.IMTLG, cs.ConFIG, cs.NTKMTL)),
    ],
    ids=repr,
)
def test_hand_computed_weights(
    backend: str, method: GramianMethod, gramian: Tensor, expected: list[float]
) -> None:
    weights = method.weights(gramian)
    torch.testing.assert_close(weights, weights.new_tensor(expected), rtol=1e-8, atol=1e-8)


DRAWING = [cs.PCGrad(), cs.GradVac(0.3)]
DETERMINISTIC = [
    method
    for method in GRAMIAN_METHODS
    if not isinstance(method, cs.PCGrad | cs.GradVac | cs.DBMTL)  # DB-MTL needs losses.
]
DETERMINISTIC += [cs.MGDA("l2"), cs.AlignedMTL("median"), cs.AlignedMTL("rmse")]
DETERMINISTIC += [cs.FairGrad(0.25), cs.FairGrad(4)]

each_method = pytest.mark.parametrize("method", [*DRAWING, *DETERMINISTIC], ids=repr)
each_deterministic = pytest.mark.parametrize("method", DETERMINISTIC, ids=repr)


def _random_rows(tasks: int, seed: int, elements: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = tasks, tasks + 4 if elements is None else elements
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _weights(method: GramianMethod, rows: Tensor) -> Tensor:
    return method.weights(rows @ rows.mT)


def _update(method: GramianMethod, rows: Tensor) -> Tensor:
    return _weights(method, rows).to(rows.dtype) @ rows


@pytest.mark.each
@pytest.mark.parametrize("tasks", [1, 2, 5] if SMALL else [1, 2, 3, 5, 8, 16])
@each_deterministic
def test_permuted_tasks_and_several_gramians(
    backend: str, method: GramianMethod, tasks: int
) -> None:
    rows = torch.stack([_random_rows(tasks, seed) for seed in range(3)])
    order = torch.randperm(tasks)
    permuted = torch.stack([_weights(method, of_gramian[order]) for of_gramian in rows])
    torch.testing.assert_close(permuted, _weights(method, rows)[:, order], rtol=1e-6, atol=1e-8)


@pytest.mark.each
@pytest.mark.parametrize("rank", ["full", "half"])
@pytest.mark.parametrize("tasks", [6] if SMALL else [6, 40])
@each_method
def test_updates_of_many_tasks(backend: str, method: GramianMethod, tasks: int, rank: str) -> None:
    """Updates match the reference's; at half rank, only up to the square root of the ridge.

    This is the length of an update that is zero in theory.
    """
    rows = _random_rows(tasks, tasks, 4 * tasks if rank == "full" else tasks // 2 + 1)
    with cs.use_backend("reference"):
        expected = _update(method, rows)
    scale = float(_weights(method, rows).abs() @ rows.norm(dim=1))
    bound = 1e-9 if rank == "full" else 1e-5
    torch.testing.assert_close(_update(method, rows), expected, rtol=0, atol=bound * scale)


@pytest.mark.slow
@pytest.mark.parametrize("method", [cs.UPGrad(), cs.MGDA(), cs.CAGrad(1.0)], ids=repr)
def test_rounded_gramians_of_dependent_gradients(
    backend: str, method: GramianMethod, full: bool
) -> None:
    """Rounded to float32, such Gramians are indefinite by more than the ridge."""
    for seed in range(40 if full and not SMALL else 4):
        rows = _random_rows(3 if SMALL else 5, seed, 1 + seed % 2).float()
        assert _update(method, rows).norm() <= 10 * rows.norm()


@pytest.mark.each
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1e15])
@each_method
def test_scaling_all_gradients(backend: str, method: GramianMethod, scale: float) -> None:
    """Weights do not depend on the scale, except Nash-MTL's and FairGrad's, by definition."""
    rows = _random_rows(4, 0)
    direct, scaled = _weights(method, rows), _weights(method, scale * rows)
    if isinstance(method, cs.NashMTL):
        scaled = scaled * scale
    if isinstance(method, cs.FairGrad):  # s^2 G w = w^(-1 / alpha)
        scaled = scaled * scale ** (2 / (1 + 1 / method.alpha))
    torch.testing.assert_close(scaled, direct, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "method",
    [
        *(cs.UPGrad(), cs.MGDA(), cs.MGDA("l2"), cs.NashMTL(), cs.CAGrad(1.0), cs.ConFIG()),
        *(cs.FairGrad(0.25), cs.FairGrad(), cs.FairGrad(4)),
    ],
    ids=repr,
)
def test_update_in_conflict_with_no_task(backend: str, method: GramianMethod) -> None:
    """These methods guarantee such updates; MGDA with "l2" only for normalized gradients."""
    for seed in range(4 if SMALL else 12):
        rows = _random_rows(2 + seed % 6, seed)
        if getattr(method, "normalize", None) == "l2":
            rows = normalize(rows)
        update = _update(method, rows)
        assert (rows @ update).min() >= -1e-8 * rows.norm() * update.norm()


def test_impartial_and_bargaining_ignore_lengths(backend: str) -> None:
    """A gradient's length changes neither IMTL-G's and ConFIG's direction nor Nash-MTL's update."""
    rows = _random_rows(3, 1)
    longer = rows * torch.tensor([[1.0], [1e3], [1.0]], dtype=torch.float64)
    for method in (cs.NashMTL(), cs.IMTLG(), cs.ConFIG()):
        updates = torch.stack([_update(method, r) for r in (rows, longer)])
        if not isinstance(method, cs.NashMTL):
            updates = normalize(updates)
        torch.testing.assert_close(*updates, rtol=1e-6, atol=1e-9)


@each_method
def test_degenerate_gramians(backend: str, method: GramianMethod) -> None:
    """Weights are finite at many scales: a solver's overflows depend on a scale's last bits."""
    fast = backend in ("reference", "cpu") or torch.cuda.is_available()  # Others are interpreted.
    line, few = [[1.0], [-2.0], [3.0], [1e-15], [1e15]], [1e-15, 1.0, 1e15]
    many = [1e-18 * 1.48**n for n in range(0, 48, 2 if fast else 24)]
    cancelling = [[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]
    opposed, one_zero = [[1.0, 2.0], [-1.0, -2.0]], [[2.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    cases = [*product([opposed, opposed[:1], one_zero, 4 * [[1.0] * 3], line, cancelling], few)]
    cases += product([line], [*many, *(1 / scale for scale in many)])
    for rows, scale in cases:
        scaled = scale * torch.tensor(rows, dtype=torch.float64)
        weights = _weights(method, scaled)
        assert weights.isfinite().all(), (rows, scale)
        assert (weights @ scaled).isfinite().all(), (rows, scale)


@pytest.mark.each
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@each_method
def test_nan_and_inf_reach_the_weights(backend: str, method: GramianMethod, wrong: float) -> None:
    gramian = torch.eye(3, dtype=torch.float64)
    gramian[1, 1] = wrong
    assert method.weights(gramian).isnan().all()


@pytest.mark.parametrize("kind", [cs.PCGrad, partial(cs.GradVac, 0.3)], ids=["PCGrad", "GradVac"])
def test_orders(backend: str, kind: Callable[..., GramianMethod]) -> None:
    """Orders depend on the step and the seed; a step always has the same order."""
    rows = _random_rows(8, 3) - 0.5
    weights = {
        (seed, step): kind(seed=seed).weights(rows @ rows.T, cs.Step(step))
        for seed, step in product((1, 2), (0, 1))
    }
    assert len({tuple(w.tolist()) for w in weights.values()}) == 4
    assert torch.equal(kind(seed=1).weights(rows @ rows.T), weights[1, 0])
    # PCGrad equals GradVac with targets of zero.
    both = [one.weights(rows @ rows.T) for one in (cs.PCGrad(seed=1), cs.GradVac(0, seed=1))]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solver", ["pcgrad", "gradvac"])
def test_orders_with_a_counter(backend: str, solver: str) -> None:
    """A counter adds to the step; each of several Gramians has its own orders."""
    rows = torch.stack([_random_rows(8, 3) - 0.5, _random_rows(8, 3) - 0.3])
    gramians = rows @ rows.mT

    def solved(step: int, counter: int | None = None) -> Tensor:
        targets = (torch.full_like(gramians, 0.3), 0.1) if solver == "gradvac" else ()
        of_step = None if counter is None else torch.tensor([counter])
        weights: Tensor = getattr(_ops, f"{solver}_weights")(gramians, *targets, 1, step, of_step)
        return weights

    expected = solved(7)
    for step, counter in ((2, 5), (0, 7), (9, -2), (7, 0)):
        assert torch.equal(solved(step, counter), expected)
    assert not torch.equal(solved(7, 1), expected)
    with cs.use_backend("reference"):
        torch.testing.assert_close(solved(7), expected, rtol=1e-9, atol=1e-12)
    gramians = gramians[:1].repeat(2, 1, 1)
    assert not torch.equal(*solved(7))


def test_pcgrad_orders_are_uniform() -> None:
    """Seen from each task, all orders of the three others turn up about equally often."""
    counts = Counter(
        tuple((j - i) % 4 for j in random_order(splitmix64(random_key(0, step)), 4, i))
        for step in range(4000)
        for i in range(4)
    )
    assert len(counts) == 6
    expected = 16000 / 6
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < 20.5  # The 99.9th percentile with 5 degrees of freedom.


@pytest.mark.parametrize(("tasks", "rank"), [(5, 1), (16, 9)] if SMALL else [(5, 1), (64, 33)])
def test_dependent_gradients(backend: str, tasks: int, rank: int) -> None:
    """Nash-MTL solves up to the ridge, if need be with huge weights; FairGrad's update is short.

    The gradients for FairGrad add up to zero, so no direction is good for all tasks.
    """
    factors = torch.randn(tasks, rank, dtype=torch.float64)
    others = torch.randn(rank, 3 * tasks, dtype=torch.float64)
    gramian = (rows := factors @ others) @ rows.T
    weights = cs.NashMTL(max_norm=0).weights(gramian)
    ridge = NASH_RIDGE * weights.square() * gramian.diagonal()
    assert (weights > 0).all()
    assert (weights * (gramian @ weights) + ridge - 1).abs().max() < 1e-3
    rows = (factors - factors.mean(0)) @ others
    for alpha in (0.5, 2.0):
        weights = _weights(cs.FairGrad(alpha), rows)
        assert (weights > 0).all()
        assert (weights @ rows).norm() < 1e-3 * (weights @ rows.norm(dim=1))


@pytest.mark.parametrize("tasks", [2, 3])
def test_opposed_gradients_of_16_bits(backend: str, tasks: int) -> None:
    """Rounding makes the Gramian indefinite: a cosine is below -1 by more than Nash-MTL's ridge."""
    gramian = torch.eye(tasks, dtype=torch.float64) * 2072.0
    squares = torch.tensor([2071.9355775117874, 2071.9355759620667], dtype=torch.float64)
    gramian[:2, :2] = squares.diag()
    gramian[0, 1] = gramian[1, 0] = -2071.9355770349503
    for method in [*DRAWING, *DETERMINISTIC]:
        assert method.weights(gramian).isfinite().all(), method
    assert (cs.NashMTL().weights(gramian) > 0).all()


@pytest.mark.each
@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0] if SMALL else [1 / 16, 0.1, 0.5, 1, 2, 5, 10, 16])
@pytest.mark.parametrize("tasks", [2, 5] if SMALL else [2, 3, 8, 40])
def test_fair_grad_by_its_definition(backend: str, tasks: int, alpha: float) -> None:
    """G w and w^(-1 / alpha) agree to within 1e-8 of the terms of G w.

    They need not agree more closely: if gradients in conflict have very different lengths and alpha
    is small, gains are below the rounding of these terms. Odd seeds scale lengths by up to 1:100.
    """
    for seed in range(2 if SMALL else 8):
        rows = _random_rows(tasks, seed)
        if seed % 2:
            rows = rows * 10.0 ** torch.linspace(-1, 1, tasks, dtype=torch.float64).unsqueeze(1)
        gramian = rows @ rows.T
        weights = cs.FairGrad(alpha).weights(gramian)
        assert weights.min() > 0
        ridge = NASH_RIDGE * gramian.diagonal() * weights  # Part of the definition.
        error = gramian @ weights + ridge - weights ** (-1 / alpha)
        assert (error.abs() / (gramian.abs() @ weights)).max() < 1e-8


def test_fair_grad_between_the_sum_and_the_least_gain(backend: str) -> None:
    """The least gain grows with alpha."""
    rows = _random_rows(4, 2) + torch.tensor(0.5)
    rows *= torch.tensor([[10.0], [3.0], [1.0], [0.3]], dtype=torch.float64)

    def gain(update: Tensor) -> float:
        """The least gain, relative to the update's length."""
        return float((rows @ update).min() / update.norm())

    updates = [_update(cs.FairGrad(alpha), rows) for alpha in (1 / 16, 0.5, 1, 4, 16)]
    gains = [gain(update) for update in updates]
    assert gains == sorted(gains)
    assert cosine_similarity(updates[0], rows.sum(0), dim=0) > 0.95
    assert gains[-1] > 0.9 * gain(_update(cs.MGDA(), rows))  # MGDA's is the largest.


def test_config_has_equal_cosines(backend: str) -> None:
    """The update's length is the sum of the gradients' components along it."""
    for seed in range(4):
        rows = _random_rows(3 + seed, seed)
        update = _update(cs.ConFIG(), rows)
        along = rows @ update / update.norm()
        cosines = along / rows.norm(dim=1)
        torch.testing.assert_close(cosines, cosines[:1].expand(len(rows)), rtol=1e-8, atol=0)
        torch.testing.assert_close(update.norm(), along.sum(), rtol=1e-8, atol=0)


def test_config_without_a_common_direction(backend: str) -> None:
    """The update is zero if gradients cancel; otherwise, it has the least-squares direction."""
    angles = torch.arange(3, dtype=torch.float64) * (2 * math.pi / 3)
    cancelling = torch.stack([angles.cos(), angles.sin()], 1)
    for rows in (cancelling, torch.tensor([[1.0, 2.0], [-2.0, -4.0]]).double()):
        assert not _weights(cs.ConFIG(), rows).any()
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]).double()
    direction = normalize(torch.linalg.pinv(normalize(rows)).sum(1), dim=0)
    expected = (rows @ direction).sum() * direction
    torch.testing.assert_close(_update(cs.ConFIG(), rows), expected)


def _step(number: int = 0, **losses: float) -> cs.Step:
    weighted = {task: torch.tensor(loss) for task, loss in losses.items()}
    return cs.Step(number, tuple(losses), weighted_losses=weighted)


def test_db_mtl_by_hand() -> None:
    """The gradients of log losses have lengths 1/2 and 2: both are scaled to 2."""
    method, step = cs.DBMTL(), _step(a=2.0, b=1.0)
    expected = torch.tensor([2.0, 1.0]).double()
    weights = method.weights(torch.stack([CONFLICT, 4 * CONFLICT, ZEROS[:2, :2]]), step)
    torch.testing.assert_close(weights, torch.stack([expected, expected, 0 * expected]))
    # Multiplying a loss by a number changes nothing: its gradient is multiplied, too.
    scaled = CONFLICT * torch.tensor([[9.0, 3.0], [3.0, 1.0]])
    updates = method.weights(scaled, _step(a=6.0, b=1.0)) * torch.tensor([3.0, 1.0])
    torch.testing.assert_close(updates, expected)
    assert method.weights(CONFLICT, _step(a=-1.0, b=1.0)).isnan().all()
    assert method.weights(CONFLICT * math.nan, step).isnan().all()
    with pytest.raises(ValueError, match=r"must be a Step with losses for DBMTL\(\), got None"):
        method.weights(CONFLICT)


def test_gradvac_follows_the_cosines(backend: str) -> None:
    """The second step's target is half of the first step's cosine, -1/2."""
    method = cs.GradVac(beta=0.5)
    added = 0.5 - 0.25 * (0.75 / (1 - 0.25**2)) ** 0.5
    for number, expected in enumerate([[2.0, 1.25], [1 + 2 * added, 1 + added / 2]]):
        weights = method.weights(CONFLICT, _step(number, a=1.0, b=1.0))
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))
    targets = method.state_dict()["targets"]
    torch.testing.assert_close(targets, torch.tensor([[[0.0, -0.375], [-0.375, 0.0]]]).double())
    overflow = torch.full((2, 2), math.inf).double()
    assert method.weights(overflow, _step(2, a=1.0, b=1.0)).isnan().all()
    assert torch.equal(method.state_dict()["targets"], targets)


def test_gradvac_keeps_targets_of_absent_tasks(backend: str) -> None:
    """Each pair of tasks has one target per layer, whichever steps contain the pair."""
    rows = torch.randn(6, 2, 3, 7, dtype=torch.float64)
    method, kept = cs.GradVac(beta=0.3, groups="layer"), defaultdict[tuple[str, ...], float](float)
    steps = ["ab x", "abc xy", "ca y", "bc yx", "abc xy", "ab y"]
    for number, (tasks, layers) in enumerate(map(str.split, steps)):
        of_step = rows[number, [*map("xy".index, layers)]][:, [*map("abc".index, tasks)]]
        gramian = of_step @ of_step.mT
        places = list(product(layers, tasks, tasks))
        targets = torch.tensor([kept[p] for p in places], dtype=torch.float64).view_as(gramian)
        expected = _ops.gradvac_weights(gramian, targets, 0.3, 0, number)
        kept.update(zip(places, targets.flatten().tolist(), strict=True))
        resumed = cs.GradVac(beta=0.3, groups="layer")
        resumed.load_state_dict(method.state_dict())
        for one in (resumed, method):
            step = cs.Step(number, tuple(tasks), layers=tuple(layers))
            assert torch.equal(one.weights(gramian, step), expected)
    state = method.state_dict()
    places = product(state["layers"], state["tasks"], state["tasks"])
    assert state["targets"].flatten().tolist() == [kept[place] for place in places]
    with pytest.raises(ValueError, match="state must have groups='all', got 'layer'"):
        cs.GradVac(beta=0.3).check_state(state, state["tasks"])


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_gradvac_of_equal_gradients(backend: str, beta: float) -> None:
    """Targets reach one; differences in the last bits do not change the weights."""
    rows = torch.ones(3, 4, dtype=torch.float64)
    method = cs.GradVac(beta=beta)
    for number in range(30):
        noise = 1e-15 * torch.randn(3, 4, dtype=torch.float64)
        weights = method.weights((rows + noise) @ (rows + noise).T, _step(number, a=1, b=1, c=1))
        torch.testing.assert_close(weights, torch.ones(3).double())
