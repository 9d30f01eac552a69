"""Writes the tables and plots of docs/benchmarks.md from the records in bench/results/.

    python bench/page.py [--check]

On the page, a table stands between `<!-- table: NAME -->` and `<!-- end -->`. With `--check`,
nothing is written, and the exit status is 1 if the page differs from the records. The benchmarks
print the same tables when they have run. Only the plots need more than the standard library.
"""

import difflib
import json
import re
import string
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.DOTALL)
BASELINE = "113922f"
"""An older commit, which was measured after a newer one to compare the two."""
PLOTS = {"phase2": "Phase 2", "methods": "Methods"}

STEPS = """Training steps: {network}, {tasks} tasks, {batch} pictures of {size} x {size}
    method: {method} | step ms: {milliseconds:.1f} | surgery ms: {surgery_milliseconds:.2f}
    of the step: {surgery_share:.2%} | host ms: {surgery_host_milliseconds:.2f}
    over Phase 1: {over_phase_1:+.1%}"""

TABLES = {
    "phase2": """Fused Phase 2 against the limit of memory
        network: {network} | K: {tasks} | dtype: {dtype} | N: {numel:M.2f} M | MB: {bytes:M.1f}
        ms: {milliseconds[p50]:.2f} | copy GB/s: {copy_gigabytes_per_second:.1f}
        x limit: {times_the_limit:.2f}
        x textbook PCGrad | x TorchJD matrix | x TorchJD step | x reference""",
    "phase2-records": """Phase 2 of ResNet-18, K = 4, float32, in every record
        date: {time:.10} | commit: {commit} | processor: {machine[cpu]} | torch: {versions[torch]}
        TorchJD: {versions[torchjd]} | ms: {milliseconds[p50]:.2f} | x limit: {times_the_limit:.2f}
        x textbook PCGrad | x TorchJD matrix | x TorchJD step""",
    "summary": """One step of ResNet-18's shapes ({numel:M.2f} M), K = 4, float32
        method: {method} | moved: {moved} N | ms: {ms:.1f} | x limit: {times_the_limit:.2f}
        x TorchJD: {peers[TorchJD step][ratio]:.1f} | x textbook loop: {textbook[ratio]:.1f}""",
    "methods": """Methods, from the `.grad` of K backward passes to the update in `.grad`
        network: {network} | K: {tasks} | method: {method} | MB: {bytes:M.0f}
        ms: {milliseconds[step]:.2f} | matrix ms: {milliseconds[matrix]:.2f}
        x limit: {times_the_limit:.2f} | x TorchJD step | x TorchJD matrix | x textbook | syncs: \
{synchronizations[ours]} / {synchronizations[TorchJD]} / {synchronizations[textbook]}""",
    "solvers": """Solvers, microseconds a call; the slower of a regular and a singular Gramian
        K: {tasks}""",
    "steps": STEPS,
    "gpu_steps": f"{STEPS}\n"
    "peak MB: {peak_bytes:M.0f} | launches: {launches} | waits: {synchronizations}",
    "features": """`backward` of {network} ({numel:M.2f} M) and its heads, {method}, {batch} \
pictures of {size} x {size}
        K: {tasks} | plain ms: {milliseconds[plain]:.1f} | ms: {milliseconds[all]:.1f}
        at features, ms: {milliseconds[features]:.1f} | x: {ratio:.2f} | x plain: {over_plain:.2f}
        checks, ms: {check_milliseconds:.2f} | plain MB: {peak_bytes[plain]:M.1f}
        MB: {peak_bytes[all]:M.1f} | at features, MB: {peak_bytes[features]:M.1f}
        of these, rows: {feature_bytes:M.2f}""",
    "together": """`step_together` against `step`: a whole training step
        network: {network} | N: {numel:M.2f} M | K: {tasks} | batch: {batch}
        step ms: {milliseconds[step]:.0f} | together ms: {milliseconds[together]:.0f}
        together / step: {ratio:.2f} | gradients MB: {gradient_bytes[step]:M.1f}
        together MB: {gradient_bytes[together]:M.1f} | N + K layers MB: {aim_bytes:M.1f}
        process MB: {resident_bytes[step]:M.0f}
        together, process MB: {resident_bytes[together]:M.0f}""",
    "gpu_together": """`step_together` against `step` on a GPU: a whole training step
        network: {network} | K: {tasks} | batch: {batch} | size: {size}
        step ms: {milliseconds[step]:.1f} | together ms: {milliseconds[together]:.1f}
        together / step: {ratio:.2f} | launches: {on_device[step][launches]}
        together, launches: {on_device[together][launches]}
        waits: {on_device[step][synchronizations]}
        together, waits: {on_device[together][synchronizations]}
        peak MB: {on_device[step][peak_bytes]:M.0f}
        together, peak MB: {on_device[together][peak_bytes]:M.0f}""",
    "host": """The host's part of the surgery on a GPU: {layers} layers, {tasks} tasks
        method: {method} | keep ms: {milliseconds[keep]:.2f}
        collect ms: {milliseconds[collect]:.2f} | combine ms: {milliseconds[combine]:.2f}""",
    "ranks": """ResNet-18, {tasks} tasks, N = {numel:M.2f} M, float32; updates differ from the \
textbook way's by {error:.0e}
        step: {method} | W: {ranks} | way: {way} | gradients: {sent[gradients]:.3f}
        parameters: {sent[parameters]:.3f} | heads, norms: {sent[other gradients]:.4f}
        sums: {sent[sums]:.4f} | control, bytes: {sent_bytes[control]:.0f}
        collectives: {devices} + {collectives[control]}
        peak: {peak:.2f} | kept: {kept:.2f}""",
    "gpu": """Fused Phase 2 on a GPU
        backend: {backend} | network: {network} | K: {tasks} | dtype: {dtype} | N: {numel:M.2f} M
        replayed ms: {replayed_milliseconds[p50]:.3f} | step ms: {milliseconds[p50]:.3f}
        copy GB/s: {copy_gigabytes_per_second:.0f} | of the limit: {fraction_of_limit:.0%}
        launches: {launches} | waits: {synchronizations}
        x textbook PCGrad | x TorchJD matrix | x TorchJD step | x reference""",
}
"""The title of each table, then `header: cell` of its columns; a case of a record fills in both.

A column `x PEER` without a cell has the time of that peer over ours.
"""


