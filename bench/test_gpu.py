"""Fused Phase 2 on a GPU against the copy bandwidth of the same moments, and against the peers.

A step is timed twice by events of the device: replayed from a CUDA graph, which is the time that
the kernels take, and launched from Python, which is the time that a caller sees when nothing else
is queued. Before each round, as many bytes are copied as a step moves; the fraction of the limit is
the median over rounds of the ratio of the two. A peer is quoted as a ratio of medians, launched
from Python as ours.
"""

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.device import launches_and_synchronizations, median_milliseconds, milliseconds
from harness.problems import Problem, cases, check, make, name_of, pcgrad_peers
from harness.shapes import NETWORKS
from harness.timing import median_ratio, quantiles

import cs_kernels as cs

BACKENDS = [name for name in ("triton", "cuda") if cs.available_backends()[name] is None]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def against_copy(
    run: Callable[[], object], copy: Callable[[], object], rounds: int, *, queued: bool
) -> tuple[list[float], list[float]]:
    """Milliseconds of each round, and of the copy just before it.

    A copy stands in the queue before the one that is timed, so that its launch is not waited for;
    before the run too if it is `queued`.
    """
    steps, copies = [], []
    for _ in range(rounds):
        copies.append(milliseconds(copy, copy))
        steps.append(milliseconds(run, copy if queued else lambda: None))
    return steps, copies


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
    problem.step()
    expected = [update.clone() for update in problem.updates]
    for _ in range(2):
        for update in problem.updates:
            update.fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(problem.updates, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", BACKENDS)
@cases("resnet18", "resnet50", "hrnet18", "wide", tasks=(2, 4, 8, 16))
@torch.no_grad()
def test_gpu(
    report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype, name: str
) -> None:
    if quick and (network, tasks) != ("resnet18", 4):
        pytest.skip("the quick run times ResNet-18 at K = 4")
    if tasks == 16 and network != "resnet50":
        pytest.skip("one network shows the general kernel")
    random.seed(0)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        problem = make(network, tasks, dtype)
        source = torch.randn(problem.bytes // 2 // dtype.itemsize, dtype=torch.float32).to(dtype)
        target = torch.zeros_like(source)
    with cs.use_backend(name):
        check(problem)
        torch.cuda.set_sync_debug_mode("error")
        try:
            problem.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        launches, waits = launches_and_synchronizations(problem.step)
        replay = captured(problem.step)
        check_replay(problem, replay)
        rounds = 11 if quick else 41

        def copy() -> None:
            target.copy_(source)

        replays, copies = against_copy(replay, copy, rounds, queued=True)
        steps, _ = against_copy(problem.step, copy, rounds, queued=False)
    step = statistics.median(steps)
    peers = {
        peer: median_milliseconds(run, 3 if quick else 5)
        for peer, run in pcgrad_peers(problem).items()
    }
    report.add(
        "gpu",
        backend=name,
        network=network,
        tasks=tasks,
        dtype=name_of(dtype),
        numel=problem.numel,
        bytes=problem.bytes,
        tensors=len(NETWORKS[network]),
        milliseconds=quantiles(steps),
        replayed_milliseconds=quantiles(replays),
        copy_gigabytes_per_second=problem.bytes / statistics.median(copies) / 1e6,
        fraction_of_limit=median_ratio(copies, replays),
        launches=launches,
        synchronizations=waits,
        peers={peer: {"milliseconds": time, "ratio": time / step} for peer, time in peers.items()},
    )
