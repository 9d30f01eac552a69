"""The device: how large it is, and numbers on their way to it without waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor

_captured: list[Tensor] = []
"""A graph's replays read them again, for as long as it lives."""


def processors(device: torch.device) -> int:
    """Multiprocessors; for the interpreter one, so that small trunks take all ways."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError during the capture of a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first step of a trunk makes tables and compiles kernels, which cannot be captured"
            " in a CUDA graph: make a step before the capture"
        )


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Int64 numbers on the device."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if torch.cuda.is_current_stream_capturing():
        # Pinned memory cannot be had during a capture.
        _captured.append(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        return _captured[-1].to(device, non_blocking=True)
    pinned = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)
