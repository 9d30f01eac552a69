"""Prints the cases of a run, and appends them to the records."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import records

_origin = records.origin()
_tables: dict[str, list[dict[str, Any]]] = {}
"""The cases of the run, by table."""


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


@pytest.fixture
def report() -> Callable[..., None]:
    """Adds a case to a table."""
    return lambda table, **case: _tables.setdefault(table, []).append(case)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    whole = not config.getoption("--quick") and not config.getoption("-k")
    for name, cases in _tables.items():
        terminalreporter.section(name)
        terminalreporter.line(records.line(_origin))
        for case in cases:
            terminalreporter.line(records.line(case))
        if whole:
            path = records.append(name, {**_origin, "cases": cases})
            terminalreporter.line(f"record appended to {path}")
