"""Medians, quantiles, and a copy of as many bytes before each round of what is compared with it."""

import statistics
import time
from collections.abc import Callable

import torch


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    run()
    return statistics.median(seconds(run) for _ in range(rounds))


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def quantiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=10)
    return {name: cuts[i] for name, i in (("p20", 1), ("p50", 4), ("p80", 7))}


class Copy:
    """A copy that moves a number of bytes, half of them read and half written."""

    def __init__(self, moved: int) -> None:
        self._source = torch.ones(moved // 8)
        self._target = torch.zeros_like(self._source)
        self()

    def __call__(self) -> None:
        self._target.copy_(self._source)
