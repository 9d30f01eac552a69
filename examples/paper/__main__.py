"""Trains the missing runs of one of the paper's tables, and prints the table.

    python -m paper TABLE [--data ROOT] [--seeds 0 1 2] [--jobs N] [--out FOLDER] ...

ROOT contains the folders NYUD_MT, PASCAL_MT or cityscapes. Without ROOT, a small data set in the
same layout is made from one stereo photograph. FOLDER/runs has a folder for each run: interrupted
runs continue from their last epoch, and tables share runs.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from paper import tables
from paper.experiments import SMALL_PICTURES, TABLES, Part, table
from paper.runner import EXAMPLES, FailedRunsError, Place, missing, run_all
from paper.small import make_small
from paper.timing import STEPS, estimate, time_rows, timed_runs


def prepare(data: Path | None, parts: list[Part], out: Path) -> Path:
    """Returns the folder of the data sets; makes small ones if `data` is None."""
    if data is not None:
        return data
    root = out / "data"
    for part in parts:
        size = part.runs()[0].settings.size
        assert size is not None
        make_small(root, part.data, size=size, **SMALL_PICTURES)
    return root


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m paper",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path, help="the folder of the real data sets")
    parser.add_argument(
        "--seeds",
        type=_at_least(0),
        nargs="+",
        help="default: 0 1 2; only 0 for scaling and order on the small set",
    )
    parser.add_argument("--only", help="a part of scaling, such as nyud/resnet18")
    parser.add_argument(
        "--out", type=Path, help="default: examples/out/paper, for the small set its folder small"
    )
    parser.add_argument(
        "--jobs", type=_at_least(1), help="runs at once; default: 1 on GPUs, else one per core"
    )
    parser.add_argument("--ranks", type=_at_least(1), help="processes (or GPUs) per run")
    parser.add_argument("--epochs", type=_at_least(1), help="default: as published")
    parser.add_argument(
        "--workers", type=_at_least(0), help="processes that read pictures, for each run"
    )
    parser.add_argument("--amp", choices=["bfloat16", "float16"], help="mixed precision")
    parser.add_argument("--compile", action="store_true", help="compile the trunk")
    parser.add_argument(
        "--plan", action="store_true", help="print what is missing and about how long it takes"
    )
    return parser.parse_args()


def main() -> None:
    """Trains the missing runs, then writes and prints the table."""
    options = _options()
    console = Console()
    small = options.data is None
    out = options.out or EXAMPLES / "out" / "paper" / ("small" if small else "")
    changes: dict[str, object] = {
        name: getattr(options, name)
        for name in ("epochs", "workers", "amp", "ranks")
        if getattr(options, name) is not None
    }
    if options.compile:
        changes["compile"] = True
    few = small and options.table in ("scaling", "order")
    seeds = options.seeds or ([0] if few else [0, 1, 2])
    cuda = torch.cuda.is_available()
    jobs = options.jobs or (1 if cuda else os.cpu_count() or 1)
    if options.table == "time":
        jobs = 1  # The timed steps take turns in this process.
    threads = max(1, (os.cpu_count() or 1) // (jobs * (options.ranks or 1)))

    def make(name: str) -> list[Part]:
        parts = table(name, seeds, small=small, changes=changes)
        chosen = [part for part in parts if part.published.startswith(options.only or "")]
        if not chosen:
            known = ", ".join(part.published for part in parts)
            raise SystemExit(f"--only must be the start of one of {known}, got {options.only!r}")
        return chosen

    parts = make("nyud" if options.table == "time" else options.table)
    try:
        data = prepare(options.data, parts, out)
        start = time.perf_counter()
        place = Place(data, out / "runs", threads)
        if options.table == "time":
            place.fingerprint(parts[0].data)
            runs, steps = timed_runs(parts[0]), STEPS
        else:
            runs, steps = missing(parts, place), None
            console.print(f"{len(runs)} runs are missing")
        if options.plan:
            estimate(runs, place, jobs, console, steps)
            return
        if options.table == "time":
            rows = time_rows(parts[0], data)
        elif runs:
            run_all(runs, place, jobs, console)
    except (OSError, ValueError, FailedRunsError) as error:
        # Invalid arguments, missing data and failed runs need no traceback.
        raise SystemExit(str(error)) from error
    if options.table == "time":
        tables.write_time(rows, parts[0], out, console, small=small)
        return
    seconds = time.perf_counter() - start
    stem = "_".join([options.table, *(options.only or "").split("/")]).rstrip("_")
    tables.write(options.table, parts, place.runs, out, console, small=small, stem=stem)
    console.print(f"{len(runs)} runs in {seconds:.0f} s, written to {out}")


if __name__ == "__main__":
    main()
