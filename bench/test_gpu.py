"""Fused Phase 2 on a GPU against a copy of as many bytes, just before, and against the peers.

A step is timed twice by events of the device: replayed from a CUDA graph, which is the time that
the kernels take, and launched from Python, which is the time that a caller sees when nothing else
is queued. Peers are launched from Python.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.measure import copy_of, in_turns, median, on_device, quantiles, ratio, timed
from harness.peers import peers
from harness.problems import Problem, name_of

import cs_kernels as cs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BACKENDS = [name for name in ("triton", "cuda") if cs.available_backends()[name] is None]
CASES = [
    pytest.param(network, tasks, dtype, id=f"{network}-K{tasks}-{name_of(dtype)}")
    for network in ("resnet18", "resnet50", "hrnet18", "wide")
    for tasks in (2, 4, 8, 16)
    for dtype in (torch.float32, torch.bfloat16)
    if tasks < 16 or network == "resnet50"  # One network shows the general kernel.
]


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of one run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check_replay(problem: Problem, replay: Callable[[], None]) -> None:
    """A replay and a second one give the bits of a step from Python."""
    problem.phase2()
    expected = [update.clone() for update in problem.updates]
    for _ in range(2):
        for update in problem.updates:
            update.fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(problem.updates, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("network", "tasks", "dtype"), CASES)
@torch.no_grad()
def test_gpu(
    report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype, backend: str
) -> None:
    if quick and (network, tasks) != ("resnet18", 4):
        pytest.skip("the quick run times ResNet-18 at K = 4")
    random.seed(0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        problem = Problem(network, tasks, dtype)
    copy = copy_of(problem.phase2_bytes(), "cuda")
    with cs.use_backend(backend):
        problem.check_phase2()
        torch.cuda.set_sync_debug_mode("error")
        try:
            problem.phase2()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        replay = captured(problem.phase2)
        check_replay(problem, replay)
        # A copy is queued before what is timed, so that no launch is waited for.
        runs = {
            "copy": timed(copy, "cuda", copy),
            "replayed": timed(replay, "cuda", copy),
            "step": timed(problem.phase2, "cuda"),
        }
        times = in_turns(runs, 11 if quick else 41)
        taken = on_device(problem.phase2)
    milliseconds = quantiles(times["step"])
    others = peers("PCGrad", problem.parameters, problem.rows, prepared=True)
    others["reference"] = problem.reference
    report(
        "gpu",
        backend=backend,
        **problem.facts,
        dtype=name_of(dtype),
        bytes=problem.phase2_bytes(),
        milliseconds=milliseconds,
        replayed_milliseconds=quantiles(times["replayed"]),
        copy_gigabytes_per_second=problem.phase2_bytes() / quantiles(times["copy"])["p50"] / 1e6,
        fraction_of_limit=ratio(times["copy"], times["replayed"]),
        **taken,
        peers={
            name: {"ratio": median(run, 5, 5, "cuda") / milliseconds["p50"]}
            for name, run in others.items()
        },
    )
