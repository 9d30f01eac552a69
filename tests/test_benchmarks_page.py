"""The tables of docs/benchmarks.md agree with the records of the benchmarks."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "page.py"


def test_the_page_agrees_with_the_records() -> None:
    # With the standard library alone.
    run = subprocess.run([sys.executable, "-S", "-E", str(SCRIPT), "--check"], check=False)
    assert run.returncode == 0


def test_another_digit_in_any_table_is_found() -> None:
    write = runpy.run_path(str(SCRIPT))["page"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    blocks = [*re.finditer(r"<!-- table: (\S+) -->.*?<!-- end -->", page, re.DOTALL)]
    assert len(blocks) == 12
    for block in blocks:
        digit = re.search(r"\d\.\d", block[0])
        if digit is None:
            assert block[1] == "gpu"
            continue
        at = block.start() + digit.start()
        other = f"{page[:at]}{(int(page[at]) + 1) % 10}{page[at + 1 :]}"
        assert write(other) == page, block[1]
