"""`Protect`: closed forms, laws, levels, and batches with labels for some tasks."""

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch
from networks import flat_grad, gradient_rows, optimizer_of
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.kernel

NAMES = "pqrstuv"


def _rows(tasks: int, seed: int) -> Tensor:
    """Gradients whose lengths differ by up to six orders of magnitude."""
    noise = torch.Generator().manual_seed(seed)
    rows = torch.randn(tasks, tasks + 3, generator=noise, dtype=torch.float64)
    exponents = 6 * torch.rand(tasks, 1, generator=noise, dtype=torch.float64) - 3
    return rows * 10**exponents


def _update(method: cs.GramianMethod, rows: Tensor, names: str = NAMES) -> Tensor:
    step = cs.Step(0, tuple(names[: len(rows)]))
    return method.weights(rows @ rows.mT, step).to(rows.dtype) @ rows


def _projected(z: Tensor, constraints: Tensor) -> Tensor:
    """The conflict-free vector nearest to z, found by enumerating the active constraints."""
    units = constraints / constraints.norm(dim=1, keepdim=True)
    found = []
    for size in range(len(units) + 1):
        for active in combinations(units, size):
            x = z
            if size:
                a = torch.stack(active)
                x = z - a.mT @ torch.linalg.lstsq(a @ a.mT, (a @ z).unsqueeze(1)).solution[:, 0]
            if (units @ x).min() >= -1e-9 * z.norm():
                found.append(x)
    return min(found, key=lambda x: float((x - z).norm()))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("constraint_only", [False, True])
def test_one_protected_task(backend: str, seed: int, constraint_only: bool) -> None:
    rows = _rows(2 + seed % 3, seed)
    g, z = rows[0], rows[1:].sum(0)
    expected = z - torch.clamp(z @ g, max=0) / (g @ g) * g
    expected = expected if constraint_only else expected + g
    update = _update(cs.Protect("p", constraint_only=constraint_only), rows)
    assert (update - expected).norm() <= 1e-12 * max(float(z.norm()), float(g.norm()))


@pytest.mark.parametrize("seed", range(12))
def test_several_protected_tasks(backend: str, seed: int) -> None:
    protected = 2 + seed % 3
    rows = _rows(protected + 1 + seed % 2, seed)
    z = rows[protected:].sum(0)
    expected = _projected(z, rows[:protected])
    update = _update(cs.Protect(*NAMES[:protected], constraint_only=True), rows)
    assert (update - expected).norm() <= 1e-9 * z.norm()
    assert (rows[:protected] @ update >= -1e-9 * rows[:protected].norm(dim=1) * z.norm()).all()
    both = _update(cs.Protect(*NAMES[:protected]), rows)
    torch.testing.assert_close(both, update + rows[:protected].sum(0))


@pytest.mark.parametrize("seed", range(8))
def test_levels(backend: str, seed: int) -> None:
    """Each level is projected off all levels above it, whatever the order of the tasks."""
    rows = _rows(5, seed)
    expected = rows[0] + _projected(rows[1] + rows[2], rows[:1]) + _projected(rows[4], rows[:4])
    expected = expected + _projected(rows[3], rows[:3])
    method = cs.Protect("p", levels={"q": 1, "r": 1, "s": 5})
    update = _update(method, rows)
    assert (update - expected).norm() <= 1e-9 * rows.norm()
    order = [3, 0, 4, 2, 1]
    permuted = _update(method, rows[order], "".join(NAMES[i] for i in order))
    torch.testing.assert_close(permuted, update, rtol=1e-9, atol=1e-9 * float(rows.norm()))


def test_without_conflict_nothing_is_projected(backend: str) -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -3.0]], dtype=torch.float64)
    step = cs.Step(0, ("p", "q", "r"))
    assert cs.Protect("p").weights(rows @ rows.mT, step).tolist() == [1.0, 1.0, 1.0]
    only = cs.Protect("p", constraint_only=True).weights(rows @ rows.mT, step)
    assert only.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_direction_of_the_projection_ignores_the_scale_of_the_others(
    backend: str, scale: float
) -> None:
    method = cs.Protect("p", "q", constraint_only=True)
    for seed in range(4):
        rows = _rows(4, seed)
        scaled = torch.cat([rows[:2], rows[2:] * scale])
        torch.testing.assert_close(_update(method, scaled) / scale, _update(method, rows))


