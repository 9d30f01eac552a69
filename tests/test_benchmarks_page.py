"""The tables of README.md and docs/benchmarks.md agree with the records of the benchmarks."""

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


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
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


@pytest.mark.parametrize("look", ["", "-dark"])
@pytest.mark.parametrize("name", ["methods", "phase2"])
def test_pictures_of_times_show_the_records(name: str, look: str) -> None:
    """A marker's position follows the logarithm of its time; a marker's row is its method."""
    page = runpy.run_path(str(ROOT / "bench" / "page.py"))
    times, panels = page["times"], page["panels_of_times"](name)
    if name == "methods":  # As the title says: 4 tasks, ResNet-18.
        cases = page["last"](name, "resnet18")["cases"]
        cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] == 4]
        assert list(panels[""].items())[1:] == [(c["method"], times(c)) for c in cases]
    picture = (ROOT / "bench" / "results" / f"{name}{look}.svg").read_text()
    drawn = picture[: picture.index('id="legend_1"')].split('id="axes_')[1:]
    for markers, rows in zip(drawn, panels.values(), strict=True):
        position = r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill[^"]*stroke: '
        colors = "|".join(style.LIBRARIES.values())
        x, y = torch.tensor(
            [[*map(float, at)] for at in re.findall(f"{position}(?:{colors})", markers)]
        ).T.double()
        values, numbers = torch.tensor(
            [
                (row[label], number)
                for label in page["MARKS"]
                for number, row in enumerate(rows.values())
                if label in row
            ]
        ).T.double()
        for drawn_at, expected in ((x, values.log()), (y, numbers)):
            line = torch.stack([expected, torch.ones_like(expected)], 1)
            fitted = line @ torch.linalg.lstsq(line, drawn_at[:, None]).solution
            assert (fitted[:, 0] - drawn_at).abs().max() < 0.05
