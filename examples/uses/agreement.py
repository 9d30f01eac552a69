"""Beyond the paper: causes and effects of the priorities in `uses/priorities.py`.

Each row trains networks with the same initial weights: by Phase 2; by Phase 2 with another order of
batches; and, unless the row's normalization is BatchNorm, by Phase 2 with BatchNorm. Two networks
agree in a channel if both have the same top-priority task there. Chance is the agreement of
priorities that are shuffled within each layer.

Every 16th step compares the update of the prioritized weights with two other updates from the same
gradients: Phase 2 with shuffled priorities, and the expected update of PCGrad layer by layer. The
part that a method removes is its update minus the plain sum.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import style
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cosine_similarity

import cs_kernels as cs
from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Step
from cs_kernels.trunk.layers import LayerLists, Layout
from uses import digits
from uses.priorities import NORMS, PARTS, Shuffled, make_run, part_of
from uses.use import Column, Result, Use, interval

EVERY = 16
"""Steps between two comparisons of updates."""


def removed(
    gradients: TaskGradients, lists: LayerLists, priorities: Sequence[Tensor]
) -> list[Tensor]:
    """The part of the sum that Phase 2 with these priorities removes: one flat tensor per layer."""
    grads, number = gradients.of(lists.weight_indices), len(gradients.tasks)
    updates = [torch.empty_like(weight) for weight in lists.weights]
    options = (lists.out_channel_dims, lists.groups, number)
    torch.ops.cs_kernels.project_conflicts_(updates, grads, priorities, *options)
    return [
        (update - sum(grads[n * number : (n + 1) * number])).flatten().double()
        for n, update in enumerate(updates)
    ]


def compare(
    gradients: TaskGradients, lists: LayerLists, random: Sequence[Tensor]
) -> dict[str, float]:
    """Compares Phase 2, Phase 2 with random priorities, and PCGrad on the same gradients."""
    rows = [
        torch.stack([g.flatten() for g in gradients.of([n])]).double() for n in lists.weight_indices
    ]
    pcgrad = []
    for row in rows:
        drawn = [cs.PCGrad(seed=seed).weights(row @ row.T) for seed in range(16)]
        pcgrad.append((torch.stack(drawn).mean(0) - 1) @ row)
    total = torch.cat([row.sum(0) for row in rows])
    phase2, null, pcgrad = map(
        torch.cat,
        (
            removed(gradients, lists, gradients.priorities(lists)),
            removed(gradients, lists, random),
            pcgrad,
        ),
    )
    return {
        "removes": float(phase2.norm() / total.norm()),
        "random_removes": float(null.norm() / total.norm()),
        "pcgrad_removes": float(pcgrad.norm() / total.norm()),
        "like_random": float(cosine_similarity(phase2, null, 0)),
        "like_pcgrad": float(cosine_similarity(phase2, pcgrad, 0)),
    }


class Compared(cs.ConnectionStrength):
    """Phase 2 with comparisons of its updates with others."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.null = Shuffled(seed)
        self.comparisons: list[dict[str, float]] = []

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Compares updates in every 16th step; then makes the update of Phase 2."""
        if step.number % EVERY == 0:
            random = self.null.shuffle(gradients.priorities(layout.lists))
            self.comparisons.append(compare(gradients, layout.lists, random))
        super().combine(gradients, layout, step)


def agreement(one: Sequence[Tensor], other: Sequence[Tensor], tasks: int) -> tuple[float, float]:
    """The share of channels with the same top-priority task, and the share by chance."""
    same = chance = 0.0
    for a, b in zip(one, other, strict=True):
        counts = [torch.bincount(p, minlength=tasks).double() for p in (a, b)]
        same += float((a == b).sum())
        chance += float(counts[0] @ counts[1]) / len(a)
    channels = sum(map(len, one))
    return same / channels, chance / channels


def rank_correlation(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Spearman's correlation of the tasks' shares [K, O], averaged over layers and tasks."""

    def centered_ranks(shares: Tensor) -> Tensor:
        ranks = shares.argsort(-1).argsort(-1).double()
        return ranks - ranks.mean(-1, keepdim=True)

    pairs = zip(one, other, strict=True)
    values = [cosine_similarity(centered_ranks(a), centered_ranks(b), -1) for a, b in pairs]
    return float(torch.cat(values).mean())


