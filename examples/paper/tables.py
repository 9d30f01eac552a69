"""Makes the paper's tables and figures from folders of runs, beside the paper's numbers."""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import plots
from rich.console import Console
from table import cell, markdown, show

from paper.experiments import (
    PUBLISHED,
    REAL,
    SINGLE,
    SMALL_PICTURES,
    Part,
    Run,
)
from paper.metrics import Values, delta_m
from paper.tasks import TASKS

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """The result of a row for one seed; for the single-task row, of all its networks."""

    metrics: Values
    delta: float
    history: list[dict[str, Any]]
    parameters: int
    tasks: tuple[str, ...]

    @property
    def loss(self) -> float:
        """The unweighted mean over tasks of the last epoch's training losses."""
        return statistics.mean(self.history[-1]["losses"].values())

    def losses(self) -> dict[str, list[float]]:
        """Training losses by task and epoch."""
        return {task: [epoch["losses"][task] for epoch in self.history] for task in self.tasks}


Found = Mapping[str, Mapping[int, Result]]
"""The results of a table, by row and seed."""


def read(part: Part, folder: Path) -> Found:
    """The results of a table.

    Raises:
        FileNotFoundError: A run has no result yet.

    """
    found: dict[str, dict[int, Result]] = {}
    alone: dict[int, Values] = {}
    for row, runs in part.rows.items():
        found[row] = {}
        for seed in dict.fromkeys(run.seed for run in runs):
            chosen = [run for run in runs if run.seed == seed]
            results = [_read(run, folder) for run in chosen]
            metrics = {task: value for r in results for task, value in r["metrics"].items()}
            if row == SINGLE:
                alone[seed] = metrics
            found[row][seed] = Result(
                metrics,
                delta_m(metrics, alone[seed], part.measures),
                results[0]["history"] if row != SINGLE else [],
                sum(result["parameters"] for result in results),
                chosen[0].tasks,
            )
    return found


def _read(run: Run, folder: Path) -> dict[str, Any]:
    path = folder / run.name / "result.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: train the run first")
    return json.loads(path.read_text())


def table_rows(part: Part, found: Found) -> tuple[list[str], list]:
    """Headings and rows, two per method: ours, then the paper's."""
    head = ["method", "", *(measure.title for measure in part.measures)]
    head += ["Δm %↑"]
    digits = [measure.digits for measure in part.measures] + [2]
    if part.extra:
        head.append({"parameters": "MiB", "loss": "mean loss↓"}[part.extra])
        digits.append({"parameters": 2, "loss": 4}[part.extra])
    rows = []
    for name, seeds in found.items():
        results = list(seeds.values())
        row = [name, "here"]
        for measure in part.measures:
            values = [result.metrics[measure.task][measure.name] for result in results]
            row.append(cell(values, measure.digits))
        row.append(cell([result.delta for result in results], 2, "+"))
        if part.extra == "parameters":
            row.append(f"{4 * results[0].parameters / MIB:.2f}")
        elif part.extra == "loss":
            row.append(cell([r.loss for r in results], 4) if name != SINGLE else "")
        rows.append(row)
        printed = PUBLISHED[part.published].get(name)
        if printed is not None:
            # The sign of Delta_m is printed as in our rows.
            at = len(part.measures)
            texts = [
                f"{value:{'+' if i == at else ''}.{digits[i]}f}" for i, value in enumerate(printed)
            ]
            rows.append(["", "paper", *texts])
    return head, rows


def describe(run: Run, *, small: bool) -> str:
    """Describes deviations from the published settings, for the head of a table."""
    parts = []
    if small:
        parts.append(
            f"small set: {SMALL_PICTURES['train']} crops of one stereo photograph to train on,"
            f" {SMALL_PICTURES['val']} to evaluate on, so these numbers are not comparable with"
            " the paper's"
        )
    settings, published = run.settings, REAL[f"{run.data}/{run.network}"]
    names = {
        "size": lambda v: f"{v[0]} x {v[1]} pixels" if v else "the data set's size",
        "width": lambda v: f"channels x {v:g}",
        "pretrained": lambda v: "pretrained" if v else "not pretrained",
        "epochs": lambda v: f"{v} epoch{'s' * (v > 1)}",
        "batch": lambda v: f"batches of {v}",
        "ranks": lambda v: f"{v} processes per run",
        "rate": lambda v: f"learning rate {v:g}",
        "amp": lambda v: f"mixed precision ({v})" if v else "",
        "compile": lambda v: "compiled" if v else "",
    }
    for name, text in names.items():
        value = getattr(settings, name)
        if value != getattr(published, name):
            parts.append(text(value))
    return "; ".join(parts) or "published settings"


