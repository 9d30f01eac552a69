"""Writes the tables of docs/benchmarks.md from the records under bench/results/.

    python bench/page.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, with the record and the command
that it comes from; all other text is written by hand and has no measured number. `--check` changes
nothing, prints what differs and exits with 1. It needs nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from harness import tables
from harness.tables import Cases, Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

Record = dict[str, Any]

BASELINES = {("host", "2026-11-22T12:44:48+00:00")}
"""Runs of an older commit that were made for comparison, after those of a newer one."""

NOT_TABLES = {"gpu_tests"}
"""Records of tests, not of benchmarks."""

PYTEST = ".venv/bin/python -m pytest bench/test_{}.py --benchmark-disable-gc"
COMMANDS = {
    "phase2": PYTEST.format("phase2"),
    "methods": PYTEST.format("methods"),
    "solvers": PYTEST.format("methods"),
    "steps": PYTEST.format("steps"),
    "features": PYTEST.format("features"),
    "together": PYTEST.format("together"),
    "host": PYTEST.format("host"),
    "ranks": ".venv/bin/python bench/ranks.py",
    "gpu": "make bench-gpu",
    "gpu_steps": "make bench-gpu",
    "gpu_together": "make bench-gpu",
}
"""By name of a record file, the command that appends to it."""


def records(name: str) -> list[Record]:
    """All records of a file, the oldest first."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_clean(record: Record) -> bool:
    """Whether the commit says what ran."""
    return bool(record["commit"]) and not record["commit"].endswith("-dirty")


def last(name: str, suits: Callable[[Cases], bool] = lambda cases: True) -> Record | None:
    """The last record of a clean commit that suits and is no baseline."""
    for record in reversed(records(name)):
        is_baseline = (name, record["time"]) in BASELINES
        if is_clean(record) and not is_baseline and suits(record["cases"]):
            return record
    return None


def needed(name: str, suits: Callable[[Cases], bool] = lambda cases: True) -> Record:
    """The same; a table without a record has to go."""
    record = last(name, suits)
    if record is None:
        raise SystemExit(f"bench/results/{name}.jsonl has no record for its table")
    return record


def has(*wanted: tuple[Any, ...], keys: tuple[str, ...]) -> Callable[[Cases], bool]:
    """Whether cases with certain values are there."""
    return lambda cases: set(wanted) <= {tuple(c.get(key) for key in keys) for c in cases}


def source(name: str, record: Record) -> str:
    """Where a table comes from, and what makes such a record."""
    machine = record["machine"]
    parts = [machine["gpu"]] if machine.get("gpu") else []
    threads = record["cases"][0].get("threads", machine["threads"])
    parts += [machine["cpu"], f"{machine['cores']} cores", f"threads: {threads}"]
    parts += [machine["instruction_set"], f"Python {machine['python']}"]
    parts += [f"{package} {version}" for package, version in record["versions"].items()]
    text = (
        f"Record: `bench/results/{name}.jsonl`, commit {record['commit']}, {record['time'][:10]};"
        f" {', '.join(parts)}."
    )
    wrapped = fill(text, width=105, break_long_words=False, break_on_hyphens=False)
    return f"{wrapped}\nCommand: `{COMMANDS[name]}`"


def shown(table: Table) -> str:
    """A caption and the cells."""
    return "\n".join([f"{table.title}:", "", *tables.markdown(table)])


def plot(name: str, text: str) -> Iterator[str]:
    """The plot that was drawn with the last record of a file."""
    if (RESULTS / f"{name}.png").exists():
        yield f"![{text}](images/{name}.png)"


def recorded(name: str, record: Record) -> Iterator[str]:
    """The table that the benchmark itself prints."""
    yield shown(tables.TABLES[name](record["cases"]))
    yield source(name, record)


def phase2() -> Iterator[str]:
    record = needed("phase2")
    yield from recorded("phase2", record)
    yield from plot("phase2", "Phase 2: time against the limit")


def is_main(case: dict[str, Any]) -> bool:
    """The case that most tables are about."""
    wanted = ("resnet18", 4, "float32")
    return (case["network"], case["tasks"], case.get("dtype", "float32")) == wanted


def phase2_records() -> Iterator[str]:
    """One case in every record of a clean commit: its scatter, and another processor."""
    rows = []
    for record in filter(is_clean, records("phase2")):
        (case,) = filter(is_main, record["cases"])
        peers = case["peers"]
        if "TorchJD PCGrad" in peers:  # The first records have it on a matrix alone.
            peers = {**peers, "TorchJD matrix": peers["TorchJD PCGrad"]}
        case = {**case, "peers": peers}
        rows.append(
            [
                *(record["time"][:10], record["commit"], record["machine"]["cpu"]),
                *(f"{record['versions'][package]}" for package in ("torch", "torchjd")),
                *(f"{case['milliseconds']['p50']:.2f}", f"{case['times_the_limit']:.2f}"),
                *(tables.ratio(case, peer) for peer in tables.PHASE2_PEERS[:3]),
            ]
        )
    header = ["date", "commit", "processor", "torch", "TorchJD", "ms", "x limit"]
    header += [f"x {peer}" for peer in tables.PHASE2_PEERS[:3]]
    yield shown(Table("Phase 2 of ResNet-18, K = 4, float32, in every record", header, rows))
    yield f"Records: `bench/results/phase2.jsonl`.\nCommand: `{COMMANDS['phase2']}`"


def every_method(record: Record) -> list[str]:
    """The names, in the record's order."""
    return list(dict.fromkeys(c["method"] for c in record["cases"]))


