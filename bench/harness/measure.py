"""Times runs that take turns, with the host's clock or with GPU events."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]


def mark(device: str) -> Any:
    """The current time; on a GPU, an event that records when the device reaches it."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(start: Any, stop: Any) -> float:
    """Milliseconds between two marks."""
    if isinstance(start, float):
        return 1e3 * (stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop))


def timed(run: Run, device: str = "cpu", before: Run | None = None) -> Callable[[], float]:
    """Returns a function that times a run in milliseconds; `before` runs first, untimed."""

    def milliseconds() -> float:
        if before is not None:
            before()
        start = mark(device)
        run()
        return elapsed(start, mark(device))

    return milliseconds


def in_turns(
    runs: dict[str, Callable[[], Any]], rounds: int, seconds: float = math.inf
) -> dict[str, list[Any]]:
    """Returns the results of each run in every round.

    Runs take turns, so all see the same state of the machine. The first round is a warm-up. No
    round begins after `seconds`; if the first round takes that long, its results are used.
    """
    found: dict[str, list[Any]] = {name: [] for name in runs}
    end = time.monotonic() + seconds
    for _ in range(rounds + 1):
        for name, run in runs.items():
            found[name].append(run())
        if time.monotonic() > end:
            break
    return {name: of_run[1:] or of_run for name, of_run in found.items()}


def median(run: Run, rounds: int, seconds: float = math.inf, device: str = "cpu") -> float:
    """The median time of a run in milliseconds."""
    return statistics.median(in_turns({"": timed(run, device)}, rounds, seconds)[""])


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(of_run) for name, of_run in times.items()}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over the rounds of the ratio of two times."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def quantiles(times: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def copy_of(moved: int, device: str = "cpu") -> Run:
    """A copy that moves this number of bytes, half of them read and half written."""
    source = torch.ones(moved // 8, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def on_device(step: Run) -> dict[str, int]:
    """A step's temporary peak memory, its kernel launches, and its host synchronizations."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
    counts = {event.key: event.count for event in profiler.key_averages()}
    launches = sum(n for key, n in counts.items() if "LaunchKernel" in key)
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    waited = sum(counts.get(key, 0) for key in waits)
    return {"peak_bytes": peak, "launches": launches, "synchronizations": waited}
