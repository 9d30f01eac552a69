"""Beyond the paper: priorities against random ones, and without batch normalization.

The problem is three digits of `uses/digits.py`, with losses of equal or of unequal scale. The trunk
is normalized by BatchNorm, by GroupNorm with four groups, or by LayerNorm over all channels. Each
task has its own scale and shift, and the variance of every channel before the normalization is
tracked as in BatchNorm, so that the paper's Eq. (4) to (10) can be applied.

"random" is the baseline: Phase 2 with the priorities of a layer shuffled among its channels, by a
permutation that is drawn once. Channel groups thus have the same sizes and change at the same rate.
"PCGrad" projects layer by layer. All rows have task-specific normalization. "Mixed" rows make about
twice as many optimizer steps as the others, so compare them only with each other.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import style
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Step
from cs_kernels.trunk.layers import Layout
from uses import digits
from uses.use import Column, Result, Use, draw_gains, seeded

PARTS = {
    "equal": digits.PARTS["three"],
    "unequal": replace(digits.PARTS["three"], factors={"left": 0.3, "right": 0.1}),
}
ROWS = ("Sum", "PCGrad", "Phase 2", "Phase 2, random", "Mixed", "Mixed, random")


class TrackedGroupNorm(nn.GroupNorm):
    """GroupNorm that tracks the variance of each input channel over the batch and positions."""

    def __init__(self, num_groups: int, num_channels: int, momentum: float = 0.1) -> None:
        super().__init__(num_groups, num_channels)
        self.momentum = momentum
        self.register_buffer("running_var", torch.ones(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the input [N, C, ...]; in training, tracks its variance."""
        if self.training:
            with torch.no_grad():
                variance = x.transpose(0, 1).flatten(1).var(1)
                self.running_var.lerp_(variance, self.momentum)
        return super().forward(x)


Maker = Callable[[int], nn.Module]
NORMS: dict[str, tuple[Maker, Maker]] = {
    "BatchNorm": (nn.BatchNorm2d, nn.BatchNorm1d),
    "GroupNorm": (partial(TrackedGroupNorm, 4),) * 2,
    "LayerNorm": (partial(TrackedGroupNorm, 1),) * 2,
}
"""Constructors of normalizations for [N, C, H, W] and for [N, C], from the number of channels."""


def task_copies(norm: nn.Module, tasks: Sequence[str]) -> cs.nn.TaskBatchNorm:
    """A task-specific normalization with a copy per task."""
    return cs.nn.TaskBatchNorm({task: copy.deepcopy(norm) for task in tasks})


def make_trunk(norm: str, part: digits.Part) -> nn.Module:
    """A trunk with task-specific normalization."""
    trunk = digits.make_trunk(part.width, *NORMS[norm])
    for n, child in enumerate(trunk):
        if isinstance(child, TrackedGroupNorm):
            trunk[n] = task_copies(child, part.tasks)
    return trunk if norm != "BatchNorm" else cs.nn.convert_task_batchnorm(trunk, part.tasks)


class Shuffled(cs.ConnectionStrength):
    """The baseline: Phase 2 with each layer's priorities shuffled among its channels."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def shuffle(self, priorities: Sequence[Tensor]) -> list[Tensor]:
        """Shuffles priorities by the same permutations in every step."""
        generator = seeded(self.seed)
        return [p[torch.randperm(len(p), generator=generator)] for p in priorities]

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Like `ConnectionStrength.combine`, whose fused operator cannot shuffle priorities."""
        reached = gradients.reached()
        lists = layout.lists_of(reached)
        order = list(dict.fromkeys([*lists.weight_indices, *reached]))
        torch.ops.cs_kernels.project_conflicts_(
            gradients.updates(order),
            gradients.of(order),
            self.shuffle(gradients.priorities(lists)),
            lists.out_channel_dims,
            lists.groups,
            len(gradients.tasks),
        )
        gradients.assign(order)


def make_method(kind: str, seed: int) -> cs.Method:
    """The method of a row."""
    if kind == "Sum":
        return cs.Sum(separate=True)
    if kind == "PCGrad":
        return cs.PCGrad(seed=seed, groups="layer")
    return Shuffled(seed) if kind.endswith("random") else cs.ConnectionStrength()


def make_run(
    part: digits.Part, norm: str, method: cs.Method, seed: int, schedule: cs.Schedule | None = None
) -> digits.Run:
    """A run; all networks of a seed have the same initial weights, with any normalization."""
    torch.manual_seed(seed)
    return digits.Run(part, part.tasks, make_trunk(norm, part), method, schedule)


def part_of(name: str, quick: bool) -> digits.Part:
    """The setting of the problem; small in quick runs."""
    part = PARTS[name]
    return replace(part, pictures=4 * digits.BATCH, epochs=2, width=4) if quick else part


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains one network; returns its accuracies."""
    name, norm, kind = row.split("/")
    part = part_of(name, quick)
    pictures, test = digits.make_pictures(part, seed)
    schedule = cs.Mixed(part.epochs, seed) if kind.startswith("Mixed") else None
    run = make_run(part, norm, make_method(kind, seed), seed, schedule)
    start = time.perf_counter()
    run.train(pictures, seed)
    seconds = time.perf_counter() - start
    accuracies = run.test(test)
    mean = sum(accuracies.values()) / len(accuracies)
    return {**accuracies, "mean": mean, "seconds": seconds}


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots accuracies minus Sum's with the same problem, normalization and seed."""

    def gains(problem: str, kind: str) -> list[float]:
        return digits.over_sum(results[f"{problem}/{kind}"], results[f"{problem}/Sum"])

    def picture() -> Figure:
        figure, axes = style.panels(len(PARTS), len(NORMS), 5.6, sharex="row", sharey=True)
        for of_part, name in zip(axes, PARTS, strict=True):
            for ax, norm in zip(of_part, NORMS, strict=True):
                draw_gains(ax, {kind: gains(f"{name}/{norm}", kind) for kind in ROWS})
                ax.set_title(f"{norm}\n{name} losses")
        label = "accuracy less that of Sum in percentage points, with 95 % intervals"
        figure.supxlabel(label, fontsize=11)
        return figure

    style.save(folder / "priorities.svg", picture)


USE = Use(
    name="priorities",
    title="losses, normalization and method",
    rows=[f"{name}/{norm}/{kind}" for name in PARTS for norm in NORMS for kind in ROWS],
    train=train,
    columns=(
        *(Column(task, f"{task} %", 1, 100) for task in ("left", "middle", "right")),
        Column("mean", "mean %", 1, 100),
        Column("seconds", "s", 1),
    ),
    draw=draw,
)
