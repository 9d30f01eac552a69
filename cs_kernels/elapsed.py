"""Times a block of code within a step."""

import time

import torch


class Elapsed:
    """The time that a `with` block takes on a device; on a GPU, measured only if `wanted`."""

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self._marks: list[float | torch.cuda.Event] = []
        self._device = device
        self._wanted = wanted

    def _mark(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
        elif self._wanted:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def milliseconds(self) -> float | None:
        """The time, or None if it was not measured; synchronizes with a GPU."""
        match self._marks:
            case [float() as start, float() as end]:
                return 1e3 * (end - start)
            case [torch.cuda.Event() as start, torch.cuda.Event() as end]:
                end.synchronize()
                return float(start.elapsed_time(end))
        return None
