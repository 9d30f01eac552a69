"""The documents: their Python runs as it stands, and what they name exists."""

import contextlib
import io
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SITE = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *SITE]
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)

BLOCKS = [
    pytest.param(page, number, id=f"{page}-{number}")
    for page in PAGES
    for number, (language, _) in enumerate(FENCE.findall((ROOT / page).read_text()))
    if language == "python"
]


def _blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code."""
    return FENCE.findall((ROOT / page).read_text())


def _files() -> str:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    if not files:
        pytest.skip("not a git checkout")
    return files


def _run(page: str, number: int) -> tuple[dict[str, Any], str]:
    """The names that a block leaves, and what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(_blocks(page)[number][1], f"{page}, block {number}", "exec"), names)
    return names, printed.getvalue()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_python_runs(page: str, number: int) -> None:
    names, printed = _run(page, number)
    if "coverage()" in _blocks(page)[number][1]:
        assert "1 of 2 shared parameters are prioritized" in printed
    if "opt" in names:
        parameters = [
            p for group in names["opt"]._optimizers for p in group.param_groups[0]["params"]
        ]
        assert any(p.grad is not None for p in parameters) or "trace(" in _blocks(page)[number][1]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_what_they_are(page: str) -> None:
    """Python that does not run would be marked otherwise; only files are included unrun."""
    for language, text in _blocks(page):
        assert language in {"", "python", "sh", "py", "bibtex", "toml"}, text
        if language == "py":
            assert re.fullmatch(r'\s*--8<-- "[\w/.]+"\s*', text)
        if language == "":
            assert "import " not in text


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    """Targets of make, and files that commands name."""
    targets = set(re.findall(r"^([\w-]+)[^=\n]*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / page).read_text()
    commands = [
        line
        for language, block in FENCE.findall(text)
        if language == "sh"
        for line in block.splitlines()
    ]
    for command in [*commands, *re.findall(r"`((?:make|bash|python|torchrun) [^`]+)`", text)]:
        words = command.partition("#")[0].split()
        if words[:1] == ["make"]:
            named = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
            assert set(named) <= targets, command
        for word in words:
            if re.fullmatch(r"[\w/.-]+\.(py|txt)", word):
                assert (ROOT / word).exists(), command


@pytest.mark.parametrize("page", [*PAGES, "bench/NOTES.md"])
def test_named_files_exist(page: str) -> None:
    """By their whole path, or by the end of it."""
    files = _files()
    text = (ROOT / page).read_text()
    named = re.findall(r"`([\w/.-]+\.(?:py|pyi|cpp|cu|h|md))`", text)
    missing = [
        name for name in named if not re.search(rf"(^|/){re.escape(name)}$", files, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repository(page: str) -> None:
    """Links to files and their headings; those of the site are checked by `make docs`."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        file = ROOT / path if path else ROOT / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [
                re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
            ]
            assert anchor in slugs, target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


def test_the_method_of_one_s_own() -> None:
    number = next(
        n for n, (_, text) in enumerate(_blocks("docs/extending.md")) if "Inverse" in text
    )
    weights = _run("docs/extending.md", number)[0]["InverseLengths"]().weights
    assert weights(torch.diag(torch.tensor([4.0, 0.0]))).tolist() == [0.5, 0.0]
    assert weights(torch.full((2, 2), torch.inf)).isnan().all()
