"""Times by events of a GPU, launches and host synchronizations."""

import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def milliseconds(run: Callable[[], object], before: Callable[[], object]) -> float:
    """The time of one run; `before` runs first and is not timed."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def median_milliseconds(run: Callable[[], object], rounds: int) -> float:
    """The median time of a run, after one that is not timed."""
    run()
    return statistics.median(milliseconds(run, lambda: None) for _ in range(rounds))


def on_device(step: Callable[[], object]) -> dict[str, int]:
    """The memory of a step beyond what stays, its launches, and how often the host waits."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    launches, waits = launches_and_synchronizations(step)
    return {"peak_bytes": peak, "launches": launches, "synchronizations": waits}


def launches_and_synchronizations(run: Callable[[], object]) -> tuple[int, int]:
    """Kernels of one run, and how often the host waits for the device; as the profiler sees it."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    counts = {event.key: event.count for event in profiler.key_averages()}
    launches = sum(n for key, n in counts.items() if "LaunchKernel" in key)
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return launches, sum(counts.get(key, 0) for key in waits)
