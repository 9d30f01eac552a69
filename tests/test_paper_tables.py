"""The paper's tables from the results of runs, and the numbers that the paper prints."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from paper import tables
from paper.experiments import PUBLISHED, REAL, SINGLE, SMALL, TABLES, Run, table
from paper.tasks import MEASURES
from rich.console import Console

pytestmark = pytest.mark.paper

# Rows whose printed Delta_m contradicts their printed metrics, with the correct Delta_m.
MISPRINTED = {
    ("nyud/hrnet18/uncertainty", "GD"): 10.07,
    ("cityscapes/segnet/equal", "GD + Recon"): -13.65,
    ("cityscapes/segnet/equal", "PCGrad"): -84.71,
    ("cityscapes/segnet/equal", "Ours"): -8.93,
    ("ablation", "Phase 2"): 10.15,
    ("ablation", "Mixed"): 15.00,
}


def result_of(run: Run, number: int) -> dict:
    """Metrics: 10 x (seed + 1) for single tasks; row n is better by (10 n + seed) percent."""
    better = 0 if run.row == SINGLE else 0.1 * number + 0.01 * run.seed
    metrics = {task: {} for task in run.tasks}
    for measure in MEASURES[run.data]:
        if measure.task in metrics:
            factor = 1 - better if measure.lower else 1 + better
            metrics[measure.task][measure.name] = 10 * (run.seed + 1) * factor
    history = []
    for epoch in range(4):
        losses = {
            task: (number + 1) * (2 - epoch / 3) * (i + 1) + 0.01 * (epoch == 1)
            for i, task in enumerate(run.tasks)
        }
        shares = {"conv1": [epoch, 6 - epoch, 2, 0], "conv2": [2, 2, 2, 2]}
        history.append({"phase": 1, "losses": losses, "shares": shares, "seconds": 1.0})
    return {"metrics": metrics, "history": history, "parameters": 2**18}


def fill(name: str, folder: Path, seeds: list[int]):
    """Writes results for all runs of a table; returns its parts."""
    parts = table(name, seeds, small=True, changes={})
    for part in parts:
        for number, runs in enumerate(part.rows.values()):
            for run in runs:
                path = folder / run.name / "result.json"
                if not path.exists():
                    path.parent.mkdir(parents=True)
                    path.write_text(json.dumps(result_of(run, number)))
    return parts


def rows_of(name, folder, seeds):
    [part] = fill(name, folder, seeds)
    head, rows = tables.table_rows(part, tables.read(part, folder))
    here = {row[0]: dict(zip(head, row, strict=True)) for row in rows if row[1] == "here"}
    paper = {above[0]: row for above, row in pairwise(rows) if row[1] == "paper"}
    return here, paper


def findings_of(name, folder, seeds) -> list[str]:
    parts = fill(name, folder, seeds)
    return list(tables.findings(name, parts, [tables.read(part, folder) for part in parts]))


@pytest.mark.parametrize(
    ("name", "seeds", "row", "expected"),
    [
        # The sixth row after the single tasks is better by 60%, plus 1% per seed.
        ("nyud", [0, 1, 2], "Ours", {"Δm %↑": "+61.00±1.00", "mIoU*↑": "32.27±16.30"}),
        ("nyud", [0, 1, 2], "Ours", {"rmse*↓": "7.733±3.700"}),
        ("nyud", [0, 1, 2], SINGLE, {"Δm %↑": "+0.00±0.00"}),
        ("pascal", [4], "GD", {"Δm %↑": "+14.00"}),
        # Each single task has its own network.
        ("cityscapes", [0], SINGLE, {"MiB": "2.00"}),
        ("cityscapes", [0], "Cross-Stitch", {"MiB": "1.00"}),
        # (1 + 2 + 3 + 4) / 4 times the row's scale of 2.
        ("ablation", [0], "Phase 1", {"mean loss↓": "5.0000"}),
        ("ablation", [0], SINGLE, {"mean loss↓": ""}),
    ],
)
def test_rows_of_a_table(tmp_path, name, seeds, row, expected):
    here, _ = rows_of(name, tmp_path, seeds)
    assert expected.items() <= here[row].items()


def test_printed_rows_and_columns(tmp_path):
    _, paper = rows_of("nyud", tmp_path / "nyud", [0])
    printed = "0.565 0.148 41.10 70.37 53.74 19.54 12.45 46.11 71.54 80.12 +15.00"
    assert paper["Ours"][2:] == printed.split()
    here, paper = rows_of("cityscapes", tmp_path, [0])
    assert list(here) == list(PUBLISHED["cityscapes/segnet/equal"])
    assert paper[SINGLE][-1] == "190.59"
    here, _ = rows_of("ablation", tmp_path, [0])
    assert list(here)[1:] == list(PUBLISHED["ablation"])
    measures = ["rmse*↓", "mIoU*↑", "mean*↓", "Δm %↑", "mean loss↓"]
    assert [*here["Mixed"]] == ["method", "", *measures]


def test_findings(tmp_path):
    text = "\n".join(findings_of("ablation", tmp_path, [0, 1]))
    for finding in (
        "Δm of Mixed less that of Phase 1: +30.00±0.00, higher in 2 of 2 seeds.",
        "Phase 1 less Phase 2: +0.00±0.00, higher in 0 of 2 seeds",
        # 5, 5, 4 and 2 of 16 channels at the end; in each epoch, one channel changes its task.
        "semseg 31.2±0.0, depth 31.2±0.0, edge 25.0±0.0, normals 12.5±0.0",
        "6.25±0.00 % of channels a task gains or loses",
    ):
        assert finding in text
    first, *others = findings_of("scaling", tmp_path / "scaling", [0])
    assert len(others) == 2
    assert "Ours 0.00" in first
    of_orders = findings_of("order", tmp_path / "order", [0])
    assert of_orders == ["Range of Δm over the five orders: 40.00."]


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("nyud", ["losses"]),
        ("ablation", ["correlation", "priority", "priority_by_layer"]),
        ("scaling", []),
    ],
)
def test_files_of_a_table(tmp_path, name, figures):
    parts, out = fill(name, tmp_path / "runs", [0, 1]), tmp_path / "out"
    tables.write(name, parts, tmp_path / "runs", out, Console(quiet=True), small=True)
    text = (out / f"{name}.md").read_text()
    assert text.count("| method |") == len(parts)
    assert "not comparable with the paper's" in text
    pictures = {f"{name}_{figure}{look}.svg" for figure in figures for look in ("", "-dark")}
    assert {path.name for path in out.iterdir()} == {f"{name}.md", *pictures}


def test_a_run_without_result_is_named(tmp_path):
    [part] = table("nyud", [0], small=True, changes={})
    with pytest.raises(FileNotFoundError, match=r"Single-task/semseg/seed0/result.json is missing"):
        tables.read(part, tmp_path)


def test_differences_from_the_paper_are_stated():
    run = Run("nyud", "resnet18", "GD", (), "equal", 0, REAL["nyud/resnet18"])
    assert tables.describe(run, small=False) == "published settings"
    text = tables.describe(replace(run, settings=SMALL["nyud/resnet18"]), small=True)
    for part in ("one stereo photograph", "64 x 64 pixels", "channels x 0.0625", "not pretrained"):
        assert part in text


@pytest.mark.parametrize(
    "key", [key for key in PUBLISHED if "/" in key or key in ("order", "ablation")]
)
def test_printed_delta_m_follows_from_the_printed_metrics(key):
    """Checks our Delta_m, and the numbers copied from the paper."""
    data = key.split("/")[0] if "/" in key else "nyud"
    counted = [measure for measure in MEASURES[data] if measure.counts]
    measures = counted if key == "ablation" else MEASURES[data]
    single = PUBLISHED["order" if key == "ablation" else key][SINGLE]
    baseline = dict(zip(MEASURES[data], single, strict=False))
    for row, numbers in PUBLISHED[key].items():
        changes = [
            (-1 if measure.lower else 1) * (value / baseline[measure] - 1)
            for measure, value in zip(measures, numbers, strict=False)
            if measure.counts
        ]
        printed = numbers[len(measures)]
        expected = MISPRINTED.get((key, row), printed)
        # Printed metrics are rounded.
        assert 100 * sum(changes) / len(changes) == pytest.approx(expected, abs=0.11), row
        assert abs(expected - printed) > 0.15 or expected == printed


def test_the_documentation_names_every_table():
    page = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(TABLES)
    assert set(re.findall(r"TABLE=(\w+)", page)) <= set(TABLES)
