"""Every method against a copy, TorchJD and the textbook loops.

"step" starts from the gradients that K backward passes have left in the parameters' `.grad` and
ends with the update in `.grad`; "matrix" starts from an existing K x N matrix and ends with a
vector.
"""

import random
import statistics
from typing import Any

import pytest
import torch
from harness.counting import host_synchronizations
from harness.measure import copy_of, in_turns, median, ratio, timed
from harness.peers import flattened, peers
from harness.problems import METHODS, Problem
from torch import Tensor

import cs_kernels as cs


def on_matrix(method: cs.Method, matrix: Tensor) -> Tensor:
    if isinstance(method, cs.GramianMethod):
        return cs.functional.combine(matrix, method.weights(cs.functional.gramian(matrix)))
    update = torch.empty_like(matrix[0])
    torch.ops.cs_kernels.drop_signs_([update], list(matrix), [0.0] * len(matrix), 0, 0, len(matrix))
    return update


@pytest.mark.parametrize("tasks", [2, 4, 8, 16])
@pytest.mark.parametrize("network", ["small", "resnet18", "resnet50"])
@torch.no_grad()
def test_methods(report: Any, quick: bool, network: str, tasks: int) -> None:
    if quick and (network, tasks) != ("small", 4):
        pytest.skip("one small network")
    random.seed(0)
    problem = Problem(network, tasks, quick=quick)
    matrix = flattened(problem.rows)
    for name, make in METHODS.items():
        problem.check_combine(make)
        method = make()
        copy = copy_of(problem.combine_bytes(name))
        runs = {
            "copy": timed(copy),
            "step": timed(lambda: problem.combine(method), before=problem.refill),
        }
        times = in_turns(runs, 2 if quick else 31, 5)
        del copy, runs
        milliseconds = {
            "step": statistics.median(times["step"]),
            "matrix": median(lambda: on_matrix(method, matrix), 2 if quick else 31, 3),
        }
        others = peers(name, problem.parameters, problem.rows, matrix)
        ratios = {}
        synchronizations = {"ours": host_synchronizations(lambda: problem.combine(method))}
        for peer, run in others.items():
            ours = milliseconds["matrix" if peer == "TorchJD matrix" else "step"]
            ratios[peer] = {"ratio": median(run, 15, 0 if quick else 3) / ours}
            if peer == "TorchJD step":
                synchronizations["TorchJD"] = host_synchronizations(run)
            if peer == "textbook" and network == "small":  # The count is the same for every size.
                synchronizations["textbook"] = host_synchronizations(run)
        report(
            "methods",
            method=name,
            **problem.facts,
            bytes=problem.combine_bytes(name),
            milliseconds=milliseconds,
            times_the_limit=ratio(times["step"], times["copy"]),
            peers=ratios,
            synchronizations=synchronizations,
        )


@pytest.mark.parametrize("tasks", [2, 4, 8, 16, 40])
def test_solvers(report: Any, quick: bool, tasks: int) -> None:
    """Times the weights from the Gramian: the slower of a regular and a singular Gramian."""
    if quick and tasks != 4:
        pytest.skip("one size")
    torch.manual_seed(0)
    microseconds = {}
    for name, make in {**METHODS, "NTKMTL": cs.NTKMTL}.items():
        method = make()
        if not isinstance(method, cs.GramianMethod):
            continue
        times = []
        for rank in (2 * tasks, max(1, tasks // 2)):
            rows = torch.randn(tasks, rank, dtype=torch.float64)
            gramian = rows @ rows.T
            times.append(median(lambda: method.weights(gramian), 2 if quick else 300))
        microseconds[name] = 1e3 * max(times)
    report("solvers", tasks=tasks, microseconds=microseconds)
