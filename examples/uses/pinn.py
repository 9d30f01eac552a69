"""Physics-informed networks: the equation, its conditions and data are the tasks.

A network is trained until its derivatives satisfy an equation, and its values the boundary
conditions (Raissi et al., 2019). The tasks share all parameters. All solutions are known. Published
results use 10 to 100 times as many steps, or L-BFGS. ConFIG's tutorial on Burgers' equation is of
similar size, with one more hidden layer, 2,000 points and 5,000 steps:
https://github.com/tum-pbs/ConFIG/blob/main/docs/examples/pinn_burgers.ipynb
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import style
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import cs_kernels as cs
from uses.use import Column, Result, Use

VISCOSITY = 0.01 / math.pi
DIFFUSION, REACTION = 0.01, 6.0
MEASURED, NOISE = 100, 0.05
"""The number of data points, and the standard deviation of the noise on values in [0, 1]."""
POINTS, EDGE_POINTS = 500, 100
"""The numbers of points that a step draws in the domain and for each condition."""
LATTICE = 0.7548777, 0.5698403
"""The lattice's steps, from the two-dimensional analogue of the golden ratio."""
RATE, DECAY = 5e-3, 0.01
"""Adam's initial learning rate, and the fraction that remains after an exponential decay."""
EVALUATIONS = 40
"""The number of times that a run is compared with the solution."""


class Network(nn.Module):
    """Four tanh layers of width 50 and, optionally, the logarithm of an unknown coefficient."""

    def __init__(self, coefficient: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for sizes in pairwise([2, 50, 50, 50, 50, 1]):
            linear = nn.Linear(*sizes)
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])
        self.log_coefficient = nn.Parameter(torch.zeros(())) if coefficient else None

    def forward(self, points: Tensor) -> Tensor:
        """The values at points [n, 2]."""
        return self.layers(points).squeeze(-1)


class Problem(ABC):
    """An equation with conditions on a rectangle, and its solution."""

    low: tuple[float, float]
    high: tuple[float, float]
    steps: int
    weights: ClassVar[dict[str, float]]
    """Tuned loss weights by task, from two or three tries with one seed: 10 or 100 for Burgers'
    conditions, 100 or 1000 for Helmholtz' boundary, 10 for Fisher's start, its data or both."""
    coefficient: float | None = None
    """The true value of the unknown coefficient."""

    @abstractmethod
    def solution(self, points: Tensor) -> Tensor:
        """The exact values at points [n, 2]."""

    @abstractmethod
    def losses(self, network: Network) -> dict[str, Tensor]:
        """Mean squared residuals at new points, one per task."""

    def draw(self, count: int) -> Tensor:
        """Draws points in the domain: a randomly shifted lattice, as even as a grid.

        Independent points make the losses' gradients so noisy that no method learns the
        Helmholtz equation in this number of steps.
        """
        low, high = torch.tensor(self.low), torch.tensor(self.high)
        lattice = torch.arange(count)[:, None] * torch.tensor(LATTICE)
        return low + (high - low) * ((torch.rand(2) + lattice) % 1)

    def grid(self) -> Tensor:
        """101 x 101 points for the comparison with the solution."""
        axes = [torch.linspace(*ends, 101) for ends in zip(self.low, self.high, strict=True)]
        return torch.cartesian_prod(*axes)


class Burgers(Problem):
    """u_t + u u_x = 0.01 / pi u_xx, from -sin(pi x) to a shock at x = 0."""

    low, high, steps = (0.0, -1.0), (1.0, 1.0), 6000
    weights: ClassVar = {"equation": 1.0, "boundary": 10.0, "start": 10.0}

    def solution(self, points: Tensor, nodes: int = 100) -> Tensor:
        """The Cole-Hopf transform, with Gauss-Hermite quadrature."""
        z, weights = map(torch.tensor, np.polynomial.hermite.hermgauss(nodes))
        t, x = points.double().split(1, -1)
        y = x - (4 * VISCOSITY * t).sqrt() * z
        # The integrands exceed the range of float64, but each node's share does not.
        shares = (weights.log() - (math.pi * y).cos() / (2 * math.pi * VISCOSITY)).softmax(-1)
        return -(shares * (math.pi * y).sin()).sum(-1).to(points.dtype)

    def losses(self, network: Network) -> dict[str, Tensor]:
        """Losses of the equation, of u(t, -1) = u(t, 1) = 0, and of u(0, x)."""
        u, (u_t, u_x), (_, u_xx) = derivatives(network, self.draw(POINTS))
        edge, start = self.draw(EDGE_POINTS), self.draw(EDGE_POINTS)
        edge[:, 1].sign_()
        start[:, 0] = 0
        return {
            "equation": (u_t + u * u_x - VISCOSITY * u_xx).square().mean(),
            "boundary": network(edge).square().mean(),
            "start": (network(start) + (math.pi * start[:, 1]).sin()).square().mean(),
        }