def write(
    name: str,
    parts: list[Part],
    folder: Path,
    out: Path,
    console: Console,
    *,
    small: bool,
    stem: str | None = None,
) -> None:
    """Prints all parts of a table, and writes them and the figures to `out`.

    Args:
        name: The table.
        parts: Its parts, or some of them.
        folder: The folder of all runs.
        out: The folder of the files.
        console: The console to print on.
        small: Whether the data are the small set.
        stem: The file name without its suffix, by default the table's name.

    """
    text = ""
    results = []
    for part in parts:
        found = read(part, folder)
        results.append(found)
        head, rows = table_rows(part, found)
        note = describe(part.runs()[-1], small=small)
        show(console, f"{part.title}\n{note}", head, rows)
        seeds = len(next(iter(found.values())))
        text += f"**{part.title}.** {note[0].upper()}{note[1:]}. "
        text += f"{seeds} seed{'s' * (seeds > 1)}.\n\n{markdown(head, rows)}\n"
    for line in findings(name, parts, results):
        console.print(f"- {line}")
        text += f"- {line}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem or name}.md").write_text(text.rstrip() + "\n")
    _draw(name, parts, results, out)


def write_time(
    rows: Mapping[str, float], part: Part, out: Path, console: Console, *, small: bool
) -> None:
    """Prints and writes the table of seconds per epoch."""
    head = ["", *rows]
    printed = PUBLISHED["time"]
    lines = [
        ["here, s per epoch", *(f"{seconds:.2f}" for seconds in rows.values())],
        ["here, of Phase 1", *(f"{s / rows['Phase 1']:.2f}" for s in rows.values())],
        ["paper, s per epoch", *(f"{printed[row][0]:.2f}" for row in rows)],
        ["paper, of Phase 1", *(f"{printed[row][0] / printed['Phase 1'][0]:.2f}" for row in rows)],
    ]
    note = describe(part.runs()[-1], small=small)
    show(console, f"{part.title}\n{note}", head, lines)
    out.mkdir(parents=True, exist_ok=True)
    title = f"**{part.title}.** {note[0].upper()}{note[1:]}.\n\n"
    (out / "time.md").write_text(title + markdown(head, lines))


def correlation(result: Result) -> float:
    """The mean over pairs of tasks of the correlation of the losses' changes between epochs."""
    matrix = plots.loss_correlation(result.losses())
    return float(np.mean([matrix[i, j] for i, j in combinations(range(len(matrix)), 2)]))


def shares(epoch: Mapping[str, Any]) -> np.ndarray:
    """The percentage of channels with each task as their top-priority task."""
    total = np.array(list(epoch["shares"].values())).sum(0)
    return 100 * total / total.sum()


def _compared(ours: Mapping[int, float], others: Mapping[int, float]) -> str:
    """The mean difference, its deviation, and the number of seeds in which it is positive."""
    differences = [ours[seed] - others[seed] for seed in ours]
    wins = sum(difference > 0 for difference in differences)
    return f"{cell(differences, 2, '+')}, higher in {wins} of {len(differences)} seeds"


def findings(name: str, parts: list[Part], results: list[Found]) -> Iterator[str]:
    """Our measurements for the paper's claims about a table."""
    if name in ("nyud", "pascal", "cityscapes"):
        yield from _found_of_methods(results[0], losses=name != "cityscapes")
    elif name == "ablation":
        yield from _found_of_phases(results[0])
    elif name == "scaling":
        yield from _found_of_weightings(parts, results)
    elif name == "order":
        yield from _found_of_orders(results[0])


def _deltas(found: Found, row: str) -> dict[int, float]:
    return {seed: result.delta for seed, result in found[row].items()}


def _lowest_loss(found: Found) -> str:
    rows = [row for row in found if row != SINGLE]
    lowest = {seed: min(rows, key=lambda row: found[row][seed].loss) for seed in found[rows[0]]}
    text = ", ".join(f"{row} (seed {seed})" for seed, row in lowest.items())
    return f"Lowest mean of the tasks' training losses in the last epoch: {text}."


