"""The physics-informed networks: their solutions, their losses, and what a step does."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from uses import pinn

pytestmark = pytest.mark.paper


@pytest.fixture(autouse=True)
def _as_the_harness_but_in_float64() -> Iterator[None]:
    """Everything is drawn in the default type; more threads only make such small steps slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


class Exact(torch.nn.Module):
    """The solution in the place of the network."""

    def __init__(self, problem: pinn.Problem) -> None:
        super().__init__()
        self.forward = problem.solution
        true = problem.coefficient
        self.log_coefficient = None if true is None else torch.tensor(true).log()


@pytest.mark.parametrize("name", pinn.PROBLEMS)
def test_solution_has_no_losses(name: str) -> None:
    problem = pinn.PROBLEMS[name]()
    losses = problem.losses(Exact(problem))
    assert list(losses) == list(problem.weights)
    if name == "inverse":
        assert losses.pop("data") == pytest.approx(pinn.NOISE**2, rel=0.5)
    assert max(losses.values()) < 1e-16


def test_burgers_by_finite_differences() -> None:
    """Away from the shock, so that the differences are exact enough."""
    u, h = pinn.Burgers().solution, 1e-4
    points = torch.cartesian_prod(torch.linspace(0.1, 1, 7), torch.tensor([-0.8, -0.3, 0.2, 0.6]))
    t, x = h * torch.eye(2)
    u_t = (u(points + t) - u(points - t)) / (2 * h)
    u_x = (u(points + x) - u(points - x)) / (2 * h)
    u_xx = (u(points + x) - 2 * u(points) + u(points - x)) / h**2
    torch.testing.assert_close(u_t + u(points) * u_x, pinn.VISCOSITY * u_xx, atol=1e-5, rtol=0)


def test_burgers_has_the_known_slope_and_enough_nodes() -> None:
    """The steepest slope is 152.00516, at t = 1.6037 / pi (Basdevant et al., 1986)."""
    burgers, h = pinn.Burgers(), 1e-5
    time = 1.6037 / np.pi
    ends = torch.tensor([[time, -h], [time, h]])
    left, right = burgers.solution(ends)
    assert (left - right) / (2 * h) == pytest.approx(152.00516, rel=1e-4)
    grid = burgers.grid()
    more = burgers.solution(grid, nodes=180)
    torch.testing.assert_close(burgers.solution(grid), more, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["Sum", "tuned weights", "PCGrad", "ConFIG"])
def test_a_step_is_that_of_a_plain_loop(method: str) -> None:
    """On two tasks: there PCGrad's order does not matter, and ConFIG needs no pseudoinverse."""
    problem, network = pinn.Helmholtz(), pinn.Network()
    _, opt = pinn.optimizers(network, problem, method, seed=0)
    parameters = list(network.parameters())
    losses = problem.losses(network)
    of_tasks = [
        torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses.values()
    ]
    opt.backward(losses)
    update = torch.cat([parameter.grad.flatten() for parameter in parameters])
    flat = [torch.cat([gradient.flatten() for gradient in of_task]) for of_task in of_tasks]
    torch.testing.assert_close(update, _plain(method, problem, *flat))


def _plain(method: str, problem: pinn.Problem, a: Tensor, b: Tensor) -> Tensor:
    if method == "tuned weights":
        return problem.weights["equation"] * a + problem.weights["boundary"] * b
    if method == "PCGrad":
        dot = (a @ b).clamp(max=0)
        return a + b - dot / (b @ b) * b - dot / (a @ a) * a
    if method == "ConFIG":
        halfway = a / a.norm() + b / b.norm()
        halfway /= halfway.norm()
        return halfway @ (a + b) * halfway
    return a + b


@pytest.mark.parametrize("method", ["Sum", "ConFIG, every 10"])
@pytest.mark.parametrize("name", pinn.PROBLEMS)
def test_quick_runs_lower_the_loss(name: str, method: str) -> None:
    torch.set_default_dtype(torch.float32)
    result = pinn.train(f"{name}/{method}", 0, True)
    first, last = (sum(result["losses"][i].values()) for i in (0, -1))
    assert last < first
    assert len(result["curve"]) == pinn.EVALUATIONS
    assert ("coefficient" in result) == (name == "inverse")
    assert {column.key for column in pinn.USE.columns} <= {*result, "coefficient"}


def test_the_picture(tmp_path: Path) -> None:
    curve = [(step, step / 10, 1 / step) for step in (1, 2, 3)]
    pinn.draw({row: [{"curve": curve}] * 2 for row in pinn.USE.rows}, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"pinn.svg", "pinn-dark.svg"}
