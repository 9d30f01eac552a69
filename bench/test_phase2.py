"""Fused Phase 2 against the peers, and against a copy that moves as many bytes."""

import random
from typing import Any

import pytest
import torch
from harness.measure import copy_of, in_turns, ratio, timed
from harness.problems import Problem, phase2_cases


@phase2_cases("resnet18", "small", tasks=(2, 4, 8))
@torch.no_grad()
def test_phase2(report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype) -> None:
    if quick and (network, tasks) != ("small", 4):
        pytest.skip("one small network")
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
    limit = ratio(times["ours"], times["copy"])
    facts = problem.phase2_facts(times["ours"], times["copy"])
    report("phase2", **facts, times_the_limit=limit)
