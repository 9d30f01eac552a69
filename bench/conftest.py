"""Collects the cases of a run, prints them as tables, and keeps them as records."""

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import tables
import torch

from cs_kernels import _C

RESULTS = Path(__file__).parent / "results"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one small network, no record")


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--quick"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Report:
    """The cases of one run, by table."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.origin = origin()

    def add(self, table: str, **case: Any) -> None:
        self.tables.setdefault(table, []).append(case)


def origin() -> dict[str, Any]:
    """When, where and of what a run is."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": machine(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("cs_kernels", "torch", "triton", "torchjd"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": _C.cpu_instruction_set,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


_report = Report()


@pytest.fixture
def report() -> Report:
    return _report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _report.tables:
        return
    terminalreporter.section("measured")
    terminalreporter.line(json.dumps(_report.origin))
    whole = not config.getoption("--quick") and not config.getoption("-k")
    for name, cases in _report.tables.items():
        terminalreporter.line("")
        for line in tables.LINES[name](cases):
            terminalreporter.line(line)
        if whole:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{name}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps({**_report.origin, "cases": cases}) + "\n")
            if name in tables.PLOTTED:
                import plot

                plot.draw(name, path, path.with_suffix(".png"))
            terminalreporter.line(f"record appended to {path}")
