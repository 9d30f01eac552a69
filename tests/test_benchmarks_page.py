"""The tables and pictures of README.md and docs agree with the records of the benchmarks."""

import re
import subprocess
import sys
from pathlib import Path

import page_plots
import page_tables
import pytest
import style
import torch

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent


def test_the_page_agrees_with_the_records() -> None:
    # -S: the script needs only the standard library.
    command = [sys.executable, "-S", "-E", str(ROOT / "bench" / "page.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "docs/internals/gpu_kernels.md"])
def test_every_table_is_written_from_a_record(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert len(blocks) == text.count("<!-- table: ") > 0
    for name, written in blocks:
        assert "\nRecord: `bench/results/" in written
        assert written == page_tables.contents(name), name


def test_no_table_of_benchmarks_is_typed() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    written = re.sub(r"<!-- table: .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "| --" not in written


def _rows(name: str) -> list[list[list[float | None]]]:
    """For each panel, the values of each row of markers."""
    if name == "front":
        return [[[r.get(key)] for r in page_plots.front()] for key in page_plots.PANELS]
    panels = page_plots.panels_of_times(name)
    if name == "methods":  # As the title says: 4 tasks, ResNet-18.
        cases = page_tables.last(name, "resnet18")["cases"]
        cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] == 4]
        assert list(panels[""].items())[1:] == [(c["method"], page_plots.times(c)) for c in cases]
    return [
        [[row.get(label) for label in page_plots.MARKS] for row in rows.values()]
        for rows in panels.values()
    ]


def _panels(name: str) -> list[torch.Tensor]:
    """For each panel, the positions of its colored markers: float64 [2, markers]."""
    picture = (ROOT / "bench" / "results" / f"{name}.svg").read_text().partition('id="legend_1"')[0]
    colors = "|".join(style.LIBRARIES.values())
    marker = (
        rf'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill[^"]*stroke: (?:{colors})'
    )
    return [
        torch.tensor([[*map(float, xy)] for xy in re.findall(marker, panel)]).double().T
        for panel in picture.split('id="axes_')[1:]
    ]


def _assert_linear(drawn_at: torch.Tensor, values: torch.Tensor) -> None:
    """Asserts that positions are a linear function of the values."""
    line = torch.stack([values, torch.ones_like(values)], 1)
    fitted = line @ torch.linalg.lstsq(line, drawn_at[:, None]).solution
    assert (fitted[:, 0] - drawn_at).abs().max() < 0.05


@pytest.mark.parametrize("look", ["", "-dark"])
@pytest.mark.parametrize("name", ["front", "methods", "phase2"])
def test_pictures_show_the_records(name: str, look: str) -> None:
    """A marker's x is linear in the logarithm of its value, its y in the number of its row."""
    for drawn_at, rows in zip(_panels(f"{name}{look}"), _rows(name), strict=True):
        values, numbers = torch.tensor(
            [
                (value, number)
                for column in range(len(rows[0]))
                for number, row in enumerate(rows)
                if (value := row[column]) is not None
            ],
            dtype=torch.float64,
        ).T
        _assert_linear(drawn_at[0], values.log())
        _assert_linear(drawn_at[1], numbers)


@pytest.mark.parametrize("look", ["", "-dark"])
def test_lines_of_the_price_show_the_record(look: str) -> None:
    cases = [
        c for c in page_tables.last("price", "resnet18")["cases"] if c["network"] == "resnet18"
    ]
    keys = ("over_plain", "peak_bytes")
    for drawn_at, key in zip(_panels(f"price{look}"), keys, strict=True):
        values = [c[key] for way in page_plots.WAYS for c in cases if c["step"] == way]
        _assert_linear(drawn_at[1], torch.tensor(values).double().log())
