"""The device: how large it is, and numbers on their way to it without waiting."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_captured: list[object] = []
"""What the replays of CUDA graphs read again, for as long as they live."""

_left_for_captures: list[Tensor] = []
"""Pinned numbers, in one tensor: a capture can neither allocate some nor copy from other memory."""

_FOR_CAPTURES = 1 << 17
"""As many at least: a megabyte."""


def processors(device: torch.device) -> int:
    """Multiprocessors; for the interpreter one, so that small trunks take all ways."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """The current stream's handle; 0 on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Tables(Protocol):
    """Tensors that were made once, on some stream."""

    @property
    def stream(self) -> int:
        """The handle of that stream."""

    @property
    def on_device(self) -> tuple[Tensor, ...]:
        """The tensors."""


def keep(tables: Tables, device: torch.device) -> None:
    """Keeps their memory for a launch that reads it: for good if it is captured in a CUDA graph."""
    if _capturing(device):
        _captured.append(tables)
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


def room_here(numbers: int, device: torch.device) -> Tensor:
    """Int64 numbers on the host, for `send`.

    Raises:
        RuntimeError: In the capture of a CUDA graph, if no step before it has left room for it.

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
        here, _left_for_captures[0] = _left_for_captures[0].tensor_split([numbers])
        _captured.append(here)
        return here
    if left < 64 * numbers:
        _left_for_captures[:] = [_pinned(max(_FOR_CAPTURES, 64 * numbers))]
    return _pinned(numbers)


def send(here: Tensor, device: torch.device) -> Tensor:
    """The same numbers on the device, without waiting."""
    return here.to(device, non_blocking=True)


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Int64 numbers on the device."""
    return send(room_here(len(numbers), device).copy_(on_host(numbers)), device)


def on_host(numbers: Sequence[int]) -> Tensor:
    """Int64, whatever the default device."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
