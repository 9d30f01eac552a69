"""The examples of the documents run as they stand."""

import re
import subprocess
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
    one, captured, other = _run("README.md")
    assert "1 of 2 shared parameters are prioritized" in capsys.readouterr().out
    assert captured["losses"].keys() == set(captured["tasks"])
    for names in (one, captured, other):
        assert all(p.grad is not None for p in names["trunk"][0].parameters())


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "bench/NOTES.md"])
def test_named_files_exist(document: str) -> None:
    """By their whole path, or by the end of it."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    if not files:
        pytest.skip("not a git checkout")
    text = (ROOT / document).read_text()
    named = re.findall(r"`([\w/.-]+\.(?:py|pyi|cpp|cu|h|md|txt))`", text)
    missing = [name for name in named if not re.search(rf"(^|/){re.escape(name)}$", files, re.M)]
    assert named
    assert missing == []


def test_the_method_of_contributing() -> None:
    (names,) = _run("CONTRIBUTING.md")
    weights = names["InverseLengths"]().weights(torch.diag(torch.tensor([4.0, 0.0])))
    assert weights.tolist() == [0.5, 0.0]
    assert names["InverseLengths"]().weights(torch.full((2, 2), torch.inf)).isnan().all()
