"""Prints what a report of a problem should contain: `python -m cs_kernels [--json]`."""

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import cs_kernels as cs


def _triton() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def facts() -> dict[str, Any]:
    """The installation and the machine; None for what is not there."""
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


def main(arguments: list[str] | None = None) -> None:
    """Prints the facts."""
    parser = argparse.ArgumentParser(prog="python -m cs_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object instead of text")
    options = parser.parse_args(arguments)
    print(json.dumps(facts(), indent=2) if options.json else text(facts()))


if __name__ == "__main__":
    main()
