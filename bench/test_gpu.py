"""Fused Phase 2 on a GPU against the peers, and against a copy that moves as many bytes.

A step is timed by device events in two ways: replayed from a CUDA graph, which shows the time of
the kernels, and launched from Python, which shows the time that a caller observes with an empty
queue. Peers are launched from Python.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.measure import copy_of, in_turns, on_device, quantiles, ratio, timed
from harness.problems import Problem, phase2_cases

import cs_kernels as cs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

BACKENDS = [name for name in ("triton", "cuda") if cs.available_backends()[name] is None]


def captured(problem: Problem) -> Callable[[], None]:
    """A CUDA graph of Phase 2; two replays must give the same bits as a step from Python."""
    problem.phase2()
    expected = [update.clone() for update in problem.updates]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        problem.phase2()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.phase2()
    for _ in range(2):
        for update in problem.updates:
            update.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(problem.updates, expected, rtol=0, atol=0)
    return graph.replay


@pytest.mark.parametrize("backend", BACKENDS)
@phase2_cases("resnet18", "resnet50", "hrnet18", "wide", tasks=(2, 4, 8, 16))
@torch.no_grad()
def test_gpu(
    report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype, backend: str
) -> None:
    if quick and (network, tasks) != ("resnet18", 4):
        pytest.skip("the quick run times ResNet-18 at K = 4")
    if tasks == 16 and network != "resnet50":
        pytest.skip("one network shows the general kernel")
    if network == "hrnet18":
        pytest.importorskip("timm")
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
        replay = captured(problem)
        # A copy is queued before each timed run, so that the device never waits for a launch.
        runs = {
            "copy": timed(copy, "cuda", copy),
            "replayed": timed(replay, "cuda", copy),
            "step": timed(problem.phase2, "cuda"),
        }
        times = in_turns(runs, 11 if quick else 41)
        taken = on_device(problem.phase2)
    report(
        "gpu",
        backend=backend,
        **problem.phase2_facts(times["step"], times["copy"]),
        replayed_milliseconds=quantiles(times["replayed"]),
        fraction_of_limit=ratio(times["copy"], times["replayed"]),
        **taken,
    )