class Cell(string.Formatter):
    """str.format with "-" for what a case does not have, and `M` for a number in millions."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        if format_spec.startswith("M"):
            value, format_spec = value / 1e6, format_spec[1:]
        return format(value, format_spec)


CELL = Cell()


def table(name: str, cases: list[Case]) -> str:
    """The title and the cells of a table, in Markdown."""
    title, *columns = re.split(r"\s*[|\n]\s*", TABLES[name])
    if name == "solvers":
        columns += [f"{key}: {{microseconds[{key}]:.1f}}" for key in cases[0]["microseconds"]]
    if name == "together":  # Where gradients were not counted, there is nothing to compare with.
        cases = [c if c["gradient_bytes"] else {**c, "aim_bytes": None} for c in cases]
    if name == "ranks":
        error = max(c["error"] for c in cases)
        numbers = [c["collectives"] for c in cases]
        devices = [sum(number.values()) - number["control"] for number in numbers]
        cases = [{**c, "error": error, "devices": n} for c, n in zip(cases, devices, strict=True)]
    cells = {}
    for column in columns:
        header, _, cell = column.partition(": ")
        cells[header] = cell or f"{{peers[{header[2:]}][ratio]:.1f}}"
    rows = [[CELL.vformat(cell, (), case) for cell in cells.values()] for case in cases]
    return markdown(CELL.vformat(title, (), cases[0]), [*cells], rows)


def markdown(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table in columns of even width; those of numbers are aligned at the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [not any(re.match("[A-Za-z]", cell) for cell in column[1:]) for column in columns]
    lines = [header, ["-" * (n - r) + ":" * r for n, r in zip(widths, right, strict=True)], *rows]
    shape = " | ".join(f"{{:{'>' if r else '<'}{n}}}" for n, r in zip(widths, right, strict=True))
    return "\n".join([f"{title}:", "", *(f"| {shape.format(*line)} |" for line in lines)])


def clean_records(name: str) -> list[Record]:
    """The records of commits without local changes, the oldest first."""
    path = RESULTS / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [r for r in found if r["commit"] and not r["commit"].endswith("-dirty")]


def newest(name: str) -> Record:
    """The newest record of a file; for `methods`, of those with the largest network."""
    for record in reversed(clean_records(name)):
        whole = name != "methods" or any(c["network"] == "resnet50" for c in record["cases"])
        if record["commit"] != BASELINE and whole:
            return record
    raise SystemExit(f"bench/results/{name}.jsonl has no record for its table")


def source(name: str, record: Record) -> str:
    """The record that a table comes from."""
    facts = {**record["machine"], **record["versions"]}
    facts["threads"] = record["cases"][0].get("threads", facts["threads"])
    origin = [f"commit {record['commit']}", record["time"][:10]]
    origin += [f"{key} {value}" for key, value in facts.items() if value]
    return f"Record: `bench/results/{name}.jsonl`, {', '.join(origin)}."


def recorded(name: str) -> Iterator[str]:
    """The newest record's table, which the benchmark itself prints, and its plot."""
    record = newest(name)
    cases = record["cases"]
    if name == "methods":
        small = [c for c in cases if (c["network"], c["tasks"]) == ("small", 4)]
        cases = [c for c in cases if is_main(c)]
        for c, counted in zip(cases, small, strict=True):  # The textbook's are counted there alone.
            c["synchronizations"] = {**counted["synchronizations"], **c["synchronizations"]}
    yield table(name, cases)
    yield source(name, record)
    if name == "ranks":
        buckets = next(c["buckets"] for c in cases if c["buckets"])
        yield f"Buckets of replicated ranks, in MB: {', '.join(f'{n / 1e6:.1f}' for n in buckets)}."
    if name in PLOTS:
        yield f"![{PLOTS[name]}: time against the limit](images/{name}.png)"


