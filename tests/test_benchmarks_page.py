"""The tables of docs/benchmarks.md agree with the records of the benchmarks."""

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


def test_every_table_is_written_from_a_record() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page.count("\nRecord: `bench/results/") == page.count("<!-- table: ") + 1
    contents = runpy.run_path(str(ROOT / "bench" / "page.py"))["contents"]
    blocks = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert len(blocks) == page.count("<!-- table: ")
    for name, text in blocks:
        assert text == "\n\n".join(contents(name)), name
    written = re.sub(r"<!-- table: .*?<!-- end -->", "", page, flags=re.DOTALL)
    assert "| --" not in written
