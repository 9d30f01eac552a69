"""The command that trains a use: its table, its pictures, and how it resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from uses import __main__ as command
from uses import digits, tabular
from uses.use import Column, _cell, delta_m, interval

import cs_kernels as cs

pytestmark = pytest.mark.paper


def test_a_stopped_command_resumes(tmp_path: Path) -> None:
    """Only what is missing is trained again, with the same result."""
    given = ["tabular", "--seeds", "0", "1", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    command.main(given)
    folder = tmp_path / "tabular" / "quick"
    files = sorted(folder.rglob("seed*.json"))
    assert len(files) == 2 * len(tabular.ROWS)
    table = folder / "tabular.md"
    first = [line.split(" | ") for line in table.read_text().splitlines()]
    assert len(first) == len(tabular.ROWS) + 4
    assert "Means over 2 seeds" in table.read_text()
    before = {file: file.stat().st_mtime_ns for file in files}
    lost = files[3]
    expected = json.loads(lost.read_text())
    lost.unlink()
    table.unlink()
    command.main(given)
    assert [f for f in files if f.stat().st_mtime_ns != before[f]] == [lost]
    found = json.loads(lost.read_text())
    assert found | {"seconds": 0} == expected | {"seconds": 0}
    second = [line.split(" | ") for line in table.read_text().splitlines()]
    assert [row[:-1] for row in second] == [row[:-1] for row in first]  # But for the seconds.


def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    """What has not begun is dropped."""
    examples = Path(command.__file__).parents[1]
    given = ["digits", "--quick", "--seeds", "0", "--jobs", "1", "--out", tmp_path]
    python = str(Path(cs.__file__).parents[1]) + os.pathsep + str(examples)
    process = subprocess.Popen(
        [sys.executable, "-m", "uses", *given],
        env=os.environ | {"PYTHONPATH": python, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def results() -> int:
        return len([*tmp_path.rglob("seed*.json")])

    while results() == 0 and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130, printed
    assert "the same command goes on" in printed
    assert 0 < results() < len(digits.USE.rows) / 2


def test_cells() -> None:
    """Student's t with four degrees of freedom is 2.776."""
    results = [{"x": x, "y": None} for x in (1.0, 2.0, 3.0, 4.0, 10.0)]
    mean, half = interval([result["x"] for result in results])
    assert mean == 4
    assert half == pytest.approx(2.776 * 12.5**0.5 / 5**0.5, abs=1e-3)
    assert _cell(Column("x", "", 1, 100), results) == "400.0 ± 439.0"
    assert _cell(Column("x", "", 1, median=True), results) == "3.0 (1.0-10.0)"
    assert _cell(Column("x", "", 0), results[:1]) == "1"
    assert _cell(Column("y", "", 1), results) == "-"


def test_delta_m_by_hand() -> None:
    baseline = {"years": 0.8, "kids": 1.0, "affair": 0.7}
    values = {"years": 0.84, "kids": 1.1, "affair": 0.7}
    assert delta_m(values, baseline, [*values], ["kids"]) == pytest.approx((5 - 10 + 0) / 3)
    assert delta_m(baseline, baseline, [*values]) == 0
