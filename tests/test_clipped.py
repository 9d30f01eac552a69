"""Clipping each task's gradient before surgery: against a plain loop, in every kind of step."""

from collections.abc import Callable, Sequence

import pytest
import torch
from networks import flat_grad
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

TASKS = ["a", "b"]


class Problem:
    """Two linear layers and a head per task, in float64; the tasks are in conflict."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)]
        self.trunk = nn.Sequential(*layers).double()
        self.heads = nn.ModuleDict({task: nn.Linear(4, 1) for task in TASKS}).double()
        self.x = torch.randn(6, 5, dtype=torch.float64)
        self.sgd = torch.optim.SGD([*self.trunk.parameters(), *self.heads.parameters()], lr=0.1)

    def loss(self, task: str, z: Tensor | None = None) -> Tensor:
        y = self.heads[task](self.trunk(self.x) if z is None else z)
        return 50 * (y - 1).square().mean() if task == "a" else (y + 1).square().mean()

    def opt(self, method: cs.Method) -> cs.MultiTaskOptimizer:
        return cs.MultiTaskOptimizer(self.trunk, self.sgd, TASKS, method)

    def gradients(self, of: Sequence[Tensor], z: Tensor | None = None) -> list[Tensor]:
        """One flat gradient per task."""
        losses = [self.loss(task, z) for task in TASKS]
        rows = [torch.autograd.grad(loss, of, retain_graph=True) for loss in losses]
        return [torch.cat([g.flatten() for g in row]) for row in rows]


def clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    return [g * min(1.0, limit / float(g.norm())) for g in gradients]


def pcgrad(gradients: Sequence[Tensor]) -> Tensor:
    """PCGrad for two tasks, where the order of the projections does not matter."""
    a, b = gradients
    dot = torch.dot(a, b)
    if dot >= 0:
        return a + b
    return a - dot / b.dot(b) * b + b - dot / a.dot(a) * a


METHODS: dict[str, tuple[Callable[[], cs.Method], Callable[[Sequence[Tensor]], Tensor]]] = {
    "PCGrad": (cs.PCGrad, pcgrad),
    "Sum": (cs.Sum, lambda gradients: sum(gradients[1:], gradients[0])),
}


@pytest.mark.parametrize("way", ["step", "backward", "features"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("limit", [0.3, 1e9])
def test_the_update_of_clipped_gradients(name: str, way: str, limit: float) -> None:
    problem = Problem()
    make, combined = METHODS[name]
    opt = problem.opt(cs.Clipped(make(), limit))
    shared = [*problem.trunk.parameters()]
    if way == "features":
        z = problem.trunk(problem.x)
        of_z = combined(clipped(problem.gradients([z], z), limit)).view_as(z)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(z, shared, of_z)])
        z = problem.trunk(problem.x)
        opt.backward({task: problem.loss(task, z) for task in TASKS}, features=z)
    else:
        gradients = problem.gradients(shared)
        assert torch.dot(*gradients) < 0
        assert min(float(g.norm()) for g in gradients) > 0.3
        expected = combined(clipped(gradients, limit))
        if way == "step":
            opt.step(problem.loss)
        else:
            z = problem.trunk(problem.x)
            opt.backward({task: problem.loss(task, z) for task in TASKS})
    torch.testing.assert_close(flat_grad(problem.trunk), expected, rtol=1e-10, atol=1e-13)


def test_reports_have_norms_from_before_clipping() -> None:
    problem = Problem()
    opt = problem.opt(cs.Clipped(cs.Sum(), 0.5))
    norms = [float(g.norm()) for g in problem.gradients([*problem.trunk.parameters()])]
    opt.step(problem.loss)
    scalars = opt.report().scalars()
    assert [scalars[f"gradient_norm/{task}"] for task in TASKS] == pytest.approx(norms)
    assert [scalars[f"task_weight/{task}"] for task in TASKS] == pytest.approx(
        [min(1.0, 0.5 / norm) for norm in norms]
    )
    assert scalars["update_norm"] == pytest.approx(float(flat_grad(problem.trunk).norm()))


def test_by_layer_each_module_is_clipped() -> None:
    """`step` and `step_together` clip alike, here with task-specific normalization."""
    limit = 0.05

    def trained(together: bool) -> tuple[Tensor, nn.Module, list[Tensor]]:
        torch.manual_seed(1)
        trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).double()
        cs.nn.convert_task_batchnorm(trunk, TASKS)
        sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
        method = cs.Clipped(cs.PCGrad(groups="layer"), limit)
        opt = cs.MultiTaskOptimizer(trunk, sgd, TASKS, method)
        x = torch.randn(4, 3, 8, 8, dtype=torch.float64)

        def loss(task: str, y: Tensor) -> Tensor:
            return (y - (2 if task == "a" else -1)).square().mean()

        layers = [[*trunk[i].parameters()] for i in (0, 2)]
        expected = []
        for parameters in layers:
            rows = []
            for task in TASKS:
                with cs.nn.active_task(trunk, task):
                    rows.append(torch.autograd.grad(loss(task, trunk(x)), parameters))
            flat = [torch.cat([g.flatten() for g in row]) for row in rows]
            assert max(float(g.norm()) for g in flat) > limit
            expected.append(pcgrad(clipped(flat, limit)))
        if together:
            opt.step_together(lambda run: {task: loss(task, y) for task, y in run(x).items()})
        else:
            opt.step(
                lambda task: loss(task, trunk(x)),
            )
        found = [torch.cat([p.grad.flatten() for p in of_layer]) for of_layer in layers]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        return torch.cat(found), trunk, expected

    torch.testing.assert_close(trained(False)[0], trained(True)[0], rtol=1e-9, atol=1e-12)


def test_kept_weights_keep_the_factors() -> None:
    problem = Problem()
    opt = problem.opt(cs.Clipped(cs.PCGrad(update_every=2), 0.3))
    opt.step(problem.loss)
    weights = opt.report().task_weights.clone()
    expected = weights @ torch.stack(problem.gradients([*problem.trunk.parameters()]))
    opt.step(problem.loss)
    assert opt.report().weights_from == 0
    torch.testing.assert_close(flat_grad(problem.trunk), expected, rtol=1e-10, atol=1e-13)


def test_a_function_of_the_norms() -> None:
    """Clips all gradients to the median of their norms."""
    method = cs.Clipped(cs.Sum(), lambda norms: norms.median(-1, keepdim=True).values)
    gramian = torch.diag(torch.tensor([16.0, 1.0, 4.0])).double()
    torch.testing.assert_close(method.weights(gramian), torch.tensor([0.5, 1, 1]).double())
    both = method.weights(torch.stack([gramian, 4 * gramian]))
    torch.testing.assert_close(both, torch.tensor([[0.5, 1, 1]] * 2).double())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_zero_and_non_finite_gradients(bad: float) -> None:
    method = cs.Clipped(cs.Sum(), 1.0)
    gramian = torch.diag(torch.tensor([0.0, 4.0])).double()
    assert method.weights(gramian).tolist() == [1.0, 0.5]
    gramian[1, 1] = bad
    gramian[0, 1] = gramian[1, 0] = torch.nan
    for inner in (cs.Sum(), cs.UPGrad()):
        assert cs.Clipped(inner, 1.0).weights(gramian).isnan().all()


@pytest.mark.parametrize("max_norm", [0, -1.0, torch.inf, torch.nan, "1", None])
def test_bad_limits(max_norm: object) -> None:
    with pytest.raises(
        ValueError, match="max_norm must be positive and finite, or a function, got"
    ):
        cs.Clipped(cs.PCGrad(), max_norm)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.GradDrop(), None, cs.PCGrad])
def test_methods_without_a_gramian(method: object) -> None:
    with pytest.raises(TypeError, match=r"method must be a Gramian method or Sum\(\), got"):
        cs.Clipped(method, 1.0)


def test_a_checkpoint_of_another_method_is_refused() -> None:
    one, other = Problem(), Problem()
    state = one.opt(cs.Clipped(cs.GradVac(), 1.0)).state_dict()
    with pytest.raises(ValueError, match="state must be for method PCGrad, got one for GradVac"):
        other.opt(cs.Clipped(cs.PCGrad(), 1.0)).load_state_dict(state)


def test_representations() -> None:
    assert (
        repr(cs.Clipped(cs.PCGrad(seed=3), 2.0)) == f"Clipped({cs.PCGrad(seed=3)!r}, max_norm=2.0)"
    )
    assert repr(cs.Clipped(cs.Sum(), 1)) == "Clipped(Sum(), max_norm=1)"
