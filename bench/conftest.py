"""Collects the cases of a run, prints them as tables, and keeps them as records."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import records
from page import table


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
        self.origin = records.origin()

    def add(self, table: str, **case: Any) -> None:
        self.tables.setdefault(table, []).append(case)


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
        terminalreporter.line(f"\n{table(name, cases)}")
        if whole:
            path = records.append(name, {**_report.origin, "cases": cases})
            terminalreporter.line(f"record appended to {path}")
