"""Records the outcome of a test run, from pytest's XML report and its exit status.

python bench/outcome.py NAME REPORT STATUS
"""

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness import records


def outcome(report: Path) -> dict[str, Any]:
    """The counts and the duration in seconds of a pytest run."""
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    return {**counts, "seconds": sum(float(suite.get("time", 0)) for suite in suites)}


if __name__ == "__main__":
    name, report, status = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    record = {**records.origin(), "run": name, "status": status, **outcome(report)}
    print(records.append("gpu_tests", record), record)
