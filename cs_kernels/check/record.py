"""The results of the checks: a table, advice, and a JSON file to send."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cs_kernels.check import cases
from cs_kernels.check.watchdog import Result
from cs_kernels.ops.backends import available_backends


def _driver() -> str | None:
    """The version of NVIDIA's driver, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    if result.outcome != "ok":
        return result.outcome.upper()
    return f"{result.value:.2f}" if result.check in cases.TIMES else f"ok ({result.value:.0e})"


def table(results: Sequence[Result]) -> str:
    """A table with a row per check and a column per backend, then every failure in full."""
    columns = dict.fromkeys(f"{r.backend} ({r.device})" for r in results)
    cells = {(r.check, f"{r.backend} ({r.device})"): r for r in results}
    rows = [["check", *columns]]
    for check in dict.fromkeys(r.check for r in results):
        rows.append([check, *(_cell(cells.get((check, column))) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for result in failures(results):
        detail = result.detail.replace("\n", "\n    ")
        lines += ["", f"{result.backend}, {result.check}: {result.outcome}: {detail}"]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.outcome != "ok"]


def advice(results: Sequence[Result]) -> list[str]:
    """The `CS_KERNELS_BACKEND` to set, for each device on which a backend failed."""
    lines = []
    failed = {result.backend for result in failures(results)}
    for device in dict.fromkeys(result.device for result in results):
        backends = [*dict.fromkeys(r.backend for r in results if r.device == device)]
        if not failed & {*backends}:
            continue
        usable = [backend for backend in backends if backend not in failed]
        lines.append(
            f"on {device}, set CS_KERNELS_BACKEND={(*usable, 'reference')[0]} in the environment:"
            f" {', '.join(b for b in backends if b in failed)} failed here"
        )
    if lines:
        lines.append("please attach the record to an issue of the type 'Record of a machine'")
    return lines


def missing() -> list[str]:
    """A line for each backend that cannot run here, with the reason."""
    return [f"{name} is not checked: {why}" for name, why in available_backends().items() if why]


def as_json(facts: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """The record: the installation, the machine, and every result."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver": _driver(),
        **facts,
        "results": [asdict(result) for result in results],
    }


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n")