class Helmholtz(Problem):
    """u_xx + u_yy + u = q, with q such that u = sin(pi x) sin(4 pi y), as in Wang et al. (2021)."""

    low, high, steps = (-1.0, -1.0), (1.0, 1.0), 4000
    weights: ClassVar = {"equation": 1.0, "boundary": 1000.0}

    def solution(self, points: Tensor) -> Tensor:
        """A product of sines, with four times the frequency along y."""
        x, y = points.unbind(-1)
        return (math.pi * x).sin() * (4 * math.pi * y).sin()

    def losses(self, network: Network) -> dict[str, Tensor]:
        """Losses of the equation, and of u = 0 on all four sides."""
        points, edge = self.draw(POINTS), self.draw(EDGE_POINTS)
        u, _, (u_xx, u_yy) = derivatives(network, points, both=True)
        source = (1 - 17 * math.pi**2) * self.solution(points)
        edge[::2, 0].sign_()
        edge[1::2, 1].sign_()
        return {
            "equation": (u_xx + u_yy + u - source).square().mean(),
            "boundary": network(edge).square().mean(),
        }


class Fisher(Problem):
    """u_t = 0.01 u_xx + r u (1 - u), a moving front; r is estimated from noisy data."""

    low, high, steps = (0.0, -1.0), (1.0, 1.0), 4000
    weights: ClassVar = {"equation": 1.0, "start": 10.0, "data": 10.0}
    coefficient = REACTION

    def __init__(self) -> None:
        self.measured = self.draw(MEASURED)
        self.data = self.solution(self.measured) + NOISE * torch.randn(MEASURED)

    def solution(self, points: Tensor) -> Tensor:
        """A wave that travels at speed 0.5 and keeps its shape (Ablowitz and Zeppetella, 1979)."""
        t, x = points.unbind(-1)
        front = math.sqrt(REACTION / (6 * DIFFUSION)) * x - 5 * REACTION * t / 6
        return (-front).sigmoid().square()

    def losses(self, network: Network) -> dict[str, Tensor]:
        """Losses of the equation, of u(0, x), and of the data, which are the same in every step."""
        u, (u_t, _), (_, u_xx) = derivatives(network, self.draw(POINTS))
        start = self.draw(EDGE_POINTS)
        start[:, 0] = 0
        reaction = network.log_coefficient.exp() * u * (1 - u)
        return {
            "equation": (u_t - DIFFUSION * u_xx - reaction).square().mean(),
            "start": (network(start) - self.solution(start)).square().mean(),
            "data": (network(self.measured) - self.data).square().mean(),
        }


PROBLEMS: dict[str, type[Problem]] = {"burgers": Burgers, "helmholtz": Helmholtz, "inverse": Fisher}
TITLES = {"burgers": "Burgers", "helmholtz": "Helmholtz", "inverse": "Fisher, r sought"}

METHODS: dict[str, Callable[[int], cs.Method]] = {
    "Sum": lambda seed: cs.Sum(),
    "tuned weights": lambda seed: cs.Sum(),
    "PCGrad": lambda seed: cs.PCGrad(seed=seed),
    "ConFIG": lambda seed: cs.ConFIG(),
    "UPGrad": lambda seed: cs.UPGrad(),
    "NashMTL": lambda seed: cs.NashMTL(),
    "ConFIG, every 10": lambda seed: cs.ConFIG(update_every=10),
}
"""The method of each row, from the seed."""