def _found_of_methods(found: Found, *, losses: bool) -> Iterator[str]:
    for row in found:
        if row not in (SINGLE, "Ours"):
            difference = _compared(_deltas(found, "Ours"), _deltas(found, row))
            yield f"Δm of Ours less that of {row}: {difference}."
    if losses:
        yield _lowest_loss(found)


def _found_of_phases(found: Found) -> Iterator[str]:
    for row in ("Phase 1", "Phase 2", "Phase 1, then 2"):
        difference = _compared(_deltas(found, "Mixed"), _deltas(found, row))
        yield f"Δm of Mixed less that of {row}: {difference}."
    yield _lowest_loss(found)
    falls = {
        row: {seed: correlation(result) for seed, result in found[row].items()}
        for row in ("Phase 1", "Phase 2")
    }
    means = ", ".join(f"{row} {cell(list(values.values()), 2)}" for row, values in falls.items())
    yield (
        f"Correlation of the losses' changes from epoch to epoch, mean over pairs: {means};"
        f" Phase 1 less Phase 2: {_compared(falls['Phase 1'], falls['Phase 2'])}."
    )
    for row in ("Phase 1", "Mixed"):
        runs = list(found[row].values())
        last = [shares(run.history[-1]) for run in runs]
        text = ", ".join(
            f"{task} {cell([share[i] for share in last], 1)}"
            for i, task in enumerate(runs[0].tasks)
        )
        moved = [_moved(run.history[len(run.history) // 2 :]) for run in runs]
        yield (
            f"{row}: % of channels by top-priority task at the end: {text}; in the second half,"
            f" {cell(moved, 2)} % of channels a task gains or loses from epoch to epoch."
        )


def _moved(history: list[dict[str, Any]]) -> float:
    """The mean net percentage of channels whose top-priority task changes between epochs."""
    steps = [np.abs(shares(b) - shares(a)).sum() / 2 for a, b in pairwise(history)]
    return float(np.mean(steps)) if steps else 0.0


def _found_of_weightings(parts: list[Part], results: list[Found]) -> Iterator[str]:
    networks = dict.fromkeys(part.published.rpartition("/")[0] for part in parts)
    for network in networks:
        chosen = [
            found
            for part, found in zip(parts, results, strict=True)
            if part.published.startswith(f"{network}/")
        ]
        ranges = []
        for row in chosen[0]:
            if row != SINGLE:
                means = [statistics.mean(_deltas(found, row).values()) for found in chosen]
                ranges.append((max(means) - min(means), row))
        text = ", ".join(f"{row} {width:.2f}" for width, row in sorted(ranges))
        yield f"{network}: range of Δm over the four weightings: {text}."


def _found_of_orders(found: Found) -> Iterator[str]:
    orders = {row: list(_deltas(found, row).values()) for row in found if row != SINGLE}
    means = [statistics.mean(values) for values in orders.values()]
    text = f"Range of Δm over the five orders: {max(means) - min(means):.2f}"
    if len(next(iter(orders.values()))) > 1:
        spread = statistics.mean(statistics.stdev(values) for values in orders.values())
        text += f"; standard deviation over the seeds of one order: {spread:.2f}"
    yield f"{text}."


def _draw(name: str, parts: list[Part], results: list[Found], out: Path) -> None:
    """Draws the paper's figures for the first seed."""
    tasks, title = list(TASKS[parts[0].data]), parts[0].title
    first = {row: next(iter(seeds.values())) for row, seeds in results[0].items() if row != SINGLE}
    runs = {
        row: {
            "losses": {task: result.losses()[task] for task in tasks},
            "priority": [epoch["shares"] for epoch in result.history],
        }
        for row, result in first.items()
    }
    if name in ("nyud", "pascal"):
        finals = {
            row: {
                task: [result.history[-1]["losses"][task] for result in seeds.values()]
                for task in tasks
            }
            for row, seeds in results[0].items()
            if row != SINGLE
        }
        plots.final_losses(finals, tasks, out / f"{name}_losses.svg", title)
    if name == "ablation":
        file = out / f"{name}_correlation.svg"
        plots.correlation(runs, tasks, ["Phase 1", "Phase 2"], file, title)
        file = out / f"{name}_priority.svg"
        plots.priority(runs, tasks, ["Phase 1", "Mixed"], file, title)
        file = out / f"{name}_priority_by_layer.svg"
        plots.priority_by_layer(runs["Mixed"], tasks, file, title)
