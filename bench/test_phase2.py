"""Fused Phase 2 against the copy bandwidth of the same moments, and against the peers.

The speed of memory on a shared machine changes from one second to the next. So every round first
copies as many bytes as a step moves, and the quoted fraction is the median over rounds of the ratio
of the two. A peer is quoted as the ratio of medians.
"""

import random
import statistics
from typing import Any

import torch
from harness.peers import TORCHJD, stacked, torchjd_matrix, torchjd_step
from harness.problems import Problem, cases, check, make, name_of
from harness.textbook import textbook_pcgrad
from harness.timing import median_ratio, median_seconds, quantiles, seconds
from torch import nn

import cs_kernels as cs


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

    of_tasks = [problem.of_task(i) for i in range(tasks)]
    matrix = torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in of_tasks])
    parameters = [nn.Parameter(weight.clone()) for weight in problem.weights]
    pcgrad = TORCHJD["PCGrad"](tasks)
    jacobians = stacked(of_tasks)
    slow = 1 if quick else 3 if network == "resnet18" else 15
    peers = {
        "textbook PCGrad": median_seconds(lambda: textbook_pcgrad(of_tasks), slow),
        "TorchJD matrix": median_seconds(lambda: torchjd_matrix(pcgrad, matrix), 3 * slow),
        "TorchJD step": median_seconds(
            lambda: torchjd_step(pcgrad, parameters, jacobians), 3 * slow
        ),
    }
    other = make(network, tasks, dtype, quick)

    def reference() -> None:
        with cs.use_backend("reference"):
            other.step()

    peers["reference"] = median_seconds(reference, slow)
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
