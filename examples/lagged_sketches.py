"""Task weights from sketches of the step before, against exact ones: docs/balancer.md.

    python examples/lagged_sketches.py [--seeds 0 1 2 3 4] [--quick]

Three overlapping digits (uses/digits.py) with equal losses and with one loss times 0.1, and
Helmholtz' equation (uses/pinn.py), each trained by `MultiTaskOptimizer` and by `GradientBalancer`
from the same initial weights and with the same batches. Sketches have 1,024 numbers, so that they
are not exact in these small networks; that is a tenth of the digits' shared parameters and an
eighth of the equation's.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from table import markdown
from torch import Tensor
from uses import digits, pinn
from uses.use import interval

import cs_kernels as cs

METHODS = ("PCGrad", "UPGrad", "ConFIG", "NashMTL")
SKETCH = 1024
DIGITS = {
    "three digits, accuracy": digits.PARTS["three"],
    "one loss times 0.1, accuracy": replace(digits.PARTS["three"], factors={"right": 0.1}),
}


class Balanced(digits.Run):
    """The balancer in the place of MultiTaskOptimizer."""

    def __init__(self, part: digits.Part, trunk: torch.nn.Module, method: cs.Method) -> None:
        super().__init__(part, part.tasks, trunk, cs.Sum(separate=True))
        shared = trunk.parameters()
        self.balancer = cs.GradientBalancer(shared, part.tasks, method, self.adam, sketch=SKETCH)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        self.adam.zero_grad()
        features = self.trunk(images)
        losses = {task: self._loss(task, features, labels) for task in self.tasks}
        self.balancer.backward(losses)
        self.adam.step()

    def _has_conflict(self) -> bool:
        return False


class Exact(digits.Run):
    """Without the count of conflicts."""

    def __init__(self, part: digits.Part, trunk: torch.nn.Module, method: cs.Method) -> None:
        super().__init__(part, part.tasks, trunk, method)
        self.opt.count_conflicts(None)

    def _has_conflict(self) -> bool:
        return False


def accuracy(part: digits.Part, quick: bool, method: str, seed: int, lagged: bool) -> float:
    """The mean over the tasks, in percent."""
    part = replace(part, epochs=1, pictures=128) if quick else part
    learned, test = digits.make_pictures(part, seed)
    torch.manual_seed(seed)
    trunk = digits.make_trunk(part.width)
    made = cs.Sum(separate=True) if method == "Sum" else getattr(cs, method)()
    run = (Balanced if lagged else Exact)(part, trunk, made)
    run.train(learned, seed)
    return 100 * statistics.mean(run.test(test).values())


def equation_error(quick: bool, method: str, seed: int, lagged: bool) -> float:
    """The relative error of the solution, in percent."""
    torch.manual_seed(seed)
    problem, network = pinn.Helmholtz(), pinn.Network()
    steps = 20 if quick else problem.steps // 2
    adam = torch.optim.Adam(network.parameters(), lr=pinn.RATE)
    decay = torch.optim.lr_scheduler.ExponentialLR(adam, pinn.DECAY ** (1 / steps))
    given = [*problem.weights], getattr(cs, method)()
    if lagged:
        balancer = cs.GradientBalancer(network.parameters(), *given, adam, sketch=SKETCH)
    else:
        opt = cs.MultiTaskOptimizer(network, adam, *given)
    for _ in range(steps):
        if lagged:
            adam.zero_grad()
            for task, loss in problem.losses(network).items():
                with balancer.task(task):
                    loss.backward()
        else:
            opt.backward(problem.losses(network))
        adam.step()
        decay.step()
    points = problem.grid()
    with torch.no_grad():
        error = (network(points) - problem.solution(points)).norm()
    return 100 * float(error / problem.solution(points).norm())


def main() -> None:
    """Trains all, and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    measures: dict[str, Callable[..., float]] = {
        name: partial(accuracy, part, given.quick) for name, part in DIGITS.items()
    }
    measures["Helmholtz, relative error"] = partial(equation_error, given.quick)
    rows = []
    for name, measure in measures.items():
        plain = [measure("Sum", seed, lagged=False) for seed in given.seeds]
        rows.append([name, "Sum", _shown(plain), "", ""])
        for method in METHODS:
            exact, lagged = (
                [measure(method, seed, lagged=way) for seed in given.seeds] for way in (False, True)
            )
            differences = [b - a for a, b in zip(exact, lagged, strict=True)]
            paired = "{:+.2f} ± {:.2f}".format(*interval(differences))
            rows.append([name, method, _shown(exact), _shown(lagged), paired])
            print(rows[-1], flush=True)
    path = Path(__file__).parent / "results" / "lagged_sketches.md"
    head = ["problem, in percent", "method", "exact", "sketched and lagged", "difference"]
    if not given.quick:
        path.write_text(markdown(head, rows))


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f}"


if __name__ == "__main__":
    main()