def derivatives(
    network: Network, points: Tensor, both: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The values, the first derivatives, and the second derivatives in each direction.

    Unless `both` is True, zeros replace the second derivative in the first direction.
    """
    points.requires_grad_()
    values = network(points)
    first = _gradient(values, points)
    second = _gradient(first[1], points)[1]
    other = _gradient(first[0], points)[0] if both else torch.zeros_like(second)
    return values, first, (other, second)


def _gradient(values: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    # Each value depends only on its own point, so the sum's gradient has all derivatives.
    (found,) = torch.autograd.grad(values.sum(), points, create_graph=True)
    return found[:, 0], found[:, 1]


def optimizers(
    network: Network, problem: Problem, method: str, seed: int
) -> tuple[torch.optim.Adam, cs.MultiTaskOptimizer]:
    """Makes Adam, and the MultiTaskOptimizer of a row."""
    adam = torch.optim.Adam(network.parameters(), lr=RATE)
    weighting = cs.FixedWeights(problem.weights) if method == "tuned weights" else None
    tasks = list(problem.weights)
    return adam, cs.MultiTaskOptimizer(
        network, adam, tasks, method=METHODS[method](seed), weighting=weighting
    )


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains one network; seconds are the training's processor time, without evaluations."""
    name, method = row.split("/")
    problem = PROBLEMS[name]()
    network = Network(coefficient=problem.coefficient is not None)
    steps = 80 if quick else problem.steps
    adam, opt = optimizers(network, problem, method, seed)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, DECAY ** (1 / steps))
    grid = problem.grid()
    exact, seconds, curve, losses = problem.solution(grid), 0.0, [], []
    for step in range(1, steps + 1):
        start = time.process_time()
        of_step = opt.backward(problem.losses(network))
        adam.step()
        decay.step()
        seconds += time.process_time() - start
        if step % (steps // EVALUATIONS) == 0:
            with torch.no_grad():
                error = (network(grid) - exact).norm() / exact.norm()
            curve.append((step, seconds, float(error)))
            losses.append({task: float(loss) for task, loss in of_step.items()})
    result = {
        "error": curve[-1][2],
        "seconds": seconds,
        "curve": curve,
        "losses": losses,
    }
    if network.log_coefficient is not None:
        found = network.log_coefficient.exp().item()
        result["coefficient"] = abs(found / problem.coefficient - 1)
    return result


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots errors over steps and over seconds: medians of the seeds, one panel per problem."""
    dashed = {"tuned weights": "Sum", "ConFIG, every 10": "ConFIG"}

    def picture() -> Figure:
        figure, axes = style.panels(2, len(PROBLEMS), 5.2, sharey="col")
        for row, of_seeds in results.items():
            name, method = row.split("/")
            # [seed, evaluation, (step, seconds, error)]
            steps, seconds, error = np.median([run["curve"] for run in of_seeds], axis=0).T
            column = axes[:, list(PROBLEMS).index(name)]
            for ax, along in zip(column, (steps, seconds), strict=True):
                ax.plot(
                    along,
                    error,
                    color=style.method(dashed.get(method, method)),
                    linestyle="--" if method in dashed else "-",
                    linewidth=1.4,
                    label=method,
                )
        for column, title in zip(axes.T, TITLES.values(), strict=True):
            column[0].set(title=title, xlabel="steps", yscale="log")
            column[1].set(xlabel="seconds of a core", yscale="log")
        for ax in axes[:, 0]:
            ax.set_ylabel("relative L2 error")
        style.legend_below(figure, axes[0, 0], 4)
        return figure

    style.save(folder / "pinn.svg", picture)


USE = Use(
    name="pinn",
    title="problem and method",
    rows=[f"{problem}/{method}" for problem in PROBLEMS for method in METHODS],
    train=train,
    columns=[
        Column("error", "relative L2 error, %↓", 2, 100, median=True),
        Column("coefficient", "error of r, %↓", 1, 100, median=True),
        Column("seconds", "seconds of a core", 1, median=True),
    ],
    draw=draw,
)
