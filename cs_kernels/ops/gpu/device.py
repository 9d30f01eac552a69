"""The device: its size, captures of CUDA graphs, and copies to it without host synchronization."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

_kept_for_good: list[object] = []
"""Tables and buffers that CUDA graphs read which somebody else captures."""

_collected: ContextVar[list[object] | None] = ContextVar("collected", default=None)
"""The list of the `captured_tables` around a capture, if any."""

_left_for_captures: list[Tensor] = []
"""Pinned memory, in one tensor: a capture can neither allocate it nor copy from other memory."""

_FOR_CAPTURES = 1 << 17
"""Numbers that are pinned at least: a megabyte."""

_CALLS = 16
"""The calls of a captured step that the pinned memory has to be enough for."""


@contextlib.contextmanager
def captured_tables() -> Iterator[list[object]]:
    """Collects the tables that a CUDA graph captured inside reads, to be kept as long as it."""
    tables: list[object] = []
    token = _collected.set(tables)
    try:
        yield tables
    finally:
        _collected.reset(token)


def _keep_for_graph(table: object) -> None:
    """Keeps what the CUDA graph that is being captured reads."""
    collected = _collected.get()
    (_kept_for_good if collected is None else collected).append(table)


VECTOR_BYTES = 16
"""The widest access of a kernel."""


def multiprocessors(device: torch.device) -> int:
    """The number of SMs; 1 for the interpreter, so that small trunks take every path."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream's handle; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Tables(Protocol):
    """Tensors that were made on a stream and are kept."""

    @property
    def stream(self) -> int:
        """The handle of that stream."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """The tensors."""


def keep(tables: Tables, device: torch.device) -> None:
    """Retains tables until a launch has read them; for good while a CUDA graph is captured."""
    if _capturing(device):
        _keep_for_graph(tables)
    elif tables.stream != stream_of(device):
        for tensor in tables.on_device:
            tensor.record_stream(torch.cuda.current_stream(device))


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError during the capture of a CUDA graph."""
    if _capturing(device):
        raise RuntimeError(
            "the first step of a trunk makes tables and compiles kernels, which cannot be captured"
            " in a CUDA graph: make a step before the capture"
        )


def _pinned(numbers: int) -> Tensor:
    return torch.empty(numbers, dtype=torch.int64, device="cpu", pin_memory=True)


def host_buffer(numbers: int, device: torch.device) -> Tensor:
    """An int64 buffer on the host, for `send`.

    Raises:
        RuntimeError: In the capture of a CUDA graph, if no step before it has pinned enough memory.

    """
    if device.type != "cuda":
        return torch.empty(numbers, dtype=torch.int64, device="cpu")
    left = len(_left_for_captures[0]) if _left_for_captures else 0
    if _capturing(device):
        if numbers > left:
            raise RuntimeError(
                f"a captured step sends {numbers} numbers from pinned memory, got {left} left of"
                " what was pinned before the capture: make a step before the capture"
            )
        buffer, _left_for_captures[0] = _left_for_captures[0].tensor_split([numbers])
        _keep_for_graph(buffer)
        return buffer
    if left < _CALLS * numbers:
        _left_for_captures[:] = [_pinned(max(_FOR_CAPTURES, 4 * _CALLS * numbers))]
    return _pinned(numbers)


def send(buffer: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without host synchronization."""
    return buffer.to(device, non_blocking=True)


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Int64 numbers on the device."""
    return send(host_buffer(len(numbers), device).copy_(on_host(numbers)), device)


def on_host(numbers: Sequence[int]) -> Tensor:
    """An int64 tensor on the CPU, whatever the default device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def numbered(prefix: Sequence[int], count: int) -> Tensor:
    """int32 [count, ...]: the prefix and an index from 0 in each row."""
    rows = torch.empty((count, len(prefix) + 1), dtype=torch.int32, device="cpu")
    rows[:, :-1] = torch.tensor(prefix, dtype=torch.int32, device="cpu")
    rows[:, -1] = torch.arange(count, dtype=torch.int32, device="cpu")
    return rows


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Makes it the current device while kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