def is_main(c: Case) -> bool:
    """ResNet-18 with 4 tasks in float32, which most tables are about."""
    main = c["network"], c["tasks"], c.get("dtype", "float32")
    return main == ("resnet18", 4, "float32")


def summary() -> Iterator[str]:
    """Phase 2 and all methods, in the newest records that have the main case."""
    phase2, methods = clean_records("phase2")[-1], clean_records("methods")[-1]
    cases = []
    for c in filter(is_main, [*phase2["cases"], *methods["cases"]]):
        peers, milliseconds = c["peers"], c["milliseconds"]
        more = {
            "method": c.get("method", "Phase 2"),
            "moved": round(c["bytes"] / c["numel"] / 4),
            "ms": milliseconds.get("step") or milliseconds["p50"],
            "textbook": peers.get("textbook") or peers.get("textbook PCGrad", {}),
        }
        cases.append({**c, **more})
    yield table("summary", cases)
    yield source("phase2", phase2)
    yield source("methods", methods)


def phase2_records() -> Iterator[str]:
    """The main case in every record."""
    cases = [{**r, **c} for r in clean_records("phase2") for c in filter(is_main, r["cases"])]
    for c in cases:  # The first records have TorchJD on a matrix alone, under another name.
        c["peers"].setdefault("TorchJD matrix", c["peers"].get("TorchJD PCGrad", {}))
    yield table("phase2-records", cases)
    yield "Records: `bench/results/phase2.jsonl`."


def sizes() -> Iterator[str]:
    """A table for each ratio of the methods: every network and number of tasks in a column."""
    record = newest("methods")
    found = {(c["method"], f"{c['network']}, K = {c['tasks']}"): c for c in record["cases"]}
    methods, columns = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    cells = {"x limit": "{times_the_limit:.2f}"}
    for peer in ("TorchJD step", "TorchJD matrix", "textbook"):
        cells[f"x {peer}"] = f"{{peers[{peer}][ratio]:.1f}}"
    for name, cell in cells.items():
        rows = [[m, *(CELL.vformat(cell, (), found[m, c]) for c in columns)] for m in methods]
        rows = [row for row in rows if set(row[1:]) != {"-"}]
        yield markdown(f"{name}, by network and number of tasks", ["method", *columns], rows)
    yield source("methods", record)


def gpu() -> Iterator[str]:
    """What has been measured on a GPU."""
    names = [name for name in ("gpu", "gpu_steps", "gpu_together") if clean_records(name)]
    for name in names:
        yield from recorded(name)
    if not names:
        yield "Nothing has run on a GPU yet, so there is no number."


def page(text: str) -> str:
    """The page with its tables as the records have them."""
    others = {"summary": summary, "phase2-records": phase2_records, "sizes": sizes, "gpu": gpu}

    def filled(match: re.Match[str]) -> str:
        name = match[2]
        parts = others[name]() if name in others else recorded(name)
        return "\n\n".join([match[1], *parts, match[3]])

    return BLOCK.sub(filled, text)


def draw(name: str) -> None:
    """Plots the times of ours and of the peers over that of the limit."""
    import matplotlib.pyplot as plt

    record = newest(name)
    cases = record["cases"]
    if name == "methods":  # Without "TorchJD matrix", which compares with another time of ours.
        cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] in (4, 16)]
        for c in cases:
            c["peers"].pop("TorchJD matrix")
    names = [f"{c.get('method', c['network'])}\nK={c['tasks']} {c.get('dtype', '')}" for c in cases]
    series = {"limit": [1.0] * len(cases), "ours": [c["times_the_limit"] for c in cases]}
    for peer in dict.fromkeys(peer for c in cases for peer in c["peers"]):
        ratios = [c["peers"].get(peer, {}).get("ratio", float("nan")) for c in cases]
        series[peer] = [a * b for a, b in zip(series["ours"], ratios, strict=True)]
    figure, axes = plt.subplots(figsize=(max(7, 1.1 * len(cases)), 4), layout="constrained")
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [x + i * width - 0.4 for x in range(len(cases))]
        axes.bar(places, values, width, align="edge", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), names, fontsize=7)
    axes.set_ylabel("time / limit of memory")
    axes.set_title(f"{record['machine']['cpu']}, commit {record['commit']}", fontsize=9)
    axes.legend(fontsize=8, ncols=len(series))
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def main() -> int:
    """Writes the page and the plots, or checks the page."""
    now = PAGE.read_text()
    wanted = page(now)
    if sys.argv[1:] == ["--check"]:
        lines = now.splitlines(), wanted.splitlines()
        print("\n".join(difflib.unified_diff(*lines, "page", "records", lineterm="")))
        return int(now != wanted)
    PAGE.write_text(wanted)
    for name in PLOTS if find_spec("matplotlib") else ():
        draw(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
