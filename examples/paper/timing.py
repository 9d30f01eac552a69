"""Seconds per step and per epoch of a run, measured on this machine."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from paper.experiments import PUBLISHED, Part, Run
from paper.runner import Place
from paper.train import Training

ROWS = tuple(PUBLISHED["time"])
"""Columns of the paper's table of training times."""
STEPS = 14
"""Timed steps of each row; the first two are discarded."""
SIDES = (64, 192)
"""Sides of the pictures on which `estimate` times steps; published sizes take minutes on CPUs."""


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


def timed_runs(part: Part) -> list[Run]:
    """One run per method, all on the same network."""
    example = next(run for run in part.runs() if run.row == "GD")
    return [replace(example, row=row) for row in ROWS]


def time_rows(part: Part, data: Path, steps: int = STEPS) -> dict[str, float]:
    """Seconds per epoch of each method on one network, from medians of steps that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = {run.row: _start(run, folder, data) for run in timed_runs(part)}
        first = next(iter(trainings.values()))
        batch = next(iter(first.loader))
        times: dict[str, list[float]] = {name: [] for name in ROWS}
        for i in range(steps):
            for name, training in trainings.items():
                seconds = _timed_step(training, batch)
                if i >= 2:
                    times[name].append(seconds)
    return {name: statistics.median(values) * len(first.loader) for name, values in times.items()}


def _random_batch(
    training: Training, pictures: int, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    batch = {"picture": torch.randn(pictures, 3, *size)}
    for name, task in training.tasks.items():
        if task.kind == "classes":
            batch[name] = torch.randint(task.channels, (pictures, *size))
        else:
            batch[name] = torch.rand(pictures, task.channels, *size)
    return batch


def _step_seconds(training: Training, threads: int) -> float:
    """Estimates the seconds of one step of a run.

    On a CPU, a step's time is a constant plus a term proportional to the number of pixels. A single
    thread is timed, since the processor time of several includes their waiting.
    """
    pictures, size = training.settings.batch, training.train_set.size
    if training.device.type == "cuda":
        batch = _random_batch(training, pictures, size)
        return min(_timed_step(training, batch) for _ in range(3))
    torch.set_num_threads(1)
    small, large = SIDES
    _processor_seconds(training, small)  # The first step allocates memory.
    least, most = (_processor_seconds(training, side) for side in SIDES)
    pixel = (most - least) / (large**2 - small**2)
    return (least + pixel * (pictures * size[0] * size[1] - small**2)) / threads


def _processor_seconds(training: Training, side: int) -> float:
    """Processor time of a step on one square picture, independent of the machine's load."""
    batch = _random_batch(training, 1, (side, side))
    start = time.process_time()
    training.step(batch)
    return time.process_time() - start


def _kind(run: Run) -> tuple[object, ...]:
    """A key that is equal for runs whose steps have the same forward and backward passes."""
    by_task = run.task_norm or run.how.recon
    return run.data, run.network, run.how.network, len(run.tasks), by_task


def estimate(
    runs: Sequence[Run], place: Place, jobs: int, console: Console, steps: int | None = None
) -> None:
    """Prints estimates of training times, with one process per run, by kind of run.

    Pictures are not read. Evaluation, and completed epochs of interrupted runs, are ignored.

    Args:
        runs: The runs to train.
        place: Where their data are.
        jobs: How many runs are trained at once.
        console: Gets a line for each kind.
        steps: The number of steps of a run; by default, of all its epochs.

    """
    total = 0.0
    kinds: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        kinds.setdefault(_kind(run), []).append(run)
    for alike in kinds.values():
        run = alike[0]
        # Recon's layers are not known yet, but our method makes the same passes. Pretrained weights
        # would be downloaded, and compiling takes minutes.
        settings = replace(run.settings, pretrained=False, compile=False, workers=0)
        timed = replace(run, row="Mixed" if run.how.recon else run.row, settings=settings)
        with tempfile.TemporaryDirectory() as folder:
            training = _start(timed, folder, place.data)
            step, epoch = _step_seconds(training, place.threads), len(training.loader)
        seconds = step * (steps or epoch * settings.epochs)
        total += seconds * len(alike)
        rows = ", ".join(dict.fromkeys(run.row for run in alike))
        console.print(
            f"{run.data} {run.network} {rows}: {step:.2f} s per step,"
            f" {_duration(seconds)} per run, {len(alike)} run{'s' * (len(alike) > 1)}",
            soft_wrap=True,
        )
    at_once = f", for {jobs} runs at once at full speed" if jobs > 1 else ""
    console.print(f"about {_duration(total / jobs)} in all{at_once}")
    sides = " and ".join(f"{side} x {side}" for side in SIDES)
    basis = (
        "from steps on random batches of a run's size"
        if torch.cuda.is_available()
        else f"extrapolated from one core's time for steps on pictures of {sides} pixels"
    )
    console.print(f"This is an estimate, {basis}; evaluation is not counted.", soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.1f} min"
