"""Draws the last record of a file: every case against the limit, and the peers."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def _phase2(cases: list[dict[str, Any]]) -> tuple[list[str], dict[str, list[float]]]:
    names = [f"{c['network']}\nK={c['tasks']} {c['dtype']}" for c in cases]
    series = {"limit": [1.0] * len(cases), "fused step": [c["times_the_limit"] for c in cases]}
    for peer in cases[0]["peers"]:
        series[peer] = [c["times_the_limit"] * c["peers"][peer]["ratio"] for c in cases]
    return names, series


def _methods(cases: list[dict[str, Any]]) -> tuple[list[str], dict[str, list[float]]]:
    chosen = [c for c in cases if c["network"] == "resnet18" and c["tasks"] in (4, 16)]
    chosen.sort(key=lambda c: c["tasks"])
    names = [f"{c['method']}\nK={c['tasks']}" for c in chosen]
    series = {"limit": [1.0] * len(chosen), "ours": [c["times_the_limit"] for c in chosen]}
    for peer in ("TorchJD step", "textbook"):
        series[peer] = [
            c["times_the_limit"] * c["peers"].get(peer, {}).get("ratio", float("nan"))
            for c in chosen
        ]
    return names, series


def _gpu(cases: list[dict[str, Any]]) -> tuple[list[str], dict[str, list[float]]]:
    names = [f"{c['network']}\nK={c['tasks']} {c['dtype']}\n{c['backend']}" for c in cases]
    series = {"limit": [1.0] * len(cases)}
    series["replayed"] = [1 / c["fraction_of_limit"] for c in cases]
    limits = [c["replayed_milliseconds"]["p50"] * c["fraction_of_limit"] for c in cases]
    series["step"] = [c["milliseconds"]["p50"] / t for c, t in zip(cases, limits, strict=True)]
    for peer in cases[0]["peers"]:
        times = [c["peers"][peer]["milliseconds"] for c in cases]
        series[peer] = [time / t for time, t in zip(times, limits, strict=True)]
    return names, series


def draw(table: str, records: Path, picture: Path) -> None:
    """Writes a PNG from the last line of a record file."""
    record = json.loads(records.read_text().splitlines()[-1])
    names, series = {"phase2": _phase2, "methods": _methods, "gpu": _gpu}[table](record["cases"])
    figure, axes = plt.subplots(figsize=(max(7, 1.1 * len(names)), 4), layout="constrained")
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [x + (i - len(series) / 2 + 0.5) * width for x in range(len(names))]
        axes.bar(places, values, width, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_ylabel("time / limit of memory")
    machine = record["machine"]
    where = machine.get("gpu") if table == "gpu" else None
    if where is None:
        where = f"{machine['cpu']}, {machine['threads']} threads, {machine['instruction_set']}"
    axes.set_title(f"{where}, commit {record['commit']}", fontsize=9)
    axes.legend(fontsize=8, ncols=len(series))
    figure.savefig(picture, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
