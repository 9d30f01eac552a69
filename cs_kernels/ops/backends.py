"""Which backend computes an operator: what there is, what can run, and what was asked for."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cs_kernels.ops import native, reference


@dataclass(frozen=True)
class Backend:
    """One implementation of all operators: functions with the operators' names."""

    module: ModuleType | None
    devices: tuple[str, ...] | None
    """The device types it computes on; None for all."""
    reason: str | None = None
    """Why it cannot run."""


# In order of preference.
_BACKENDS = {
    "cpu": Backend(native, ("cpu",), native.unavailable),
    "cuda": Backend(None, ("cuda",), "this version has no CUDA kernels"),
    "triton": Backend(None, ("cuda",), "this version has no Triton kernels"),
    "reference": Backend(reference, None),
}

_requested: ContextVar[str | None] = ContextVar("cs_kernels_backend", default=None)


def available_backends() -> dict[str, str | None]:
    """Every backend by name, with None if it can run here and else the reason why not."""
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
    """Computes every operator with one backend, in this thread, inside the `with`.

    Args:
        name: "reference", "cpu", "triton" or "cuda".

    Raises:
        ValueError: There is no such backend.
        RuntimeError: It cannot run here; the message says why.

    """
    _runnable(name, "name")
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def _select(device: str | None) -> ModuleType:
    requested = _requested.get()
    source = "use_backend"
    if requested is None:
        requested = os.environ.get("CS_KERNELS_BACKEND") or None
        source = "the environment variable CS_KERNELS_BACKEND"
    if requested is not None:
        backend = _runnable(requested, source)
        if backend.devices is not None and device not in backend.devices:
            raise RuntimeError(
                f"{source} {requested!r} computes on {', '.join(backend.devices)} tensors,"
                f" got {device or 'other'} ones"
            )
    else:
        backend = next(
            backend
            for backend in _BACKENDS.values()
            if backend.reason is None and (backend.devices is None or device in backend.devices)
        )
    assert backend.module is not None
    return backend.module


def router(operator: str, device: str | None) -> Callable[..., Any]:
    """The function that PyTorch's dispatcher calls for an operator on a type of device."""

    def call(*args: Any) -> Any:
        return getattr(_select(device), operator)(*args)

    return call
