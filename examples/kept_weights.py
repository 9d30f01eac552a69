"""Trains the demo's network with task weights that are kept for 1, 5 and 20 steps, over seeds.

    python examples/kept_weights.py [--quick] [--seeds 0 1 ...] [--out FOLDER]

The script writes final losses and metrics, and compares the differences due to kept weights with
the deviations between seeds. All rows of a seed have the same initial weights and crops; PCGrad
draws its orders with the same seed.

The results do not show the time that kept weights save: task-specific normalization needs `step`,
which makes a forward and a backward pass per task in any case, whereas `backward` would make one
pass for all tasks.
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import demo
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stereo import MEASURES, TASKS, load
from table import cell, markdown, show

import cs_kernels as cs

QUICK = replace(demo.QUICK, epochs=3)
METHODS = ("UPGrad", "PCGrad")
EVERY = (1, 5, 20)

Key = tuple[str, int]
"""A row: the method, and its `update_every`."""
Runs = dict[Key, list[dict[str, Any]]]
"""By row, one run per seed: losses by task and epoch, metrics, cosines by epoch and pair."""

SUM: Key = ("Sum", 1)

PRIMARY = [measure for measure in MEASURES if measure.counts]
HEAD = [
    "method",
    "update_every",
    *(f"{task} loss↓" for task in TASKS),
    *(f"{measure.task} {measure.title.replace('*', '')}" for measure in PRIMARY),
]
DIGITS = [4] * len(TASKS) + [measure.digits for measure in PRIMARY]


def rows(seed: int) -> dict[Key, demo.Row]:
    """The plain sum, and every method with every `update_every`."""
    makers = {"UPGrad": cs.UPGrad, "PCGrad": partial(cs.PCGrad, seed=seed)}
    kept = {
        (name, every): demo.Row(partial(makers[name], update_every=every))
        for name in METHODS
        for every in EVERY
    }
    return {SUM: demo.Row(cs.Sum), **kept}


def label(key: Key) -> str:
    """The name of a row."""
    return key[0] if key == SUM else f"{key[0]}, every {key[1]}"


def train_all(settings: demo.Settings, seeds: list[int], console: Console) -> Runs:
    """Trains every row for every seed."""
    train, test = load()
    runs: Runs = {}
    columns = (
        TextColumn("{task.description:>24}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for seed in seeds:
            for key, row in rows(seed).items():
                run = demo.Run(list(TASKS), row, settings, seed, train, demo.Ranks())
                run.train(f"{label(key)}, seed {seed}", progress)
                metrics = run.evaluate(test)
                found = {"losses": run.losses, "metrics": metrics, "cosines": run.cosines}
                runs.setdefault(key, []).append(found)
            if not console.is_terminal:
                console.print(f"seed {seed}: trained")
    return runs


def figures(run: dict[str, Any]) -> list[float]:
    """A run's numbers for the tables: losses of the last epoch, primary metrics."""
    losses = [run["losses"][task][-1] for task in TASKS]
    return losses + [run["metrics"][measure.task][measure.name] for measure in PRIMARY]


def final_rows(runs: Runs) -> list[list[str]]:
    """Means over seeds, with deviations if there are several."""
    return [
        [name, "" if (name, every) == SUM else str(every), *_cells(map(figures, of_row))]
        for (name, every), of_row in runs.items()
    ]


def difference_rows(runs: Runs) -> list[list[str]]:
    """Each method's deviation between seeds, and differences between rows of one seed."""
    found = []
    for name in METHODS:
        first = [figures(run) for run in runs[name, 1]]
        if len(first) > 1:
            deviations = map(statistics.stdev, zip(*first, strict=True))
            texts = [f"{x:.{digits}f}" for x, digits in zip(deviations, DIGITS, strict=True)]
            found.append([name, "1: deviation between seeds", *texts])
        others = {(name, every): [name, f"{every} minus 1"] for every in EVERY if every > 1}
        for key, titles in [*others.items(), (SUM, [f"Sum minus {name}", "1"])]:
            changes = [
                [value - of_first for value, of_first in zip(figures(run), base, strict=True)]
                for run, base in zip(runs[key], first, strict=True)
            ]
            found.append([*titles, *_cells(changes, "+")])
    return found


def _cells(of_seeds: Any, sign: str = "") -> list[str]:
    columns = zip(zip(*of_seeds, strict=True), DIGITS, strict=True)
    return [cell(values, digits, sign) for values, digits in columns]


def main() -> None:
    """Trains, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="30 seconds, to see whether it runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    settings = QUICK if options.quick else demo.Settings()
    console = Console()
    start = time.perf_counter()
    runs = train_all(settings, options.seeds, console)
    options.out.mkdir(parents=True, exist_ok=True)
    write(runs, options.out, console)
    console.print(f"written to {options.out} after {time.perf_counter() - start:.0f} s")


def write(runs: Runs, out: Path, console: Console) -> None:
    """Prints the tables, and writes them to `out`."""
    seeds = f"seeds: {len(runs[SUM])}"
    tables = {
        f"Last epoch's training losses, metrics of the evaluation part; {seeds}": final_rows(runs),
        f"Differences between rows of the same seed; {seeds}": difference_rows(runs),
    }
    for title, body in tables.items():
        show(console, title, HEAD, body)
    parts = (f"{title}:\n\n{markdown(HEAD, body)}" for title, body in tables.items())
    (out / "kept_weights.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
