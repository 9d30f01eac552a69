"""docs/benchmarks.md agrees with the records of the benchmarks, and has no other number."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
CHOSEN = ("K", "W", "date", "commit", "torch", "TorchJD")
"""Columns without figures: they say which case and record it is."""
BLOCK = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)


def _run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The script, with the standard library alone."""
    command = [sys.executable, "-S", "-E", str(root / "bench" / "page.py"), *options]
    return subprocess.run(command, capture_output=True, text=True)


def _page(root: Path) -> str:
    return (root / "docs" / "benchmarks.md").read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The script, the records and the page, to be changed."""
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def _edit(root: Path, name: str, edit: Callable[[list[Any]], object]) -> None:
    """Changes the records of a file."""
    path = root / "bench" / "results" / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    edit(found)
    path.write_text("".join(json.dumps(record) + "\n" for record in found))


def _replace(root: Path, old: str, new: str) -> None:
    """Changes the page, once."""
    assert old in _page(root)
    (root / "docs" / "benchmarks.md").write_text(_page(root).replace(old, new, 1))


def test_the_page_is_up_to_date() -> None:
    run = _run(ROOT, "--check")
    assert run.returncode == 0, run.stdout + run.stderr


def test_changed_records_are_found(copy: Path) -> None:
    times = []

    def slower(found: list[Any]) -> None:
        spent = found[-1]["cases"][0]["milliseconds"]
        times.append(f" {spent['p50']:.2f} ")
        spent["p50"] += 1000
        times.append(f" {spent['p50']:.2f} ")

    _edit(copy, "phase2", slower)
    run = _run(copy, "--check")
    assert run.returncode == 1
    for sign, milliseconds in zip("-+", times, strict=True):
        assert any(line[0] == sign and milliseconds in line for line in run.stdout.splitlines())
    assert _page(copy) == _page(ROOT)
    assert _run(copy).returncode == 0
    assert times[1] in _page(copy)
    assert _run(copy, "--check").returncode == 0


def test_edited_tables_are_found(copy: Path) -> None:
    """Whatever table it is, one other digit."""
    for name, text in BLOCK.findall(_page(ROOT)):
        figure = re.search(r"\d\.\d", text)
        if figure is None:
            assert name == "gpu"
            continue
        digit = figure.start()
        edited = f"{text[:digit]}{(int(text[digit]) + 1) % 10}{text[digit + 1 :]}"
        _replace(copy, text, edited)
        assert _run(copy, "--check").returncode == 1, name
        assert _run(copy).returncode == 0
        assert _page(copy) == _page(ROOT)


def test_every_table_stands_on_the_page(copy: Path) -> None:
    _replace(copy, "<!-- table: solvers -->", "<!-- solvers -->")
    assert "solvers" in _run(copy).stderr


def test_every_record_has_a_table(copy: Path) -> None:
    _edit(copy, "another", lambda found: found.append({"cases": []}))
    assert "another" in _run(copy, "--check").stderr


def _cells(page: str) -> dict[tuple[Any, ...], str]:
    """Every cell: by its block, the table and row in it, and the column's header."""
    found = {}
    for name, text in BLOCK.findall(page):
        tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
        assert tables or name == "gpu"
        for n, table in enumerate(tables):
            header, _, *rows = (
                [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
            )
            for i, row in enumerate(rows):
                for column, cell in zip(header, row, strict=True):
                    found[name, n, i, column] = cell
    return found


def _other_numbers(value: Any, key: str = "") -> Any:
    """The same record with other numbers, but for those that choose the cases."""
    if isinstance(value, dict):
        return {k: _other_numbers(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_other_numbers(v, key) for v in value]
    if key in ("tasks", "ranks") or value is None or isinstance(value, str):
        return value
    # Of elements and bytes, other shares.
    return value * (11 if key == "numel" else 3) + 1


def test_every_figure_comes_from_a_record(copy: Path) -> None:
    """With other numbers in the records, no figure of a table stays."""
    before = _cells(_page(copy))
    for path in (copy / "bench" / "results").glob("*.jsonl"):
        _edit(copy, path.stem, lambda found: found.__setitem__(slice(None), _other_numbers(found)))
    assert _run(copy).returncode == 0
    after = _cells(_page(copy))
    figures = {
        at: cell
        for at, cell in before.items()
        if re.match(r"[-+]?\d", cell) and at[-1] not in CHOSEN
    }
    assert {at[0] for at in figures} == {at[0] for at in before}
    assert len(figures) > 500
    assert [at for at, cell in figures.items() if after[at] == cell] == []


def test_prose_has_no_measured_number() -> None:
    """Neither a decimal nor a number with a unit."""
    prose = BLOCK.sub("", _page(ROOT))
    assert "## All methods" in prose
    assert re.findall(r"\d+\.\d+|\d+ ?(?:%|[mnu]?s\b|[GM]B|times\b|x\b)", prose) == []


def test_tables_name_the_commit_and_the_command(copy: Path) -> None:
    for name, text in BLOCK.findall(_page(ROOT)):
        if name != "gpu":
            assert re.search(r"^Records?: `bench/results/\w+\.jsonl`", text, re.M), name
            command = re.search(r"^Command: `.venv/bin/python (?:-m pytest )?([\w./]+)", text, re.M)
            assert command is not None
            assert (ROOT / command[1]).exists()
    _edit(copy, "steps", lambda found: found[-1].update(commit="abcdefg", time="2030-01-02"))
    _run(copy)
    assert "commit abcdefg, 2030-01-02;" in dict(BLOCK.findall(_page(copy)))["steps"]


def test_the_last_record_of_a_clean_commit_is_taken(copy: Path) -> None:
    def add(found: list[Any], commit: str, keep: float) -> None:
        record = json.loads(json.dumps(found[-1]))
        record["commit"], record["time"] = commit, "2030-01-02"
        record["cases"][0]["milliseconds"]["keep"] = keep
        found.append(record)

    _edit(copy, "host", lambda found: add(found, "abcdefg", 77.25))
    _edit(copy, "host", lambda found: add(found, "abcdefg-dirty", 88.25))
    _run(copy)
    assert "77.25" in _page(copy)
    assert "88.25" not in _page(copy)


def test_a_record_with_some_cases_leaves_the_large_tables(copy: Path) -> None:
    """It replaces the first table alone."""

    def add(found: list[Any]) -> None:
        record = json.loads(json.dumps(found[0]))
        record["commit"] = "abcdefg"
        record["cases"] = [
            c for c in record["cases"] if (c["network"], c["tasks"]) == ("resnet18", 4)
        ]
        found.append(record)

    _edit(copy, "methods", add)
    _run(copy)
    blocks = dict(BLOCK.findall(_page(copy)))
    assert "abcdefg" in blocks["summary"]
    assert "abcdefg" not in blocks["methods"] + blocks["sizes"]


def test_a_table_without_a_record_is_refused(copy: Path) -> None:
    (copy / "bench" / "results" / "solvers.jsonl").unlink()
    run = _run(copy)
    assert run.returncode == 1
    assert "solvers.jsonl has no record" in run.stderr


def test_records_of_a_gpu_become_tables(copy: Path) -> None:
    """Cases in the form of `bench/test_gpu.py` and `bench/test_steps.py`, with invented numbers."""
    for path in (copy / "bench" / "results").glob("gpu*"):
        path.unlink()
    assert _run(copy).returncode == 0
    assert "Nothing has run on a GPU" in dict(BLOCK.findall(_page(copy)))["gpu"]

    def taken(found: list[Any], cases: list[Any]) -> None:
        machine = {"cpu": "a processor", "cores": 1, "threads": 1, "instruction_set": "avx2"}
        machine |= {"python": "3.11", "gpu": "some GPU"}
        origin = {"time": "2030-01-02", "commit": "abcdefg", "machine": machine}
        found.append({**origin, "versions": {"torch": "3.0"}, "cases": cases})

    of_gpu = {
        "backend": "cuda",
        "network": "resnet18",
        "tasks": 4,
        "dtype": "float32",
        "numel": 1_000_000,
        "bytes": 24_000_000,
        "milliseconds": {"p50": 1.25},
        "replayed_milliseconds": {"p50": 0.125},
        "copy_gigabytes_per_second": 1234.0,
        "fraction_of_limit": 0.375,
        "launches": 3,
        "synchronizations": 0,
        "peers": {"reference": {"milliseconds": 2.5, "ratio": 2.0}},
    }
    of_steps = {
        "network": "hrnet18",
        "tasks": 4,
        "batch": 8,
        "size": 256,
        "method": "Phase 2",
        "milliseconds": 99.5,
        "surgery_milliseconds": 0.75,
        "surgery_host_milliseconds": 0.5,
        "surgery_share": 0.0075,
        "over_phase_1": 0.01,
        "peak_bytes": 5_000_000,
        "launches": 17,
        "synchronizations": 0,
    }
    of_together = {
        "network": "hrnet_w18",
        "tasks": 4,
        "batch": 8,
        "size": 256,
        "milliseconds": {"step": 80.25, "together": 20.0},
        "ratio": 0.25,
        "on_device": {
            way: {"peak_bytes": 7_000_000, "launches": 1234, "synchronizations": 0}
            for way in ("step", "together")
        },
    }
    _edit(copy, "gpu_together", lambda found: taken(found, [of_together]))
    _edit(copy, "gpu", lambda found: taken(found, [of_gpu]))
    _edit(copy, "gpu_steps", lambda found: taken(found, [of_steps]))
    (copy / "bench" / "results" / "gpu.png").write_bytes(b"a plot")
    assert _run(copy).returncode == 0
    text = dict(BLOCK.findall(_page(copy)))["gpu"]
    assert "Nothing has run" not in text
    assert "some GPU" in text
    assert "images/gpu.png" in text
    cells = {(at[1], at[3]): cell for at, cell in _cells(_page(copy)).items() if at[0] == "gpu"}
    assert cells[0, "of the limit"] == "38 %"
    assert cells[0, "replayed ms"] == "0.125"
    assert cells[0, "x TorchJD step"] == "-"
    assert cells[1, "launches"] == "17"
    assert cells[2, "together / step"] == "0.25"


def test_records_and_tables_do_not_make_a_checkout_dirty(tmp_path: Path) -> None:
    """`make bench` appends records, process after process, and all belong to one commit."""

    def git(*arguments: str) -> str:
        options = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *options, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    module = "bench/harness/records.py"
    written = ["bench/results/phase2.jsonl", "docs/benchmarks.md"]
    for name in [*written, module, "README.md"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("copied_records", tmp_path / module)
    assert spec is not None
    assert spec.loader is not None
    records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(records)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "--short", "HEAD")
    for name in written:
        (tmp_path / name).write_text("changed")
    assert records.origin()["commit"] == commit
    (tmp_path / "README.md").write_text("changed")
    assert records.origin()["commit"] == f"{commit}-dirty"
