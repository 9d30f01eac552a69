"""The tables of README.md and docs/benchmarks.md agree with the records of the benchmarks."""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

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
    contents = runpy.run_path(str(ROOT / "bench" / "page.py"))["contents"]
    blocks = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert len(blocks) == text.count("<!-- table: ") > 0
    for name, written in blocks:
        assert "\nRecord: `bench/results/" in written
        assert written == "\n\n".join(contents(name)), name


def test_no_table_of_benchmarks_is_typed() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    written = re.sub(r"<!-- table: .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "| --" not in written


def _rows(name: str) -> list[list[list[float | None]]]:
    """For each panel, the values of each row of markers."""
    page = runpy.run_path(str(ROOT / "bench" / "page.py"))
    if name == "front":
        return [[[r.get(key) or None] for r in page["front"]()] for key in page["PANELS"]]
    panels = page["panels_of_times"](name)
    if name == "methods":  # As the title says: 4 tasks, ResNet-18.
        cases = page["last"](name, "resnet18")["cases"]
        cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] == 4]
        assert list(panels[""].items())[1:] == [(c["method"], page["times"](c)) for c in cases]
    return [
        [[row.get(label) for label in page["MARKS"]] for row in rows.values()]
        for rows in panels.values()
    ]


@pytest.mark.parametrize("look", ["", "-dark"])
@pytest.mark.parametrize("name", ["front", "methods", "phase2"])
def test_pictures_show_the_records(name: str, look: str) -> None:
    """A marker's x follows the logarithm of its value, and its y is its row's."""
    picture = (ROOT / "bench" / "results" / f"{name}{look}.svg").read_text()
    drawn = re.split('id="axes_', picture.partition('id="legend_1"')[0])[1:]
    position = r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill[^"]*stroke: '
    colors = "|".join(style.LIBRARIES.values())
    for markers, rows in zip(drawn, _rows(name), strict=True):
        at = [[*map(float, xy)] for xy in re.findall(f"{position}(?:{colors})", markers)]
        expected = [
            [math.log(value), float(number)]
            for column in range(len(rows[0]))
            for number, row in enumerate(rows)
            if (value := row[column]) is not None
        ]
        for drawn_at, wanted in zip(torch.tensor(at).T, torch.tensor(expected).T, strict=True):
            line = torch.stack([wanted, torch.ones_like(wanted)], 1).double()
            fitted = line @ torch.linalg.lstsq(line, drawn_at[:, None].double()).solution
            assert (fitted[:, 0] - drawn_at).abs().max() < 0.05


@pytest.mark.parametrize("look", ["", "-dark"])
def test_lines_of_the_price_show_the_record(look: str) -> None:
    page = runpy.run_path(str(ROOT / "bench" / "page.py"))
    cases = [c for c in page["last"]("price", "resnet18")["cases"] if c["network"] == "resnet18"]
    picture = (ROOT / "bench" / "results" / f"price{look}.svg").read_text()
    position = r'<use xlink:href="#\w+" x="[\d.]+" y="([\d.]+)" style="fill[^"]*stroke: '
    colors = "|".join(style.LIBRARIES.values())
    for panel, key in zip(
        picture.split('id="axes_')[1:], ("over_plain", "peak_bytes"), strict=True
    ):
        heights = re.findall(f"{position}(?:{colors})", panel)
        drawn_at = torch.tensor([*map(float, heights)]).double()
        values = [c[key] for way in page["WAYS"] for c in cases if c["step"] == way]
        wanted = torch.tensor(values).double().log()
        line = torch.stack([wanted, torch.ones_like(wanted)], 1)
        fitted = line @ torch.linalg.lstsq(line, drawn_at[:, None]).solution
        assert (fitted[:, 0] - drawn_at).abs().max() < 0.05