OPPOSED = [[1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (OPPOSED, [2.0, 1.0]),
        ([[0.0, 0.0], [-1.0, 0.0]], [1.0, 1.0]),
        ([[1.0, 0.0], [0.0, 0.0]], [1.0, 1.0]),
        ([[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0]),
        ([[float("nan"), 0.0], [-1.0, 0.0]], [float("nan")] * 2),
        ([[1.0, 0.0], [float("inf"), 0.0]], [float("nan")] * 2),
    ],
)
def test_opposed_zero_and_non_finite_gradients(
    backend: str, rows: Sequence[Sequence[float]], expected: list[float]
) -> None:
    gradients = torch.tensor(rows, dtype=torch.float64)
    weights = cs.Protect("p").weights(gradients @ gradients.mT, cs.Step(0, ("p", "q")))
    torch.testing.assert_close(weights.tolist(), expected, rtol=1e-11, atol=0, equal_nan=True)


def test_batches_with_labels_for_some_tasks() -> None:
    """Without a protected gradient, nothing is projected; a protected one alone is the update."""
    torch.manual_seed(0)
    trunk, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    targets = {"p": 1.0, "q": -1.0, "r": -2.0}
    opt = optimizer_of(trunk, cs.Protect("p"), tasks=[*targets])

    def loss(task: str) -> Tensor:
        return (trunk(x) - targets[task]).square().mean()

    for tasks in ("p", "qr", "pq", "pqr"):
        rows = gradient_rows([*trunk.parameters()], map(loss, tasks))
        z = rows["p" in tasks :].sum(0)
        expected = rows[0] + _projected(z, rows[:1]) if "p" in tasks else z
        opt.step(loss, tasks=list(tasks))
        torch.testing.assert_close(flat_grad(trunk), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cs.Protect(), r"tasks must name a protected task, got \(\) and levels=None"),
        (lambda: cs.Protect(levels={"a": 1}), r"got \(\) and levels=\{'a': 1\}"),
        (lambda: cs.Protect("a", "a"), r"tasks must be distinct, got 'a' twice in \['a', 'a'\]"),
        (lambda: cs.Protect(["a"]), r"tasks must be names, as in Protect\('a', 'b'\), got \['a'\]"),
        (
            lambda: cs.Protect("a", levels={"a": 1}),
            "not contain 'a', which is already among the protected tasks, got level 1 for it",
        ),
        (lambda: cs.Protect("a", levels={"b": -1}), r"levels\['b'\] must be at least 0, got -1"),
        (lambda: cs.Protect("a", levels={"b": 0.5}), r"levels\['b'\] must be an integer, got 0.5"),
        (lambda: cs.Protect("a", levels={1: 1}), "levels must have names of tasks as keys, got 1"),
        (lambda: cs.SAGO(["a"]), r"task must be a name, as in SAGO\('retain'\), got \['a'\]"),
        (lambda: cs.SAGO("a").check(["b", "c"]), r"name a task among \['b', 'c'\], got 'a'"),
        (lambda: cs.SAGO("a").check(["a"]), "needs at least one task besides 'a'"),
        (lambda: cs.Protect("a", levels=["b"]), r"mapping from task to level, got \['b'\]"),
        (lambda: cs.Protect("a", constraint_only=2), "constraint_only must be True or False"),
        (lambda: cs.Protect("a").check(["b", "c"]), r"name tasks among \['b', 'c'\], got 'a'"),
        (
            lambda: cs.Protect("a", "b").check(["a", "b"]),
            "must leave at least one task unprotected",
        ),
        (lambda: cs.Protect("a").weights(torch.eye(2)), "must be a Step with the tasks' names"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_repr_gives_an_equal_method() -> None:
    for method in (
        cs.Protect("a", "b"),
        cs.Protect("a", levels={"c": 2}, constraint_only=True, groups="layer", update_every=4),
    ):
        assert repr(eval(repr(method), {"Protect": cs.Protect})) == repr(method)
    assert repr(cs.Protect("a", groups="layer")) == "Protect('a', groups='layer')"


def test_a_method_that_replaces_another_is_checked() -> None:
    opt = optimizer_of(nn.Linear(3, 2), cs.Protect("a"))
    for method, message in (
        (cs.Protect("c"), r"name tasks among \['a', 'b'\], got 'c'"),
        (cs.ConnectionStrength(), "trunk must have task-specific normalization"),
        (cs.Protect, r"method must be a method such as cs.PCGrad\(\), got the class Protect"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            opt.method = method
    assert repr(opt.method) == "Protect('a')"


def test_a_method_replaces_another_between_steps_alone() -> None:
    torch.manual_seed(0)
    trunk, x = nn.Linear(3, 2), torch.randn(4, 3)
    opt = optimizer_of(trunk, cs.Protect("a", update_every=9))

    def losses() -> dict[str, Tensor]:
        y = trunk(x)
        return {"a": y.square().mean(), "b": -y.mean()}

    opt.backward(losses(), update=False)
    with pytest.raises(RuntimeError, match="method must not change while gradients of backward"):
        opt.method = cs.Protect("b")
    opt.backward(losses())
    opt.optimizer.step()
    opt.method = cs.Protect("b", update_every=9)
    rows = gradient_rows([*trunk.parameters()], losses().values()).double()
    opt.backward(losses())
    expected = (rows[1] + _projected(rows[0], rows[1:])).float()
    torch.testing.assert_close(flat_grad(trunk), expected, rtol=1e-4, atol=1e-6)


def test_a_gramian_in_float32() -> None:
    gramian, step = torch.tensor([[4.0, -2.0], [-2.0, 9.0]]), cs.Step(0, ("p", "q"))
    assert cs.Protect("p").weights(gramian, step).tolist() == pytest.approx([1.5, 1.0], rel=1e-6)
