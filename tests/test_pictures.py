"""Pictures have a light and a dark version, and agree with tables of results or with Phase 2."""

import re
from pathlib import Path

import explained
import numpy as np
import pytest
import style
import torch
from uses import digits, priorities

from cs_kernels import functional

pytestmark = pytest.mark.docs

RESULTS = Path(__file__).parents[1] / "examples" / "results" / "uses"


def test_a_picture_is_written_for_light_and_dark_pages(tmp_path: Path) -> None:
    style.save(tmp_path / "method.svg", explained.draw)
    light, dark = ((tmp_path / f"method{look}.svg").read_text() for look in style.MODES)
    assert light != dark
    assert style.MODES[""][0] in light
    assert style.MODES["-dark"][0] in dark


def test_the_drawn_vectors_and_groups_agree_with_phase_2() -> None:
    gradients = torch.tensor(np.stack([explained.REFERENCE, explained.OTHER]))[:, None]
    update = functional.project_conflicts(gradients, torch.tensor([0]))
    np.testing.assert_allclose(update[0], explained.REFERENCE + explained.PROJECTED, atol=1e-6)
    np.testing.assert_allclose(explained.PROJECTED @ explained.REFERENCE, 0, atol=1e-12)
    np.testing.assert_allclose(explained.STRENGTHS.sum(1), 1)
    tops = functional.task_priority(torch.tensor(explained.STRENGTHS))
    assert tops.tolist() == explained.TOP.tolist()


def _table(name: str) -> dict[str, dict[str, float]]:
    """The means of a table of results, by row and column."""
    lines = (RESULTS / f"{name}.md").read_text().splitlines()
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    )
    return {
        row[0]: {
            column: float(number[0])
            for column, cell in reversed([*zip(head[1:], row[1:], strict=True)])
            if (number := re.match(r"-?[\d.]+", cell))
        }
        for row in rows
    }


def _over_sum(name: str, prefix: str, column: str) -> list[float]:
    """Each row's mean minus that of Sum."""
    rows = {row: of_row[column] for row, of_row in _table(name).items() if row.startswith(prefix)}
    return [mean - rows[f"{prefix}Sum"] for mean in rows.values()]


def _expected(name: str) -> list[list[float]]:
    """The values of the markers of each panel."""
    if name == "tabular":
        rows = _table(name)
        return [[row["Delta m in %"] for task, row in rows.items() if task != "Single-task"]]
    if name == "agreement":
        columns = ("same task if retrained, %", "by chance, %")
        return [[row[column] for column in columns for row in _table(name).values()]]
    if name == "digits":
        return [_over_sum(name, f"{part}/", "mean %") for part in digits.PARTS]
    if name == "priorities":
        parts = [f"{part}/{norm}/" for part in priorities.PARTS for norm in priorities.NORMS]
        return [_over_sum(name, part, "mean %") for part in parts]
    return [_over_sum(name, "", column) for column in ("boxes: AP %↑", "pixels: mIoU %↑")]


@pytest.mark.parametrize("look", [*style.MODES])
@pytest.mark.parametrize("name", ["agreement", "digits", "finetune", "priorities", "tabular"])
def test_markers_are_at_the_means_of_the_tables(name: str, look: str) -> None:
    picture = (RESULTS / f"{name}{look}.svg").read_text().partition('id="legend_1"')[0]
    panels = picture.split('id="axes_')[1:]
    position = r'<use xlink:href="#\w+" x="([\d.]+)" y="[\d.]+" style="'
    marker = position + r'fill: (#\w+); stroke: \2(?:; stroke-linejoin: miter)?"'
    for panel, values in zip(panels, _expected(name), strict=True):
        drawn_at = [float(x) for x, _ in re.findall(marker, panel)]
        line = np.stack([drawn_at, np.ones(len(drawn_at))], 1)
        (scale, offset), *_ = np.linalg.lstsq(line, np.array(values), rcond=None)
        errors = np.abs(scale * np.array(drawn_at) + offset - values)
        rounding = 0.5 if name == "agreement" else 0.1
        assert errors.max() <= rounding, (name, errors)
        assert scale > 0
