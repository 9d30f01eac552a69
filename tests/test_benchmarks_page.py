"""The tables of README.md and docs/benchmarks.md agree with the records of the benchmarks."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent


def test_the_page_agrees_with_the_records() -> None:
    # With the standard library alone.
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
