"""Fused Phase 2 against a copy of as many bytes, just before, and against the peers."""

import random
from typing import Any

import pytest
import torch
from harness.measure import copy_of, in_turns, median, quantiles, ratio, timed
from harness.peers import peers
from harness.problems import Problem, name_of

CASES = [
    pytest.param(network, tasks, dtype, id=f"{network}-K{tasks}-{name_of(dtype)}")
    for network in ("resnet18", "small")
    for tasks in (2, 4, 8)
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("network", "tasks", "dtype"), CASES)
@torch.no_grad()
def test_phase2(report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype) -> None:
    random.seed(0)
    problem = Problem(network, tasks, dtype, quick)
    problem.check_phase2()
    of_threads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        problem.phase2()
        of_threads.append([update.clone() for update in problem.updates])
    torch.testing.assert_close(*of_threads, rtol=0, atol=0)

    runs = {"copy": timed(copy_of(problem.phase2_bytes())), "ours": timed(problem.phase2)}
    times = in_turns(runs, 2 if quick else 61)
    milliseconds = quantiles(times["ours"])
    others = peers("PCGrad", problem.parameters, problem.rows, prepared=True)
    others["reference"] = problem.reference
    report(
        "phase2",
        **problem.facts,
        dtype=name_of(dtype),
        bytes=problem.phase2_bytes(),
        milliseconds=milliseconds,
        copy_gigabytes_per_second=problem.phase2_bytes() / quantiles(times["copy"])["p50"] / 1e6,
        times_the_limit=ratio(times["ours"], times["copy"]),
        peers={
            name: {"ratio": median(run, 15, 0 if quick else 3) / milliseconds["p50"]}
            for name, run in others.items()
        },
    )
