"""Beyond the paper: priorities against random ones on the photograph of `demo.py`.

An encoder-decoder with BatchNorm or GroupNorm learns three tasks (disparity, surface normals,
edges) on crops of one region of a photograph, and is tested on another region. Rows, random
priorities and the tracked variance are the same as in `uses/priorities.py`.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import demo
import style
from matplotlib.figure import Figure
from rich.progress import Progress
from stereo import TASKS, Scene, load
from torch import nn

import cs_kernels as cs
from uses.priorities import TrackedGroupNorm, make_method, task_copies
from uses.use import Column, Result, Use, delta_m, draw_gains

SETTINGS = demo.Settings(epochs=16, crop=64)
QUICK = demo.Settings(epochs=1, steps=2, crop=32, batch=2)
KINDS = ("Sum", "PCGrad", "Phase 2", "Phase 2, random")
NORMS = ("BatchNorm", "GroupNorm")
METRICS = {"disparity": "rmse", "normals": "mean", "edges": "F"}
LOWER = ("disparity", "normals")


def with_group_norm(module: nn.Module, tasks: Sequence[str]) -> nn.Module:
    """Replaces each batch normalization by a GroupNorm with eight groups."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, task_copies(TrackedGroupNorm(8, child.num_features), tasks))
        else:
            with_group_norm(child, tasks)
    return module


class Run(demo.Run):
    """The demo's run without `watch`, which does not support cosines by layer."""

    def watch(self, reports: Sequence[cs.Report]) -> None:
        """Does nothing."""


@cache
def scenes() -> tuple[Scene, Scene]:
    """The regions of the photograph for training and for testing."""
    return load()


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains one network; returns its metrics."""
    norm, kind = row.split("/")
    settings = QUICK if quick else SETTINGS
    trained, held_out = scenes()
    convert = cs.nn.convert_task_batchnorm if norm == "BatchNorm" else with_group_norm
    given = [*TASKS], demo.Row(lambda: make_method(kind, seed)), settings, seed, trained
    run = Run(*given, demo.Ranks(), convert)
    start = time.perf_counter()
    run.train(row, Progress(disable=True))
    seconds = time.perf_counter() - start
    metrics = run.evaluate(held_out)
    return {task: metrics[task][name] for task, name in METRICS.items()} | {"seconds": seconds}


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots the mean relative gain over Sum with the same normalization and seed."""

    def gains(norm: str, kind: str) -> list[float]:
        pairs = zip(results[f"{norm}/{kind}"], results[f"{norm}/Sum"], strict=True)
        return [delta_m(run, of_sum, [*METRICS], LOWER) for run, of_sum in pairs]

    def picture() -> Figure:
        figure, axes = style.panels(1, len(NORMS), 3.2, sharex="row", sharey=True)
        for ax, norm in zip(axes[0], NORMS, strict=True):
            draw_gains(ax, {kind: gains(norm, kind) for kind in KINDS})
            ax.set_title(norm)
        figure.supxlabel("mean relative gain over Sum in %, with 95 % intervals", fontsize=11)
        return figure

    style.save(folder / "photograph.svg", picture)


USE = Use(
    name="photograph",
    title="normalization and method",
    rows=[f"{norm}/{kind}" for norm in NORMS for kind in KINDS],
    train=train,
    columns=(
        Column("disparity", "disparity: RMSE ↓", 2),
        Column("normals", "normals: mean angle ↓", 1),
        Column("edges", "edges: F ↑", 1),
        Column("seconds", "seconds", 1),
    ),
    draw=draw,
)
