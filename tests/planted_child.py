"""Checks with a faulty `gramian`: `python planted_child.py FAULT BACKEND DEVICE NAME...`."""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from layers import EMULATION, emulate
from torch import Tensor

from cs_kernels.check import child
from cs_kernels.ops import backends


def _hang(right: Tensor) -> Tensor:
    ctypes.PyDLL(None).pause()  # Holds the interpreter's lock, like a launch that never returns.
    return right


def _crash(right: Tensor) -> NoReturn:
    os.abort()  # Not SIGSEGV: the address sanitizer would append a long stack of its own.


def _wait(right: Tensor) -> Tensor:
    return right * float(right.isfinite().all().item())


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda right: right,
    "wrong": lambda right: right * 1.001,
    "unsteady": lambda right: right * (1 + 1e-12 * torch.rand_like(right)),
    "hang": _hang,
    "crash": _crash,
    "waits": _wait,
}


def main(fault: str, backend: str, *rest: str) -> None:
    """Runs `child.main` with a faulty kernel."""
    if EMULATION:
        emulate()
    operators = backends._BACKENDS[backend].operators
    right = operators["gramian"]

    def planted(*arguments: Any) -> Tensor:
        return FAULTS[fault](right(*arguments))

    operators["gramian"] = planted
    if fault == "crash at the start":
        os.abort()
    child.main(backend, *rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
