"""The command that trains a use: its table, its pictures, and how it resumes."""

import json
from pathlib import Path

import pytest
from uses import __main__ as command
from uses import tabular
from uses.use import Column, _cell, delta_m, interval

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
