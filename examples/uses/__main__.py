"""Makes the missing runs of a use, and writes its table and pictures.

    python -m uses NAME [--seeds 0 1 2 3 4] [--quick] [--jobs N] [--device cuda] [--out FOLDER]

An interrupted run starts over; finished runs are stored in FOLDER/NAME/runs.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

from rich.console import Console

from uses.use import Use, default_jobs, run_all, write

NAMES = (
    "pinn",
    "digits",
    "tabular",
    "finetune",
    "priorities",
    "agreement",
    "photograph",
    "lagged",
    "protect",
)


def main(arguments: list[str] | None = None) -> None:
    """Trains, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m uses",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("use", choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="tiny runs, to see whether they work")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="runs at once")
    parser.add_argument("--device", default="cpu", help="where the networks are trained")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "out" / "uses")
    options = parser.parse_args(arguments)
    use: Use = importlib.import_module(f"uses.{options.use}").USE
    folder = options.out / use.name / ("quick" if options.quick else "")
    folder.mkdir(parents=True, exist_ok=True)
    console, start = Console(), time.perf_counter()
    try:
        given = options.seeds, options.quick, options.jobs
        results = run_all(use, *given, folder, console, options.device)
    except KeyboardInterrupt:
        console.print("stopped: run the same command again for the remaining runs")
        sys.exit(130)
    write(use, results, folder, console)
    console.print(f"written to {folder} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
