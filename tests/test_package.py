"""The package's version, links, and report of its environment."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from long_description import long_description, repository, with_absolute_links
from markdown_it import MarkdownIt

import cs_kernels as cs
from cs_kernels import __main__ as report

pytestmark = pytest.mark.kernel

ROOT = Path(__file__).parent.parent


class _Links(HTMLParser):
    """The links and pictures of a page."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v for name, v in attrs if v and name in ("href", "src", "srcset")]


def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == report.facts()
    assert found["cs_kernels"] == cs.__version__
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["backends"] == cs.available_backends()
    assert (found["cuda_architectures"] is None) != (found["without_cuda"] is None)


def test_the_report_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report also works without the compiled module."""
    monkeypatch.delitem(sys.modules, "cs_kernels._C")
    report.main([])
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +(.+)$", printed, re.MULTILINE))
    assert list(rows) == list(report.facts())
    assert rows["instruction_set"] == rows["without_cuda"] == "none"
    assert rows["backends"] == "reference: it runs"
    assert re.search(r"^ {20}cpu: it runs$", printed, re.MULTILINE)


def test_the_report_lists_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="A GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    row = "A GPU, compute capability 9.0"
    assert f"gpus{'':16}{row}\n{'':20}{row}\n" in report.text(report.facts())


def test_the_changelog_begins_with_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == cs.__version__


def test_the_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [cs.__version__]
    assert f"\nrepository-code: {repository()}\n" in citation


def test_the_hooks_have_the_versions_of_lint() -> None:
    """pre-commit installs the same versions of tools as `make lint`."""
    hooks = ROOT / ".pre-commit-config.yaml"
    if not hooks.exists():
        pytest.skip("not a checkout")
    project = (ROOT / "pyproject.toml").read_text()
    pins = re.findall(r"additional_dependencies: \[(\S+)\]", hooks.read_text())
    assert pins
    assert [pin for pin in pins if f'    "{pin}",\n' not in project] == []


def test_addresses_follow_from_the_repository() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    links = dict(re.findall(r'^(\w+) = "(https://.+)"$', project, re.MULTILINE))
    assert links["Repository"] == repository()
    assert links["Issues"] == f"{repository()}/issues"
    assert links["Changelog"] == f"{repository()}/blob/main/CHANGELOG.md"


def test_the_long_description_has_absolute_links() -> None:
    links = _Links(long_description()).found
    assert f"{repository()}/blob/main/docs/recipes/index.md" in links
    assert f"{repository()}/raw/main/bench/results/front-dark.svg" in links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_the_readme_links_to_files() -> None:
    if not (ROOT / "docs").exists():
        pytest.skip("not a checkout")
    found = _Links((ROOT / "README.md").read_text()).found
    links = [link for link in found if "://" not in link and not link.startswith("../../actions/")]
    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](R/blob/main/docs/a.md#b)"),
        ("![a](b/c.png)", "![a](R/raw/main/b/c.png)"),
        ("[![a](b.svg)](c.md)", "[![a](R/raw/main/b.svg)](R/blob/main/c.md)"),
        ("[![a](../../b/c.svg)](../../b)", "[![a](R/b/c.svg)](R/b)"),
        ("[`f(x)`](a.md)", "[`f(x)`](R/blob/main/a.md)"),
        ('<source srcset="a.png">', '<source srcset="R/raw/main/a.png">'),
        ('<img alt="a" src="b.svg"/>', '<img alt="a" src="R/raw/main/b.svg"/>'),
        ("<a href='LICENSE'>", "<a href='R/blob/main/LICENSE'>"),
    ],
)
def test_relative_links_become_absolute(text: str, expected: str) -> None:
    assert with_absolute_links(text, "R") == expected


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://b.c/d.png)",
        "[a](#b)",
        "[a](mailto:b@c)",
        "```python\nheads[task](trunk)\n```",
        "`heads[task](trunk)`",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert with_absolute_links(text, "R") == text


def test_tests_are_skipped_without_frameworks_alone() -> None:
    """`importorskip` may only name packages that CI installs: tests of others would never run."""
    project = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"^frameworks = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)
    assert extra is not None
    packages = set(re.findall(r'"(\w+)', extra[1]))
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    assert set(re.findall(r'importorskip\("(\w+)', tests)) <= packages
