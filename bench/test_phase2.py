"""Fused Phase 2 against the copy bandwidth of the same moments, and against the peers.

The speed of memory on a shared machine changes from one second to the next. So every round first
copies as many bytes as a step moves, and the quoted fraction is the median over rounds of the ratio
of the two. A peer is quoted as the ratio of medians.
"""

import random
import statistics
from typing import Any

import torch
from harness.problems import Problem, cases, check, make, name_of, pcgrad_peers
from harness.timing import median_ratio, median_seconds, quantiles, seconds


def check_threads(problem: Problem) -> None:
    """One thread and two give the same bits."""
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        problem.step()
        results.append([update.clone() for update in problem.updates])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@cases("resnet18", "small")
@torch.no_grad()
def test_phase2(
    benchmark: Any, report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype
) -> None:
    random.seed(0)
    problem = make(network, tasks, dtype, quick)
    check(problem)
    check_threads(problem)

    source = torch.randn(problem.bytes // 2 // problem.weights[0].element_size()).to(dtype)
    target = torch.zeros_like(source)
    copies: list[float] = []
    target.copy_(source)
    rounds = 5 if quick else 61
    benchmark.pedantic(
        problem.step,
        setup=lambda: copies.append(seconds(lambda: target.copy_(source))),
        rounds=rounds,
        warmup_rounds=3,
    )
    steps = benchmark.stats.stats.data
    copies = copies[-len(steps) :]

    slow = 1 if quick else 3 if network == "resnet18" else 15
    peers = {
        name: median_seconds(run, 3 * slow if name.startswith("TorchJD") else slow)
        for name, run in pcgrad_peers(problem).items()
    }
    report.add(
        "phase2",
        network=f"{network}, 4 layers" if quick else network,
        tasks=tasks,
        dtype=name_of(dtype),
        numel=problem.numel,
        bytes=problem.bytes,
        peers={
            name: {"seconds": value, "ratio": value / statistics.median(steps)}
            for name, value in peers.items()
        },
        milliseconds=quantiles([1e3 * step for step in steps]),
        copy_gigabytes_per_second=problem.bytes / statistics.median(copies) / 1e9,
        times_the_limit=median_ratio(steps, copies),
    )
