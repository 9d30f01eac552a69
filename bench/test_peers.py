"""UPGrad against TorchJD's fastest variant in whole steps: time, memory and page faults.

All steps take turns. A ratio is the median over the rounds, with its quartiles; TorchJD's fastest
variant has the lowest median time.
"""

import resource
import statistics
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.measure import in_turns
from harness.whole_steps import (
    Ours,
    OursBatched,
    TorchJD,
    TorchJDAtFeatures,
    TorchJDEngine,
    WholeStep,
)

import cs_kernels as cs

THREADS = 2
PEERS = {
    "backward": TorchJD,
    "backward, a loss at a time": partial(TorchJD, chunk=1),
    "mtl_backward": TorchJDAtFeatures,
    "mtl_backward, a loss at a time": partial(TorchJDAtFeatures, chunk=1),
    "Engine": TorchJDEngine,
}


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _run(step: WholeStep) -> tuple[float, int]:
    """The milliseconds and the page faults of a step."""
    before, start = _faults(), time.perf_counter()
    step.step()
    return 1e3 * (time.perf_counter() - start), _faults() - before


# TorchJD's backward passes warn of operators without a batching rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("tasks", [2, 4, 8])
@pytest.mark.parametrize("network", ["resnet18", "resnet50", "vit", "mlp", "lstm", "experts"])
def test_peers(report: Any, quick: bool, network: str, tasks: int) -> None:
    torch.set_num_threads(THREADS)
    if find_spec("torchjd") is None:
        pytest.skip("torchjd is not installed")
    if quick and (network, tasks) != ("experts", 2):
        pytest.skip("one small network")
    ours: dict[str, WholeStep] = {
        "ours": Ours(network, tasks, cs.UPGrad()),
        "ours, batched": OursBatched(network, tasks, cs.UPGrad()),
    }
    steps = ours | {name: make(network, tasks) for name, make in PEERS.items()}
    for step in steps.values():
        step.step()  # Our first step checks its passes, so it makes them one by one.
    updates = [step.found() for step in ours.values()]
    torch.testing.assert_close(*updates, rtol=1e-3, atol=1e-4 * float(updates[0].abs().max()))
    runs = {name: partial(_run, step) for name, step in steps.items()}
    rounds = in_turns(runs, 1 if quick else 25, 20)
    times = {name: [t for t, _ in of_step] for name, of_step in rounds.items()}
    fastest = min(PEERS, key=lambda name: statistics.median(times[name]))
    for name in (*ours, fastest):
        ratios = [a / b for a, b in zip(times[name], times[fastest], strict=True)]
        low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        report(
            "peers",
            step=name,
            **steps[name].setting.facts(),
            milliseconds=statistics.median(times[name]),
            over_fastest=middle,
            quartiles={"low": low, "high": high},
            faults=statistics.median(faults for _, faults in rounds[name]),
            peak_bytes=steps[name].peak(),
            rounds=len(ratios),
            threads=THREADS,
        )
