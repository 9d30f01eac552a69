"""Classification of two or three overlapping digits per picture; each digit is a task.

This is MultiMNIST (Sabour et al. 2017; as tasks, Sener and Koltun 2018) with the 1,797 handwritten
digits of scikit-learn, which need no download. The digits are split into training and test digits
before pictures are made of them; each seed makes a new split.

All rows use the same batches in the same order, and the same optimizer and learning rate, which was
not tuned for any row. But Phase 1 makes one optimizer step per task and batch, so "Phase 1" makes K
times as many optimizer steps as other rows, and "Mixed" about (K + 1) / 2 times as many. Two rows
show effects other than surgery: "Sum+steps" trains for K times as many epochs, so it makes as many
optimizer steps as "Phase 1"; "Sum+BN" has the task-specific batch normalization of "Phase 1",
"Phase 2" and "Mixed", which needs a forward pass per task. All other methods train as published, on
a plain trunk with one forward pass (`opt.backward`).

A step has a conflict if the dot product of two tasks' gradients, over all shared parameters, is
negative.
Seconds include counting conflicts. Without counting, "Sum" would need only one backward pass.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import style
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import cs_kernels as cs
from uses.use import Column, Result, Use, draw_gains, seeded

SIDE = 14
"""The size of a digit in a picture, in pixels; scikit-learn's digits have 8 x 8."""
HEIGHT = 20
APART = 5
"""Pixels between the left sides of two neighbors, before random shifts by one pixel."""
TEST_DIGITS, TEST_PICTURES = 600, 2000
BATCH = 64
RATE = 2e-3
"""Adam's initial learning rate, which falls to 0 epoch by epoch."""
BINS = 12
"""The number of equal parts of the training, each with its own share of conflicts."""


@dataclass(frozen=True)
class Part:
    """A setting of the problem."""

    title: str
    tasks: tuple[str, ...] = ("left", "right")
    pictures: int = 2048
    epochs: int = 12
    width: int = 16
    """Channels of the first layer."""
    factors: Mapping[str, float] | None = None
    """Factors of the losses."""


PARTS = {
    "two": Part("two digits"),
    "three": Part("three digits, half as wide", ("left", "middle", "right"), width=8),
    "few": Part("two digits, 256 pictures", pictures=256, epochs=96),
    "unequal": Part("right loss times 0.1", factors={"right": 0.1}),
}

SCHEDULES: dict[str, Callable[[int, int], cs.Schedule]] = {
    "Phase 1": lambda epochs, seed: cs.Sequential(),
    "Phase 2": lambda epochs, seed: cs.Joint(),
    "Mixed": lambda epochs, seed: cs.Mixed(epochs, seed),
}
"""Connection strength's schedules, from the number of epochs and the seed."""
CONVERTED = ("Sum+BN", *SCHEDULES)
"""Rows with task-specific batch normalization."""
PUBLISHED = ("PCGrad", "CAGrad", "MGDA", "NashMTL", "UPGrad", "FairGrad", "ConFIG", "AlignedMTL")
ROWS = ("Single-task", "Sum", "Sum+steps", *CONVERTED, *PUBLISHED, "IMTLG")


@dataclass(frozen=True)
class Pictures:
    """Pictures [N, 1, H, W] with values in [0, 1], and which digits they show."""

    images: Tensor
    labels: Tensor
    """[N, K], the classes of the digits from left to right."""
    digits: Tensor
    """[N, K], indices into scikit-learn's digits."""


def _draw_pictures(number: int, count: int, usable: Tensor, generator: torch.Generator) -> Pictures:
    """Pictures with `count` of the usable digits each."""
    data = load_digits()
    small = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(small, size=(SIDE, SIDE), mode="bilinear")[:, 0]
    chosen = usable[torch.randint(len(usable), (number, count), generator=generator)]
    x = torch.randint(2, (number, count), generator=generator) + APART * torch.arange(count)
    y = torch.randint(HEIGHT - SIDE + 1, (number, count), generator=generator)
    images = torch.zeros(number, 1, HEIGHT, SIDE + 1 + APART * (count - 1))
    for image, of_image in zip(images, torch.stack([chosen, x, y], -1).tolist(), strict=True):
        for digit, left, top in of_image:
            place = image[0, top : top + SIDE, left : left + SIDE]
            torch.maximum(place, large[digit], out=place)
    return Pictures(images, torch.tensor(data.target)[chosen], chosen)


def make_pictures(part: Part, seed: int) -> tuple[Pictures, Pictures]:
    """Pictures for training and for testing, of different digits."""
    generator = seeded(seed)
    order = torch.randperm(1797, generator=generator)
    count = len(part.tasks)
    test = _draw_pictures(TEST_PICTURES, count, order[:TEST_DIGITS], generator)
    return _draw_pictures(part.pictures, count, order[TEST_DIGITS:], generator), test


