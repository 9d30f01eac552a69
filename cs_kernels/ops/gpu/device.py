"""The device: how large it is, and numbers on their way to it without waiting."""

from collections.abc import Sequence

import torch
from torch import Tensor

_captured: list[object] = []
"""What the replays of CUDA graphs read again, for as long as they live."""


def processors(device: torch.device) -> int:
    """Multiprocessors; for the interpreter one, so that small trunks take all ways."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_if_captured(tables: object, device: torch.device) -> None:
    """Keeps what a launch reads beside the caller's tensors, if a CUDA graph will read it again."""
    if _capturing(device):
        _captured.append(tables)


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError during the capture of a CUDA graph."""
    if _capturing(device):
        raise RuntimeError(
            "the first step of a trunk makes tables and compiles kernels, which cannot be captured"
            " in a CUDA graph: make a step before the capture"
        )


def upload(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Int64 numbers on the device."""
    # Pinned memory cannot be had during a capture.
    pinned = device.type == "cuda" and not _capturing(device)
    here = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned)
    keep_if_captured(here, device)
    return here.to(device, non_blocking=True)
