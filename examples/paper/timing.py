"""Seconds a step and an epoch of a run, measured on this machine."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from paper.experiments import PUBLISHED, Part, Run
from paper.train import Training

ROWS = tuple(PUBLISHED["time"])
"""Columns of the paper's table of training times."""


def _timed_step(training: Training, batch: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    training.step(batch)
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _start(run: Run, folder: str, data: Path) -> Training:
    run = replace(run, settings=replace(run.settings, ranks=1))
    training = Training(run, Path(folder), data)
    if training.opt is not None:
        training.opt.start_epoch(0)
    return training


def time_rows(part: Part, data: Path, steps: int = 12) -> dict[str, float]:
    """Seconds an epoch of each method on one network: the median of steps that take turns."""
    example = next(run for run in part.runs() if run.row == "GD")
    with tempfile.TemporaryDirectory() as folder:
        trainings = {row: _start(replace(example, row=row), folder, data) for row in ROWS}
        first = next(iter(trainings.values()))
        batch = next(iter(first.loader))
        times: dict[str, list[float]] = {name: [] for name in ROWS}
        for i in range(steps + 2):
            for name, training in trainings.items():
                seconds = _timed_step(training, batch)
                if i >= 2:
                    times[name].append(seconds)
    return {name: statistics.median(values) * len(first.loader) for name, values in times.items()}


def estimate(runs: Sequence[Run], data: Path, jobs: int, console: Console) -> None:
    """Prints about how long training takes in one process a run, from a few steps of each kind.

    Evaluation, and epochs that interrupted runs have behind them, are not considered.
    """
    total = 0.0
    kinds: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        if run.how.recon:
            # Its layers are not known yet.
            run = replace(run, row=run.row.removesuffix(" + Recon"))
        kinds.setdefault((run.data, run.network, run.row, len(run.tasks)), []).append(run)
    for (dataset, network, row, _), alike in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            training = _start(alike[0], folder, data)
            batch = next(iter(training.loader))
            _timed_step(training, batch)
            step = statistics.median(_timed_step(training, batch) for _ in range(3))
        seconds = step * len(training.loader) * alike[0].settings.epochs
        total += seconds * len(alike)
        console.print(
            f"{dataset} {network} {row}: {1e3 * step:.0f} ms a step, {_duration(seconds)} a run,"
            f" {len(alike)} run{'s' * (len(alike) > 1)}"
        )
    at_once = f", {jobs} at once, if that costs no speed" if jobs > 1 else ""
    console.print(f"about {_duration(total / jobs)} in all{at_once}")


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.1f} min"
