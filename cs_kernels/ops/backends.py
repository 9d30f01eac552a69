"""The operators' backends: which ones can run here, and which one is selected."""

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cs_kernels.ops.checks import check_float64
from cs_kernels.ops.solvers import SOLVERS

OPERATORS: list[str] = []
"""The names of all operators; every backend must implement each."""


@dataclass(frozen=True)
class Backend:
    """A module with an object `operators`, which has a method `solve` for all solvers."""

    module_name: str
    devices: tuple[str, ...] | None
    """The supported device types; None for all."""
    unavailable: Callable[[], str | None]
    """Returns the reason why the backend cannot run, or None."""

    @property
    def operators(self) -> dict[str, Callable[..., Any]]:
        """Functions by operator name; the first use imports the module."""
        return _operators(self.module_name)

    @property
    def run_sketch(self) -> Callable[..., bool]:
        """The function behind `sketch_` and `sketch_and_weight_`, for one tensor.

        It skips the dispatcher and the operators' checks, which take longer than a kernel in a
        backward pass: 0.2 ms, because their code is no longer in the CPU's caches. It does nothing
        and returns False if tensors are not on one device, contiguous, aligned and of a supported
        dtype. The caller makes sure that they are not lazily negated.
        """
        return _run_sketch(self.module_name)

    @property
    def reason(self) -> str | None:
        """Why the backend cannot run, or None; evaluated once."""
        return _reason(self.unavailable)

    def computes_on(self, device: str | None) -> bool:
        return self.devices is None or device in self.devices


@cache
def _operators(module_name: str) -> dict[str, Callable[..., Any]]:
    source = importlib.import_module(module_name).operators
    operators = {name: getattr(source, name) for name in OPERATORS if hasattr(source, name)}
    operators |= {f"{name}_weights": partial(source.solve, name) for name in SOLVERS}
    missing = [name for name in OPERATORS if name not in operators]
    if missing:
        raise NotImplementedError(f"{module_name} must implement every operator, lacks {missing}")
    return operators


@cache
def _run_sketch(module_name: str) -> Callable[..., bool]:
    function: Callable[..., bool] = importlib.import_module(module_name).operators.run_sketch
    return function


@cache
def _reason(unavailable: Callable[[], str | None]) -> str | None:
    return unavailable()


def _no_cpu() -> str | None:
    from cs_kernels.ops import operands

    return operands.unavailable


def _no_cuda() -> str | None:
    from cs_kernels.ops import cuda

    return cuda.unavailable()


def _no_triton() -> str | None:
    from cs_kernels.ops import operands

    if operands.unavailable is not None:
        return operands.unavailable
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not _INTERPRETED and not torch.cuda.is_available():
        return "there is no GPU; set TRITON_INTERPRET=1 to run Triton's interpreter on the CPU"
    return None


# Triton reads this variable when kernels are defined.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# In order of preference.
_BACKENDS = {
    "cpu": Backend("cs_kernels.ops.cpu", ("cpu",), _no_cpu),
    "cuda": Backend("cs_kernels.ops.cuda", ("cuda",), _no_cuda),
    "triton": Backend("cs_kernels.ops.triton", ("cpu",) if _INTERPRETED else ("cuda",), _no_triton),
    "reference": Backend("cs_kernels.ops.reference", None, lambda: None),
}

_requested: ContextVar[str | None] = ContextVar("cs_kernels_backend", default=None)


def available_backends() -> dict[str, str | None]:
    """Maps every backend's name to None if it can run here, else to the reason why it cannot."""
    return {name: _BACKENDS[name].reason for name in ("reference", "cpu", "triton", "cuda")}


def _runnable(name: str, source: str) -> Backend:
    backend = _BACKENDS.get(name)
    if backend is None:
        raise ValueError(f"{source} must be one of {sorted(_BACKENDS)}, got {name!r}")
    if backend.reason is not None:
        raise RuntimeError(f"{source} {name!r} cannot run here: {backend.reason}")
    return backend


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every operator on one backend, in this thread, inside the `with` block.

    Args:
        name: "reference", "cpu", "triton" or "cuda".

    Raises:
        ValueError: No backend has this name.
        RuntimeError: The backend cannot run here; the message says why.

    """
    _runnable(name, "name")
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


@cache
def _preferred(device: str | None) -> Backend:
    """The first backend that can run here; warns if only the reference can, but others might."""
    able = [backend for backend in _BACKENDS.values() if backend.computes_on(device)]
    chosen = next(backend for backend in able if backend.reason is None)
    if chosen is able[-1] and device is not None and len(able) > 1:
        reasons = [
            f"{name}: {backend.reason}"
            for name, backend in _BACKENDS.items()
            if backend.computes_on(device) and backend.reason is not None
        ]
        warnings.warn(
            f"operators on {device} tensors run as plain torch operations, many times slower than"
            f" compiled kernels, which cannot run here: {'; '.join(reasons)}",
            stacklevel=2,
        )
    return chosen


def _select(device: str | None) -> Backend:
    requested = _requested.get()
    source = "use_backend"
    if requested is None:
        requested = os.environ.get("CS_KERNELS_BACKEND") or None
        source = "the environment variable CS_KERNELS_BACKEND"
    if requested is None:
        return _preferred(device)
    backend = _runnable(requested, source)
    if not backend.computes_on(device):
        raise RuntimeError(
            f"{source} {requested!r} supports only {', '.join(backend.devices or ())} tensors,"
            f" got {device or 'other'} tensors"
        )
    return backend


def run_sketch(device: str) -> Callable[..., bool]:
    """The selected backend's `run_sketch` for a device type."""
    return _select(device).run_sketch


def run_sketch_of(name: str) -> Callable[..., bool]:
    """A backend's `run_sketch`, the same object at every call."""
    return _BACKENDS[name].run_sketch


def router(operator: str, device: str | None) -> Callable[..., Any]:
    """Returns the function that PyTorch's dispatcher calls for an operator on a device type."""

    def call(*args: Any) -> Any:
        # A call without tensors has nothing to compute; the reference still checks its arguments.
        others = [] if device else [x.device for x in tree_leaves(args) if isinstance(x, Tensor)]
        for other in others:
            check_float64(other, "tensors")
        backend = _select(device) if device or others else _BACKENDS["reference"]
        run = backend.operators[operator]
        if not torch.is_grad_enabled():  # Entering `no_grad` takes as long as a small operator.
            return run(*args)
        with torch.no_grad():
            return run(*args)

    return call