def make_trunk(
    width: int,
    planes: Callable[[int], nn.Module] = nn.BatchNorm2d,
    values: Callable[[int], nn.Module] = nn.BatchNorm1d,
) -> nn.Sequential:
    """Two convolutions and a linear layer, each with a normalization of its output channels."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1, bias=False), planes(width)),
        *(nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), planes(2 * width)),
        *(nn.ReLU(), nn.AdaptiveMaxPool2d(5), nn.Flatten()),
        *(nn.Linear(50 * width, 3 * width, bias=False), values(3 * width), nn.ReLU()),
    )


def _make_method(row: str, seed: int) -> cs.Method:
    if row in SCHEDULES:
        return cs.ConnectionStrength()
    if row == "Single-task" or row.startswith("Sum"):
        return cs.Sum(separate=True)  # Conflicts are counted in separate gradients.
    return cs.PCGrad(seed=seed) if row == "PCGrad" else getattr(cs, row)()


class Run:
    """A trunk with a head per task, and its training."""

    def __init__(
        self,
        part: Part,
        tasks: tuple[str, ...],
        trunk: nn.Module,
        method: cs.Method,
        schedule: cs.Schedule | None = None,
    ) -> None:
        self.part, self.tasks, self.trunk = part, tasks, trunk
        self.converted = any(isinstance(m, cs.nn.TaskBatchNorm) for m in trunk.modules())
        self.heads = nn.ModuleDict({task: nn.Linear(3 * part.width, 10) for task in tasks})
        self.adam = torch.optim.Adam([*trunk.parameters(), *self.heads.parameters()], lr=RATE)
        self.opt = cs.MultiTaskOptimizer(trunk, self.adam, tasks, method, schedule=schedule)
        self.opt.count_conflicts()

    def _loss(self, task: str, features: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.heads[task](features), labels[:, self.part.tasks.index(task)])
        return loss * (self.part.factors or {}).get(task, 1.0)

    def _step(self, images: Tensor, labels: Tensor) -> None:
        if self.converted:
            self.opt.step(lambda task: self._loss(task, self.trunk(images), labels))
            return
        features = self.trunk(images)
        self.opt.backward({task: self._loss(task, features, labels) for task in self.tasks})
        self.adam.step()

    def _has_conflict(self) -> bool:
        products = self.opt.conflicts().gramians.nansum(0)
        return bool((products < 0).any())

    def train(self, pictures: Pictures, seed: int) -> list[bool | None]:
        """Trains; returns whether each step had a conflict, or None for steps of Phase 1."""
        generator = seeded(seed)
        decay = torch.optim.lr_scheduler.LambdaLR(self.adam, lambda e: 1 - e / self.part.epochs)
        conflicts: list[bool | None] = []
        for epoch in range(self.part.epochs):
            self.opt.start_epoch(epoch)
            for batch in torch.randperm(len(pictures.images), generator=generator).split(BATCH):
                self._step(pictures.images[batch], pictures.labels[batch])
                conflicts.append(self._has_conflict() if self.opt.phase == 2 else None)
            decay.step()
        return conflicts

    @torch.no_grad()
    def test(self, pictures: Pictures) -> dict[str, float]:
        """Tests; returns the accuracy of each task."""
        self.trunk.eval()
        accuracies = {}
        for task in self.tasks:
            if self.converted:
                cs.nn.set_task(self.trunk, task)
            found = self.heads[task](self.trunk(pictures.images)).argmax(1)
            right = found == pictures.labels[:, self.part.tasks.index(task)]
            accuracies[task] = right.double().mean().item()
        return accuracies


def _share(flags: list[bool | None]) -> float | None:
    known = [flag for flag in flags if flag is not None]
    return sum(known) / len(known) if known else None


def _train(row: str, seed: int, quick: bool) -> Result:
    name, row = row.split("/")
    part = PARTS[name]
    if quick:  # Each bin needs a batch.
        part = replace(part, pictures=6 * BATCH, epochs=2, width=4)
    if row == "Sum+steps":
        part = replace(part, epochs=len(part.tasks) * part.epochs)
    pictures, test = make_pictures(part, seed)
    start = time.perf_counter()
    accuracies: dict[str, float] = {}
    conflicts: list[bool | None] = []
    for tasks in [(task,) for task in part.tasks] if row == "Single-task" else [part.tasks]:
        trunk = make_trunk(part.width)
        if row in CONVERTED:
            cs.nn.convert_task_batchnorm(trunk, tasks)
        schedule = SCHEDULES[row](part.epochs, seed) if row in SCHEDULES else None
        run = Run(part, tasks, trunk, _make_method(row, seed), schedule)
        of_run = run.train(pictures, seed)
        conflicts += of_run if len(tasks) > 1 else []
        accuracies |= run.test(test)
    steps = len(conflicts)
    bins = [conflicts[i * steps // BINS : (i + 1) * steps // BINS] for i in range(BINS)]
    return {
        **accuracies,
        "mean": sum(accuracies.values()) / len(accuracies),
        "worst": min(accuracies.values()),
        "conflict": _share(conflicts),
        "conflicts": [_share(of_bin) for of_bin in bins],
        "seconds": time.perf_counter() - start,
    }


def over_sum(results: Sequence[Result], sums: Sequence[Result]) -> list[float]:
    """Mean accuracies minus Sum's with the same seed, in percentage points."""
    return [100 * (run["mean"] - of_sum["mean"]) for run, of_sum in zip(results, sums, strict=True)]


def _draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    of_parts = [
        (part, {row: results[f"{name}/{row}"] for row in ROWS}) for name, part in PARTS.items()
    ]

    def gains() -> Figure:
        figure, axes = style.panels(2, 2, 7.5, sharey=True)
        for ax, (part, rows) in zip(axes.flat, of_parts, strict=True):
            # Seeds have different digits, hence different attainable accuracies.
            draw_gains(ax, {row: over_sum(results, rows["Sum"]) for row, results in rows.items()})
            ax.set_title(part.title)
        figure.suptitle("Test accuracy, mean over tasks, less that of Sum")
        figure.supxlabel("percentage points, with 95 % intervals", fontsize=11)
        return figure

    style.save(folder / "digits.svg", gains)


USE = Use(
    "digits",
    "digits",
    [f"{part}/{row}" for part in PARTS for row in ROWS],
    _train,
    [
        Column("left", "left %", 1, 100),
        Column("middle", "middle %", 1, 100),
        Column("right", "right %", 1, 100),
        Column("mean", "mean %", 1, 100),
        Column("worst", "worst %", 1, 100),
        Column("conflict", "steps with conflict %", 0, 100),
        Column("seconds", "s", 1),
    ],
    _draw,
)
