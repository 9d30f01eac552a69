"""Pictures: each has a light and a dark version, and the geometry agrees with Phase 2."""

from pathlib import Path

import explained
import numpy as np
import pytest
import style
import torch

from cs_kernels import functional

pytestmark = pytest.mark.docs


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
