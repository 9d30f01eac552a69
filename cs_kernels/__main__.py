"""Prints the facts that a bug report should contain: `python -m cs_kernels [--json]`.

`python -m cs_kernels check` tests whether the kernels are correct on this machine.
"""

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cs_kernels as cs
from cs_kernels.check import record, watchdog


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """The installation and the machine; None for missing parts."""
    compiled = sys.modules.get("cs_kernels._C")
    return {
        "cs_kernels": cs.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "triton": _triton(),
        "platform": platform.platform(),
        "instruction_set": getattr(compiled, "cpu_instruction_set", None),
        "openmp": getattr(compiled, "openmp", None),
        "threads": torch.get_num_threads(),
        "cuda_architectures": getattr(compiled, "cuda_architectures", None),
        "without_cuda": getattr(compiled, "without_cuda", None),
        "gpus": [
            "{0.name}, compute capability {0.major}.{0.minor}".format(
                torch.cuda.get_device_properties(index)
            )
            for index in range(torch.cuda.device_count())
        ],
        "backends": cs.available_backends(),
    }


def text(found: dict[str, Any]) -> str:
    """The facts in two columns."""
    backends = [f"{name}: {why or 'it runs'}" for name, why in found["backends"].items()]
    lines = []
    for name, value in (found | {"backends": backends}).items():
        entries = value if isinstance(value, list) else [value]
        texts = ["none" if entry is None else str(entry) for entry in entries or [None]]
        lines.append(f"{name:<20}" + f"\n{'':<20}".join(texts))
    return "\n".join(lines)


def check(path: Path, *, seconds: float, bench: bool) -> int:
    """Runs all checks, prints a table and writes a record; returns the exit status."""
    pairs = watchdog.pairs()
    results = watchdog.run(pairs, seconds=seconds, bench=bench)
    record.write(path, record.as_json(facts(), results))
    print(*record.missing(), record.table(results), sep="\n")
    print("", *record.advice(results), f"the record is in {path}", sep="\n")
    if not pairs:
        print("no backend was checked: only the reference runs here")
    return int(not pairs or bool(record.failures(results)))


def main(arguments: list[str] | None = None) -> int:
    """Prints the facts, or checks the kernels; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cs_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    commands = parser.add_subparsers(dest="command")
    checks = commands.add_parser(
        "check",
        help="test whether the kernels are correct on this machine",
        description="Compares every backend that runs here with the float64 reference: operators,"
        " whole steps, a captured step. A hang or a crash counts as a failure. The exit status is 0"
        " if a backend was checked and nothing failed.",
    )
    checks.add_argument("--bench", action="store_true", help="also measure times")
    checks.add_argument(
        "--record",
        type=Path,
        default=Path("cs_kernels-check.json"),
        metavar="FILE",
        help="the file for the record (%(default)s)",
    )
    checks.add_argument(
        "--seconds",
        type=float,
        default=30,
        help="the seconds after which a running check counts as a hang (%(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.command == "check":
        return check(options.record, seconds=options.seconds, bench=options.bench)
    print(json.dumps(facts(), indent=2) if options.json else text(facts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
