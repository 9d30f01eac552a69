"""The examples of the documents run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent


def _run(document: str) -> list[dict[str, Any]]:
    """The names that each Python block leaves."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    results: list[dict[str, Any]] = [{} for _ in blocks]
    for block, names in zip(blocks, results, strict=True):
        exec(compile(block, document, "exec"), names)
    return results


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = _run("README.md")
    assert "1 of 2 shared parameters are prioritized" in capsys.readouterr().out
    for names in (one, other):
        assert all(p.grad is not None for p in names["trunk"][0].parameters())


def test_the_method_of_contributing() -> None:
    (names,) = _run("CONTRIBUTING.md")
    weights = names["InverseLengths"]().weights(torch.diag(torch.tensor([4.0, 0.0])))
    assert weights.tolist() == [0.5, 0.0]
    assert names["InverseLengths"]().weights(torch.full((2, 2), torch.inf)).isnan().all()
