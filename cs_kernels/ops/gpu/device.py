"""Device size, CUDA graph capture, and copies to the device without host synchronization."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

_immortal_tables: list[object] = []
"""Tables and buffers used by graphs captured outside this package; never freed."""

_graph_tables: ContextVar[list[object] | None] = ContextVar("graph_tables", default=None)
"""The list of the enclosing `captured_tables`, if any."""

_capture_reserve: list[Tensor] = []
"""Pinned memory for captures, in one tensor: a capture can neither allocate pinned memory nor copy
from pageable memory."""

_LEAST_RESERVE = 1 << 17
"""Minimum size of the reserve in int64 numbers: one megabyte."""

_RESERVED_CALLS = 16
"""The number of operator calls per captured step that the reserve must cover."""


@contextlib.contextmanager
def captured_tables() -> Iterator[list[object]]:
    """Collects the tables read by a CUDA graph that is captured in the `with` block.

    The caller must keep the tables alive as long as the graph.
    """
    tables: list[object] = []
    token = _graph_tables.set(tables)
    try:
        yield tables
    finally:
        _graph_tables.reset(token)


def _keep_for_graph(table: object) -> None:
    tables = _graph_tables.get()
    (_immortal_tables if tables is None else tables).append(table)


VECTOR_BYTES = 16
"""The widest memory access of a kernel, in bytes."""


def multiprocessors(device: torch.device) -> int:
    """The number of SMs; 1 for Triton's interpreter, so that small trunks use every code path."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream's handle; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Tables(Protocol):
    """Cached tensors and the handle of the stream on which they were made."""

    @property
    def stream(self) -> int: ...

    @property
    def on_device(self) -> tuple[Tensor, ...]: ...


def keep(tables: Tables, device: torch.device) -> None:
    """Keeps tables alive until a launch has read them or, during capture, while the graph lives."""
    if _capturing(device):
        _keep_for_graph(tables)
    elif tables.stream != stream_of(device):
        for tensor in tables.on_device:
            tensor.record_stream(torch.cuda.current_stream(device))


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError if a CUDA graph is being captured."""
    if _capturing(device):
        raise RuntimeError(
            "the first step of a trunk makes tables and compiles kernels, which cannot be captured"
            " in a CUDA graph: run one step before the capture"
        )


def _pinned(numbers: int) -> Tensor:
    return torch.empty(numbers, dtype=torch.int64, device="cpu", pin_memory=True)


def host_buffer(numbers: int, device: torch.device) -> Tensor:
    """An int64 buffer on the host, for `send`.

    Raises:
        RuntimeError: A CUDA graph is being captured and earlier steps pinned too little memory.

    """
    if device.type != "cuda":
        return torch.empty(numbers, dtype=torch.int64, device="cpu")
    left = len(_capture_reserve[0]) if _capture_reserve else 0
    if _capturing(device):
        if numbers > left:
            raise RuntimeError(
                f"a captured step needs pinned memory for {numbers} numbers, but only {left} are"
                " left: run one step before the capture"
            )
        buffer, _capture_reserve[0] = _capture_reserve[0].tensor_split([numbers])
        _keep_for_graph(buffer)
        return buffer
    if left < _RESERVED_CALLS * numbers:
        _capture_reserve[:] = [_pinned(max(_LEAST_RESERVE, 4 * _RESERVED_CALLS * numbers))]
    return _pinned(numbers)


def send(buffer: Tensor, device: torch.device) -> Tensor:
    """Copies the buffer to the device without host synchronization."""
    return buffer.to(device, non_blocking=True)


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copies int64 numbers to the device without host synchronization."""
    return send(host_buffer(len(numbers), device).copy_(on_host(numbers)), device)


def on_host(numbers: Sequence[int]) -> Tensor:
    """An int64 tensor on the CPU, whatever torch's default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def numbered(prefix: Sequence[int], count: int) -> Tensor:
    """Returns int32 [count, len(prefix) + 1]; a row is the prefix, followed by the row's index."""
    rows = torch.empty((count, len(prefix) + 1), dtype=torch.int32, device="cpu")
    rows[:, :-1] = torch.tensor(prefix, dtype=torch.int32, device="cpu")
    rows[:, -1] = torch.arange(count, dtype=torch.int32, device="cpu")
    return rows


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes this the current device while kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
