"""Records of runs: lines of JSON in the folder CS_KERNELS_RESULTS, by default `bench/results/`."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cs_kernels import _C


def line(case: dict[str, Any]) -> str:
    """A case as text, with four significant digits per floating-point number."""
    parts = []
    for key, value in case.items():
        if isinstance(value, dict):
            value = f"({line(value)})"
        parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(parts)


def append(name: str, record: dict[str, Any]) -> Path:
    """Appends a line to a table's records; returns the path of the file."""
    folder = Path(os.environ.get("CS_KERNELS_RESULTS") or Path(__file__).parents[1] / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return path


def origin() -> dict[str, Any]:
    """A run's time, commit, machine and versions."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit() or os.environ.get("CS_KERNELS_COMMIT", ""),
        "machine": {
            "cpu": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instruction_set": _C.cpu_instruction_set,
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": _versions(),
    }


def _commit() -> str:
    """The commit, with "-dirty" if a file changed that benchmarks do not write."""
    commit = _git("rev-parse", "--short", "HEAD")
    written = [f":(top,exclude){path}" for path in ("bench/results", "docs/benchmarks.md")]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *written)
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    command, here = ["git", *arguments], Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"cuda": torch.version.cuda} if torch.version.cuda is not None else {}
    for name in ("cs_kernels", "torch", "triton", "torchjd", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
