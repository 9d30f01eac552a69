"""Collects the cases, prints them against the limit, and keeps a record."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_kernels import _C

RECORDS = Path(__file__).parent / "results" / "cpu.jsonl"
PEERS = ("textbook PCGrad", "TorchJD matrix", "TorchJD step", "reference")


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
    """The cases of one run."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []

    def add(
        self,
        *,
        steps: list[float],
        copies: list[float],
        moved: int,
        peers: dict[str, float],
        **case: Any,
    ) -> None:
        """Of a case: times of the step and of the copy of as many bytes before each."""
        quantiles = statistics.quantiles(steps, n=10)
        self.cases.append(
            {
                **case,
                "bytes": moved,
                "peers": {
                    name: {"seconds": value, "ratio": value / statistics.median(steps)}
                    for name, value in peers.items()
                },
                "milliseconds": {
                    name: 1e3 * value
                    for name, value in zip(
                        ("p20", "p50", "p80"),
                        (quantiles[1], quantiles[4], quantiles[7]),
                        strict=True,
                    )
                },
                "copy_gigabytes_per_second": moved / statistics.median(copies) / 1e9,
                "times_the_limit": statistics.median(
                    step / copy for step, copy in zip(steps, copies, strict=True)
                ),
            }
        )

    def lines(self) -> list[str]:
        head = (
            f"{'network':9} {'K':>2} {'dtype':8} {'N':>9} {'MB':>6} {'ms p50':>7} {'copy GB/s':>9}"
            f" {'x limit':>7}" + "".join(f" {'x ' + peer:>17}" for peer in PEERS)
        )
        rows = [
            f"{c['network']:9} {c['tasks']:2} {c['dtype']:8} {c['numel']:9} {c['bytes'] / 1e6:6.1f}"
            f" {c['milliseconds']['p50']:7.2f} {c['copy_gigabytes_per_second']:9.1f}"
            f" {c['times_the_limit']:7.2f}"
            + "".join(f" {c['peers'][peer]['ratio']:17.1f}" for peer in PEERS)
            for c in self.cases
        ]
        return [
            "x limit: time of the fused step over that of a copy of (K+2) N elements' bytes",
            "x peer: time of the peer over that of the fused step",
            "TorchJD's PCGrad: on a matrix that is there, and from all gradients to .grad (step)",
            head,
            *rows,
            *self.targets(),
        ]

    def targets(self) -> list[str]:
        """The aims for K = 4, ResNet-18, float32, and whether this run met them."""
        for case in self.cases:
            if (case["network"], case["tasks"], case["dtype"]) == ("resnet18", 4, "float32"):
                peers = case["peers"]
                aims = [
                    ("limit", case["times_the_limit"], case["times_the_limit"] <= 1.25, "<= 1.25"),
                    *(
                        (peer, peers[peer]["ratio"], peers[peer]["ratio"] >= aim, f">= {aim}")
                        for peer, aim in (("TorchJD step", 5), ("textbook PCGrad", 20))
                    ),
                ]
                return [
                    f"aim at K = 4, ResNet-18, float32: x {name} {wanted}: {value:.2f},"
                    f" {'met' if met else 'NOT met'}"
                    for name, value, met, wanted in aims
                ]
        return []

    def record(self) -> dict[str, Any]:
        root = Path(__file__).parent
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit,
            "machine": machine(),
            "versions": {name: version(name) for name in ("cs_kernels", "torch", "torchjd")},
            "cases": self.cases,
        }


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
    }


_report = Report()


@pytest.fixture
def report() -> Report:
    return _report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _report.cases:
        return
    terminalreporter.section("fused Phase 2 against the limit of memory")
    terminalreporter.line(json.dumps(machine()))
    for line in _report.lines():
        terminalreporter.line(line)
    if not config.getoption("--quick"):
        RECORDS.parent.mkdir(exist_ok=True)
        with RECORDS.open("a") as file:
            file.write(json.dumps(_report.record()) + "\n")
        import plot

        plot.draw(RECORDS, RECORDS.with_suffix(".png"))
        terminalreporter.line(f"record appended to {RECORDS}")
