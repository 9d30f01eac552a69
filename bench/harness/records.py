"""Records of runs: lines of JSON under `bench/results/`, or where CS_KERNELS_RESULTS says."""

import contextlib
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cs_kernels import _C


def append(name: str, record: dict[str, Any]) -> Path:
    """Adds a line to a table's records; returns where they are."""
    folder = Path(os.environ.get("CS_KERNELS_RESULTS") or Path(__file__).parents[1] / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return path


OWN_FILES = ("bench/results", "docs/benchmarks.md")
"""Files that benchmarks write: a change in them does not change the code that ran."""


def origin() -> dict[str, Any]:
    """When, where and of what a run is."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit() or os.environ.get("CS_KERNELS_COMMIT", ""),
        "machine": machine(),
        "versions": versions(),
    }


def _commit() -> str:
    """The commit, with "-dirty" if anything but records differs from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    others = [f":(top,exclude){path}" for path in OWN_FILES]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *others)
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        run = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        return run.stdout.strip() if run.returncode == 0 else ""
    return ""


def versions() -> dict[str, str]:
    found = {}
    for name in ("cs_kernels", "torch", "triton", "torchjd", "timm"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
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
