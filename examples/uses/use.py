"""The definition of a use; trains and resumes its runs, and writes its table."""

import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import style
import torch
from matplotlib.axes import Axes
from recipes.atomic import atomic_write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from scipy import stats
from table import markdown, show

Result = dict[str, Any]
"""A run's numbers by column name, and the data of its pictures."""


@dataclass(frozen=True)
class Column:
    """A number in every result, and its format in the table."""

    key: str
    title: str
    digits: int
    factor: float = 1.0
    median: bool = False
    """Whether to print the median over seeds and the range, for numbers with outliers."""


@dataclass(frozen=True)
class Use:
    """A problem, the rows of its table, and the training of a row."""

    name: str
    title: str
    rows: Sequence[str]
    """Names of the rows; in names with a "/", the text before it is a part of the problem."""
    train: Callable[[str, int, bool], Result]
    """The result of a row and a seed; quick runs only show that the code works."""
    columns: Sequence[Column]
    draw: Callable[[Mapping[str, list[Result]], Path], None]
    """Draws pictures into a folder, from the results of each row (one per seed)."""


def seeded(seed: int) -> torch.Generator:
    """A generator on the device of the run."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def _one_run(use: Use, row: str, seed: int, quick: bool, device: str, file: Path) -> str:
    torch.set_num_threads(1)
    torch.set_default_device(device)
    torch.manual_seed(seed)
    result = use.train(row, seed, quick)
    with atomic_write(file) as written:
        written.write(json.dumps(result).encode())
    return row


def _file(folder: Path, row: str, seed: int) -> Path:
    name = "".join(c if c.isalnum() or c in "-_=." else "_" for c in row)
    return folder / "runs" / name / f"seed{seed}.json"


def run_all(
    use: Use,
    seeds: Sequence[int],
    quick: bool,
    jobs: int,
    folder: Path,
    console: Console,
    device: str = "cpu",
) -> dict[str, list[Result]]:
    """Makes the missing runs, `jobs` at a time, and reads all results."""
    files = {(row, seed): _file(folder, row, seed) for row in use.rows for seed in seeds}
    missing = [key for key, file in files.items() if not file.exists()]
    columns = (
        TextColumn("{task.description:>32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        bar = progress.add_task(use.name, total=len(files), completed=len(files) - len(missing))
        started = []
        try:
            for row, seed in missing:
                file = files[row, seed]
                file.parent.mkdir(parents=True, exist_ok=True)
                started.append(pool.submit(_one_run, use, row, seed, quick, device, file))
            for done in as_completed(started):
                progress.update(bar, advance=1, description=f"{use.name}: {done.result()}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {row: [json.loads(files[row, seed].read_text()) for seed in seeds] for row in use.rows}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and half of its 95% confidence interval (Student's t)."""
    mean, seeds = statistics.mean(values), len(values)
    if seeds == 1:
        return mean, 0.0
    return mean, float(stats.t.ppf(0.975, seeds - 1)) * statistics.stdev(values) / seeds**0.5


def delta_m(
    values: Mapping[str, float],
    baseline: Mapping[str, float],
    tasks: Sequence[str],
    lower: Sequence[str] = (),
) -> float:
    """The mean relative gain over the baseline in percent; lower is better for some tasks."""
    gains = [(values[task] / baseline[task] - 1) * (-1 if task in lower else 1) for task in tasks]
    return 100 * statistics.mean(gains)


def _cell(column: Column, results: list[Result]) -> str:
    values = [result[column.key] for result in results if result.get(column.key) is not None]
    if not values:
        return "-"
    values = [value * column.factor for value in values]
    form = f".{column.digits}f"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    if column.median:
        return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:{form}}"


def draw_gains(ax: Axes, rows: Mapping[str, Sequence[float]]) -> None:
    """Draws the mean of each row's values with its interval, row below row, and a line at 0."""
    for y, (row, values) in enumerate(rows.items()):
        mean, half = interval(values)
        marker = "s" if row.endswith("random") else "o"
        color = style.method(row)
        ax.errorbar(mean, y, xerr=half, fmt=marker, markersize=4, color=color)
    ax.axvline(0, color=style.GREY, linewidth=0.8, linestyle="--")
    ax.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
    ax.grid(axis="x")


def write(use: Use, results: Mapping[str, list[Result]], folder: Path, console: Console) -> None:
    """Writes the table, in the terminal and in Markdown, and the pictures."""
    head = [use.title, *(column.title for column in use.columns)]
    rows = [
        [row, *(_cell(column, of_row) for column in use.columns)] for row, of_row in results.items()
    ]
    seeds = len(next(iter(results.values())))
    medians = all(column.median for column in use.columns)
    what = "Medians" if medians else "Means"
    spread = "(least-greatest)" if medians else "± half of the 95 % confidence interval"
    note = f"{what} over {seeds} seeds {spread}.\n"
    show(console, use.name, head, rows)
    (folder / f"{use.name}.md").write_text(
        markdown(head, rows) + (f"\n{note}" if seeds > 1 else "")
    )
    use.draw(results, folder)


def default_jobs() -> int:
    """One process per core."""
    return os.cpu_count() or 1
