"""Task weights from sketches of the previous step, against exact weights of the same step.

`GradientBalancer` replaces `MultiTaskOptimizer` in the other uses, with the same initial weights,
batches and torch optimizer. Their networks have fewer shared parameters than the default sketch has
numbers (65,536), so its dot products are exact, and only the lag can cause a difference. With 1,024
numbers, a cosine has a standard error of about 0.03.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import style
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import cs_kernels as cs
from uses import digits, finetune, pinn, tabular
from uses.use import Column, Result, Use, draw_gains

SMALL_SKETCH = 1024
TICKS = (-20, -5, -1, 0, 1, 5, 20)
PARTS = {
    "three": digits.PARTS["three"],
    "three, unequal": replace(digits.PARTS["three"], factors={"right": 0.1}),
}


@dataclass(frozen=True)
class Problem:
    """Methods of another use, and the result, in percent, by which they are compared."""

    use: ModuleType
    prefix: str
    key: str
    factor: float
    methods: Sequence[str]


PROBLEMS = {
    "three digits, accuracy": Problem(
        digits, "three/", "mean", 100, ("PCGrad", "UPGrad", "ConFIG", "NashMTL")
    ),
    "one loss times 0.1, accuracy": Problem(
        digits, "three, unequal/", "mean", 100, ("PCGrad", "UPGrad", "ConFIG", "NashMTL")
    ),
    "survey, Delta m": Problem(tabular, "", "delta_m", 1, ("PCGrad", "UPGrad", "NashMTL")),
    "fine-tuning, Delta m": Problem(finetune, "", "delta_m", 1, ("PCGrad", "UPGrad")),
    "Helmholtz, error": Problem(
        pinn, "helmholtz/", "error", 100, ("PCGrad", "UPGrad", "ConFIG", "NashMTL")
    ),
}


class Balanced:
    """Adapts `GradientBalancer` to the interface of `MultiTaskOptimizer` that the uses call."""

    phase = 2

    def __init__(
        self,
        trunk: nn.Module,
        optimizer: torch.optim.Optimizer,
        tasks: Iterable[str],
        method: cs.Method,
        sketch: int,
    ) -> None:
        self.trunk, self.optimizer, self.tasks = trunk, optimizer, tuple(tasks)
        own = {p for norm in cs.nn.task_norms(trunk) for p in norm.parameters()}
        shared = [p for p in trunk.parameters() if p not in own]
        self.balancer = cs.GradientBalancer(shared, self.tasks, method, optimizer, sketch=sketch)

    def start_epoch(self, epoch: int) -> None:
        """Does nothing: there is no schedule."""

    def count_conflicts(self) -> None:
        """Does nothing: the balancer always computes its products."""

    def conflicts(self) -> Any:
        """The conflicts of the last step."""
        return SimpleNamespace(gramians=self.balancer.gramian[None])

    def backward(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Makes backward passes for the losses of one forward pass."""
        self.optimizer.zero_grad()
        return self.balancer.backward(losses)

    def step(self, closure: Callable[[str], Tensor], tasks: Iterable[str] | None = None) -> None:
        """Makes a forward pass per task."""
        self.optimizer.zero_grad()
        for task in tasks or self.tasks:
            with cs.nn.active_task(self.trunk, task), self.balancer.task(task):
                closure(task).backward()
        self.optimizer.step()


def _score(problem: Problem, method: str, seed: int, quick: bool, sketch: int | None) -> float:
    """Trains, with exact weights if no sketch size is given; returns the result."""
    exact = cs.MultiTaskOptimizer

    def make(
        trunk: nn.Module,
        optimizer: torch.optim.Optimizer,
        tasks: Iterable[str],
        method: cs.Method,
        **options: Any,
    ) -> Any:
        if sketch is None or isinstance(method, cs.Sum):
            return exact(trunk, optimizer, tasks, method, **options)
        return Balanced(trunk, optimizer, tasks, method, sketch)

    torch.manual_seed(seed)
    with (
        mock.patch.object(cs, "MultiTaskOptimizer", make),
        mock.patch.dict(digits.PARTS, PARTS),
    ):
        result = problem.use.USE.train(problem.prefix + method, seed, quick)
    return problem.factor * float(result[problem.key])


def train(row: str, seed: int, quick: bool) -> Result:
    """Makes three runs with equal initial weights; returns the effects of lag and sketch."""
    name, method = row.split("/")
    exact, lagged, small = (
        _score(PROBLEMS[name], method, seed, quick, sketch)
        for sketch in (None, 65536, SMALL_SKETCH)
    )
    return {"exact": exact, "lagged": lagged - exact, "small": small - exact}


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots differences from exact weights, with a panel per sketch."""

    def differences() -> Figure:
        figure, axes = style.panels(1, 2, 6.5, sharey=True)
        titles = {"lagged": "default sketch", "small": f"sketch of {SMALL_SKETCH:,} numbers"}
        for ax, (key, title) in zip(axes[0], titles.items(), strict=True):
            draw_gains(ax, {row: [run[key] for run in runs] for row, runs in results.items()})
            ax.set_xscale("symlog", linthresh=1)  # Problems differ by a factor of 100.
            ax.set_xticks(TICKS, labels=map(str, TICKS))
            ax.set_title(title)
        figure.suptitle("GradientBalancer less exact weights of the same step")
        figure.supxlabel("percentage points, with 95 % intervals", fontsize=11)
        return figure

    style.save(folder / "lagged.svg", differences)


USE = Use(
    name="lagged",
    title="problem and method",
    rows=[f"{name}/{method}" for name, problem in PROBLEMS.items() for method in problem.methods],
    train=train,
    columns=(
        Column("exact", "exact", 2),
        Column("lagged", "balancer less exact", 2),
        Column("small", f"the same, sketch={SMALL_SKETCH}", 2),
    ),
    draw=draw,
)