def shares(run: digits.Run) -> list[Tensor]:
    """The tasks' shares of each channel's connection strength, [K, O] per layer."""
    found = []
    for layer, norm in pairwise(run.trunk):
        if isinstance(norm, cs.nn.TaskBatchNorm):
            norms = [norm.of(task) for task in run.tasks]
            strength = torch.ops.cs_kernels.connection_strength(
                layer.weight.detach(),
                torch.stack([norm.weight.detach() for norm in norms]),
                torch.stack([norm.running_var for norm in norms]),
                [norm.eps for norm in norms],
                True,
                0,
                1,
            )
            found.append(strength / strength.sum(0))
    return found


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains the networks of a row, and compares their priorities."""
    name, norm = row.split("/")
    part = part_of(name, quick)
    pictures, _ = digits.make_pictures(part, seed)

    def trained(norm: str, order: int, method: cs.Method) -> digits.Run:
        run = make_run(part, norm, method, seed)
        run.train(pictures, order)
        return run

    method = Compared(seed)
    run = trained(norm, seed, method)
    others = {"retrained": trained(norm, 1000 + seed, cs.ConnectionStrength())}
    if norm != "BatchNorm":
        others["batchnorm"] = trained("BatchNorm", seed, cs.ConnectionStrength())
    result: Result = {}
    for key, other in others.items():
        one, two = ([*r.opt.priority().values()] for r in (run, other))
        result[key], result[f"{key}_chance"] = agreement(one, two, len(part.tasks))
        result[f"{key}_rank"] = rank_correlation(shares(run), shares(other))
    for key in method.comparisons[0]:
        values = [comparison[key] for comparison in method.comparisons]
        result[key] = sum(values) / len(values)
    return result


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots the agreement of retrained networks, and chance."""
    labels = [f"{norm}, {part} losses" for part, _, norm in (row.partition("/") for row in results)]
    looks = {
        "retrained": ("o", style.method("ConnectionStrength"), "after another training"),
        "retrained_chance": ("|", style.GREY, "by chance"),
    }

    def picture() -> Figure:
        figure, axes = style.panels(1, 1, 3.8)
        ax = axes[0, 0]
        for key, (marker, color, label) in looks.items():
            of_rows = [interval([100 * r[key] for r in of_row]) for of_row in results.values()]
            means, halves = zip(*of_rows, strict=True)
            ax.errorbar(means, labels, xerr=halves, fmt=marker, color=color, label=label)
        ax.set(title="Channels with the same top-priority task", xlabel="%")
        style.legend_below(figure, ax, 2)
        ax.invert_yaxis()
        ax.grid(axis="x")
        return figure

    style.save(folder / "agreement.svg", picture)


USE = Use(
    name="agreement",
    title="losses and normalization",
    rows=[f"{name}/{norm}" for name in PARTS for norm in NORMS],
    train=train,
    columns=(
        Column("retrained", "same task if retrained, %", 0, 100),
        Column("retrained_chance", "by chance, %", 0, 100),
        Column("retrained_rank", "rank correlation if retrained", 2),
        Column("batchnorm", "same task as BatchNorm, %", 0, 100),
        Column("batchnorm_chance", "by chance, %", 0, 100),
        Column("batchnorm_rank", "rank correlation with BatchNorm", 2),
        Column("removes", "removed of the sum, %", 1, 100),
        Column("random_removes", "by random priorities, %", 1, 100),
        Column("pcgrad_removes", "by PCGrad, %", 1, 100),
        Column("like_random", "cosine with random", 2),
        Column("like_pcgrad", "cosine with PCGrad", 2),
    ),
    draw=draw,
)