def summary() -> Iterator[str]:
    """Ours, TorchJD's and the textbook's, in the last record that has the main case."""
    trunk = needed("phase2", lambda cases: any("TorchJD step" in c["peers"] for c in cases))
    others = needed("methods", lambda cases: any(map(is_main, cases)))
    (of_phase2,) = filter(is_main, trunk["cases"])
    cases = [(of_phase2, "Phase 2", of_phase2["milliseconds"]["p50"], "textbook PCGrad")]
    for c in filter(is_main, others["cases"]):
        cases.append((c, c["method"], c["milliseconds"]["step"], "textbook"))
    header = ["method", "moved", "ms", "x limit", "x TorchJD", "x textbook loop"]
    rows = [
        [
            *(method, f"{round(c['bytes'] / c['numel'] / 4)} N", f"{milliseconds:.1f}"),
            *(f"{c['times_the_limit']:.2f}", tables.ratio(c, "TorchJD step")),
            tables.ratio(c, textbook),
        ]
        for c, method, milliseconds, textbook in cases
    ]
    numel = tables.millions(of_phase2["numel"])
    yield shown(Table(f"One step of ResNet-18's shapes ({numel}), K = 4, float32", header, rows))
    yield source("phase2", trunk)
    yield source("methods", others)


def whole(cases: Cases) -> bool:
    """All networks and numbers of tasks."""
    return has(("small", 2), ("resnet50", 16), keys=("network", "tasks"))(cases)


def methods() -> Iterator[str]:
    record = needed("methods", whole)
    # The textbook's host synchronizations are counted once, in the smallest network.
    counted = {
        c["method"]: c["synchronizations"]
        for c in record["cases"]
        if (c["network"], c["tasks"]) == ("small", 4)
    }
    cases = [
        {**c, "synchronizations": {**counted[c["method"]], **c["synchronizations"]}}
        for c in filter(is_main, record["cases"])
    ]
    yield from recorded("methods", {**record, "cases": cases})
    yield from plot("methods", "Methods: time against the limit")


def sizes() -> Iterator[str]:
    """Every network and number of tasks in a column."""
    record = needed("methods", whole)
    found = {(c["method"], c["network"], c["tasks"]): c for c in record["cases"]}
    columns = list(dict.fromkeys((network, tasks) for _, network, tasks in found))
    header = ["method", *(f"{network}, K = {tasks}" for network, tasks in columns)]
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "x limit": lambda case: f"{case['times_the_limit']:.2f}",
        **{f"x {peer}": partial(tables.ratio, peer=peer) for peer in tables.METHOD_PEERS},
    }
    for title, cell in cells.items():
        rows = [
            [method, *(cell(found[(method, *column)]) for column in columns)]
            for method in every_method(record)
        ]
        rows = [row for row in rows if set(row[1:]) != {"-"}]
        yield shown(Table(f"{title}, by network and number of tasks", header, rows))
    yield source("methods", record)


def ranks() -> Iterator[str]:
    record = needed("ranks", has((1,), (2,), (4,), keys=("ranks",)))
    yield from recorded("ranks", record)
    buckets = next(c["buckets"] for c in record["cases"] if c["buckets"])
    yield f"Buckets of replicated ranks, in MB: {', '.join(f'{n / 1e6:.1f}' for n in buckets)}."


def gpu() -> Iterator[str]:
    found = {name: last(name) for name in ("gpu", "gpu_steps", "gpu_together")}
    for name, record in found.items():
        if record is not None:
            yield from recorded(name, record)
            yield from plot(name, f"{name}: time against the limit")
    if not any(found.values()):
        yield "Nothing has run on a GPU yet, so there is no number."


BLOCKS: dict[str, Callable[[], Iterator[str]]] = {
    "summary": summary,
    "phase2": phase2,
    "phase2-records": phase2_records,
    "methods": methods,
    "sizes": sizes,
    "solvers": lambda: recorded("solvers", needed("solvers")),
    "steps": lambda: recorded("steps", needed("steps", has(("demo",), keys=("network",)))),
    "features": lambda: recorded("features", needed("features")),
    "together": lambda: recorded("together", needed("together")),
    "host": lambda: recorded("host", needed("host")),
    "ranks": ranks,
    "gpu": gpu,
}


BLOCK = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", flags=re.DOTALL)


def page(text: str) -> str:
    """The page with its tables as the records have them."""
    found = [match[2] for match in BLOCK.finditer(text)]
    if sorted(found) != sorted(BLOCKS):
        raise SystemExit(f"{PAGE.name} has the tables {sorted(found)}, wanted: {sorted(BLOCKS)}")
    unknown = {path.stem for path in RESULTS.glob("*.jsonl")} - set(COMMANDS) - NOT_TABLES
    if unknown:
        raise SystemExit(f"bench/results/ has records that no table shows: {sorted(unknown)}")

    def filled(match: re.Match[str]) -> str:
        parts = "\n\n".join(BLOCKS[match[2]]())
        return f"{match[1]}\n{parts}\n\n{match[4]}"

    return BLOCK.sub(filled, text)


def main() -> int:
    """Writes the page or checks it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if files differ")
    check = parser.parse_args().check
    now = PAGE.read_text()
    wanted = page(now)
    name = PAGE.relative_to(ROOT)
    if now == wanted:
        return 0
    if not check:
        PAGE.write_text(wanted)
        print(f"{name} written")
        return 0
    print(f"{name} differs from the records: run python bench/page.py")
    pair = now.splitlines(), wanted.splitlines()
    print("\n".join(difflib.unified_diff(*pair, "now", "from the records", lineterm="")))
    return 1


if __name__ == "__main__":
    sys.exit(main())
