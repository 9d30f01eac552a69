"""The tables of README.md and docs/, each by one function of the last records."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
USES = ROOT / "examples" / "results" / "uses"

Record = dict[str, Any]
Row = dict[str, str]


def last(name: str, network: str | None = None) -> Record:
    """The last record that contains the network and comes from a clean checkout."""
    for line in reversed((RESULTS / f"{name}.jsonl").read_text().splitlines()):
        record: Record = json.loads(line)
        networks = {None, *(c.get("network") for c in record["cases"])}
        if network in networks and not record["commit"].endswith("-dirty"):
            return {"name": name, **record}
    raise LookupError(f"no record of {network} from a clean checkout in {name}.jsonl")


def main_cases(record: Record) -> list[Record]:
    """The cases of ResNet-18 with 4 tasks in float32."""
    return [
        c
        for c in record["cases"]
        if (c["network"], c["tasks"], c.get("dtype", "float32")) == ("resnet18", 4, "float32")
    ]


def _mb(size: float | None, digits: int = 0) -> str:
    return "-" if size is None else f"{size / 1e6:.{digits}f}"


def _over_peers(case: Record) -> Row:
    ratios = {name: f"{peer['ratio']:.1f}" for name, peer in case["peers"].items()}
    names = ("TorchJD step", "TorchJD matrix", "textbook")
    return {f"x {name}": ratios.get(name, "-") for name in names}


def _summary(phase2: Record, methods: Record) -> Iterable[Row]:
    for c in main_cases(phase2) + main_cases(methods):
        times, waits = c["milliseconds"], c.get("synchronizations", {})
        yield {
            "method": c.get("method", "Phase 2"),
            "ms": f"{times.get('step') or times['p50']:.1f}",
            "x limit": f"{c['times_the_limit']:.2f}",
            **_over_peers(c),
            "syncs": str(waits.get("ours", "-")),
            "TorchJD's syncs": str(waits.get("TorchJD", "-")),
        }


def _phase2(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        yield {
            "network": c["network"],
            "K": str(c["tasks"]),
            "dtype": c["dtype"],
            "ms": f"{c['milliseconds']['p50']:.2f}",
            "copy GB/s": f"{c['copy_gigabytes_per_second']:.1f}",
            "x limit": f"{c['times_the_limit']:.2f}",
            **_over_peers(c),
            "x reference": f"{c['peers']['reference']['ratio']:.1f}",
        }


def _sizes(record: Record) -> Iterable[Row]:
    rows: dict[tuple[str, int], Row] = {}
    for c in record["cases"]:
        row = rows.setdefault((c["network"], c["tasks"]), {})
        row |= {"network": c["network"], "K": str(c["tasks"])}
        row[c["method"]] = f"{c['peers']['TorchJD step']['ratio']:.1f}"
    return rows.values()


def _solvers(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        yield {"K": str(c["tasks"])} | {k: f"{v:.1f}" for k, v in c["microseconds"].items()}


def _steps(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        yield {
            "method": c["method"],
            "step ms": f"{c['milliseconds']:.1f}",
            "surgery ms": f"{c['surgery_milliseconds']:.2f}",
            "of the step": f"{c['surgery_share']:.2%}",
            "over Phase 1": f"{c['over_phase_1']:+.1%}",
        }


def _price(record: Record) -> Iterable[Row]:
    of_ways: dict[tuple[str, str], dict[int, Record]] = {}
    for c in record["cases"]:
        of_ways.setdefault((c["network"], c["step"]), {})[c["tasks"]] = c
    for (network, step), by_tasks in of_ways.items():
        yield {
            "network": network,
            "step": step,
            **{f"x, {n} tasks": f"{by_tasks[n]['over_plain']:.2f}" for n in (2, 4, 8)},
            **{f"MB, {n} tasks": _mb(by_tasks[n]["peak_bytes"]) for n in (2, 4, 8)},
            "MB between": _mb(by_tasks[8].get("between_peak_bytes")),
        }


def _peers(record: Record) -> Iterable[Row]:
    cases = iter(record["cases"])
    for ours, batched, peer in zip(cases, cases, cases, strict=True):
        low, high = ([c["quartiles"][end] for c in (ours, batched)] for end in ("low", "high"))
        yield {
            "network": peer["network"],
            "K": str(peer["tasks"]),
            "ours, ms": f"{ours['milliseconds']:.1f}",
            "x TorchJD": f"{ours['over_fastest']:.2f}",
            "quartiles": f"{low[0]:.2f} to {high[0]:.2f}",
            "x TorchJD, batched": f"{batched['over_fastest']:.2f}",
            "quartiles, batched": f"{low[1]:.2f} to {high[1]:.2f}",
            "MB": f"{_mb(ours['peak_bytes'])} → {_mb(batched['peak_bytes'])}",
            "TorchJD's MB": _mb(peer["peak_bytes"]),
            "page faults": f"{ours['faults']:.0f} → {batched['faults']:.0f}",
            "TorchJD's": f"{peer['faults']:.0f}",
            "TorchJD's fastest": peer["step"],
        }


def _limits(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        if not c["step"].endswith("plain"):
            yield {
                "network": c["network"],
                "step": c["step"],
                "K": str(c["tasks"]),
                "ms": f"{c['milliseconds']:.0f}",
                "x plain": f"{c['over_plain']:.2f}",
                "limit": f"{c['limit']:.2f}",
                "x plain / limit": f"{c['over_limit']:.2f}",
                "MB": _mb(c.get("peak_bytes")),
            }


def _features(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        times, peaks = c["milliseconds"], c["peak_bytes"]
        yield {
            "K": str(c["tasks"]),
            "plain ms": f"{times['plain']:.1f}",
            "exact ms": f"{times['all']:.1f}",
            "features ms": f"{times['features']:.1f}",
            "exact / features": f"{c['ratio']:.2f}",
            "features / plain": f"{c['over_plain']:.2f}",
            "plain MB": _mb(peaks["plain"], 1),
            "exact MB": _mb(peaks["all"], 1),
            "features MB": _mb(peaks["features"], 1),
            "rows MB": _mb(c["feature_bytes"], 2),
        }


def _sketches(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        yield {
            "dtype": c["dtype"],
            "threads": str(c["threads"]),
            "ms": f"{c['milliseconds']['sketch']:.1f}",
            "x reading": f"{c['over_read']:.2f}",
            "x Gramian of one task": f"{c['over_gramian']:.2f}",
            "with weighting, x weighting": f"{c['over_weigh']:.2f}",
        }


def _balancer(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        if not c["step"].endswith("plain"):
            yield {
                "network": c["network"],
                "K": str(c["tasks"]),
                "batch": str(c["batch"]),
                "passes": c["step"],
                "ms": f"{c['milliseconds']:.0f}",
                "x plain passes": f"{c['over_plain']:.2f}",
                "extra gradients": f"{c['extra_over_gradient']:.2f}",
            }


def _together(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        times, gradients, process = c["milliseconds"], c["gradient_bytes"], c["resident_bytes"]
        yield {
            "network": c["network"],
            "N": f"{c['numel'] / 1e6:.2f} M",
            "K": str(c["tasks"]),
            "batch": str(c["batch"]),
            "time": f"{times['step']:.0f} → {times['together']:.0f}",
            "ratio": f"{c['ratio']:.2f}",
            "gradients": " → ".join(_mb(size, 1) for size in gradients.values()) or "-",
            "process": f"{_mb(process['step'])} → {_mb(process['together'])}",
        }


def _host(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        times = c["milliseconds"]
        parts = ("keep", "collect", "combine")
        yield {"method": c["method"]} | {f"{part} ms": f"{times[part]:.2f}" for part in parts}


def _ranks(record: Record) -> Iterable[Row]:
    for c in record["cases"]:
        if c["ranks"] == 1 or c["method"] == "PCGrad":
            continue
        control = c["by_kind"].get("control", {})
        gradients = [sent for kind, sent in c["by_kind"].items() if kind != "control"]
        yield {
            "step": c["method"],
            "W": str(c["ranks"]),
            "way": c["way"],
            **{
                kind: f"{sum(of[kind][1] for of in gradients if kind in of) / 4 / c['numel']:.3f}"
                for kind in ("reduce-scatter", "all-gather", "all-reduce")
            },
            "control, bytes": f"{sum(size for _, size in control.values()):.0f}",
            "peak": f"{c['peak']:.2f}",
            "kept": f"{c['kept']:.2f}",
        }


TABLES: dict[str, tuple[Callable[..., Iterable[Row]], list[tuple[str, str | None]]]] = {
    "summary": (_summary, [("phase2", None), ("methods", None)]),
    "phase2": (_phase2, [("phase2", None)]),
    "sizes": (_sizes, [("methods", "resnet50")]),
    "solvers": (_solvers, [("solvers", None)]),
    "steps": (_steps, [("steps", None)]),
    "price": (_price, [("price", None)]),
    "peers": (_peers, [("peers", None)]),
    "limits": (_limits, [("limits", None)]),
    "features": (_features, [("features", None)]),
    "sketches": (_sketches, [("sketches", None)]),
    "balancer": (_balancer, [("balancer", None)]),
    "together": (_together, [("together", None)]),
    "host": (_host, [("host", None)]),
    "ranks": (_ranks, [("ranks", None)]),
}
"""By table: a function of records, and for each record its file and a network that it contains."""

HELPS = {
    "three digits that overlap, accuracy in %": (
        ("digits", "three/", "mean %"),
        ("UPGrad", "NashMTL"),
        ("Sum+steps", "three times the steps"),
    ),
    "two digits, one loss multiplied by 0.1, accuracy in %": (
        ("digits", "unequal/", "mean %"),
        ("UPGrad", "NashMTL"),
        ("Sum+steps", "twice the steps"),
    ),
    "a pretrained network finds boxes, average precision in %": (
        ("finetune", "", "boxes: AP %↑"),
        ("UPGrad", "PCGrad"),
        ("Sum+steps", "twice the steps"),
    ),
    "the same network labels pixels, mean IoU in %": (
        ("finetune", "", "pixels: mIoU %↑"),
        ("UPGrad", "PCGrad"),
        ("Sum+steps", "twice the steps"),
    ),
    "a survey with missing labels, gain over single-task networks in %": (
        ("tabular", "", "Delta m in %"),
        ("UPGrad", "NashMTL"),
        ("Sum+UncertaintyWeights", "learned weights"),
    ),
    "the Helmholtz equation, error in %, lower is better": (
        ("pinn", "helmholtz/", "relative L2 error, %↓"),
        ("UPGrad", "NashMTL"),
        ("tuned weights", "tuned weights"),
    ),
    "unlearning one text, loss of a text to keep (1.25 before), lower is better": (
        ("protect", "ascent/", "documentation"),
        ("Protect", "SAGO"),
        ("Sum, times 10", "ten times the loss to keep, three times the steps,"),
    ),
}
"""By problem: file, row prefix and column of the results; methods; a row without surgery."""
SEEDS = """Five seeds: means ± half of the 95 % interval, or a median (minimum to maximum). Where \
losses share a forward pass, a step with surgery costs (1 + 2K) / 3 plain steps. Records: \
`examples/results/uses`."""


def trainings() -> str:
    """A table with a row per problem: plain sum, surgery, and the plain sum with more effort."""
    rows = []
    for problem, ((file, prefix, column), methods, (other, words)) in HELPS.items():
        lines = [
            [*map(str.strip, line.strip("|").split("|"))]
            for line in (USES / f"{file}.md").read_text().splitlines()
            if line.startswith("|")
        ]
        values = {line[0]: line[lines[0].index(column)] for line in lines}
        surgery = ", ".join(f"{method} {values[prefix + method]}" for method in methods)
        rows.append([problem, values[f"{prefix}Sum"], surgery, f"{words} {values[prefix + other]}"])
    header = ["trained on", "plain sum", "with surgery", "plain sum with more steps or weights"]
    text = "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * 4, *rows))
    text = re.sub(r"(\d)-(\d)", r"\1 to \2", text)
    return text.replace(" ± ", "\u00a0±\u00a0")  # A mean and its interval do not wrap.


def _source(record: Record) -> str:
    machine, versions = record["machine"], record["versions"]
    threads = record["cases"][0].get("threads", machine["threads"])
    return (
        f"Record: `bench/results/{record['name']}.jsonl`, commit {record['commit']}, "
        f"{record['time']:.10}, {machine['cpu']}, threads {threads}, {machine['instruction_set']}, "
        f"torch {versions['torch']}, torchjd {versions['torchjd']}."
    )


def contents(name: str) -> str:
    """A table, followed by a note on its records."""
    if name == "helps":
        return f"{trainings()}\n\n{SEEDS}"
    rows_of, files = TABLES[name]
    records = [last(*which) for which in files]
    return f"{_table([*rows_of(*records)])}\n\n{' '.join(map(_source, records))}"


def _table(rows: list[Row]) -> str:
    """A table with padded columns; columns of numbers are right-aligned."""
    columns = []
    for header in rows[0]:
        cells = [row[header] for row in rows]
        width = max(3, *map(len, [header, *cells]))
        right = not any(re.match("[A-Za-z]", text) for text in cells)
        rule = "-" * (width - right) + ":" * right
        columns.append(
            [f"{text:{'>' if right else '<'}{width}}" for text in (header, rule, *cells)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
