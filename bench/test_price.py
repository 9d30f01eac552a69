"""Whole training steps relative to the plain step, which makes one forward and one backward pass.

The plain step's backward pass is of the summed loss. `test_price` compares our steps with the
peers', `test_limits` with the lower bound for exact gradients: K backward passes after one forward
pass cost (1 + 2K) / 3 plain steps, if the forward pass, the gradients of inputs and the gradients
of weights cost the same. Every round begins with the plain step. A ratio is the median over the
rounds.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.measure import in_turns, medians, ratio, timed
from harness.problems import METHODS, assert_close
from harness.whole_steps import (
    OneMatrix,
    Ours,
    OursAtFeatures,
    OursBatched,
    OursPerTask,
    Textbook,
    TorchJD,
    TorchJDAtFeatures,
    TorchJDEngine,
    WholeStep,
)
from torch import Tensor

import cs_kernels as cs

THREADS = 2
EVERY = 10
CYCLE = 2 * EVERY
"""The steps of a timed run with `update_every`: two whole intervals, wherever the run starts."""
KEEPING = ("PCGrad", "CAGrad", "UPGrad", "NashMTL")
EXACT = ("PCGrad", "UPGrad")
PEERS: dict[str, Callable[[str, int], WholeStep]] = {
    "TorchJD backward": TorchJD,
    "TorchJD backward, a loss at a time": partial(TorchJD, chunk=1),
    "TorchJD mtl_backward": TorchJDAtFeatures,
    "TorchJD Engine": TorchJDEngine,
    "textbook PCGrad": Textbook,
    "LibMTL's way, PCGrad": OneMatrix,
}


def _keeping(name: str) -> cs.Method | None:
    """A method that solves in every tenth step; None if this version has no `update_every`."""
    try:
        cs.PCGrad(update_every=EVERY)  # In older versions, NashMTL has another option of this name.
        return getattr(cs, name)(update_every=EVERY)
    except TypeError:
        return None


def _check(row: WholeStep, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert_close([row.found()], [expected], tolerance)


def _check_kept(row: WholeStep, weights: Tensor) -> None:
    """Checks that the next step reuses the weights of the first one."""
    row.optimizer.step()
    _check(row, weights @ row.rows())


def _rows(network: str, tasks: int) -> dict[str, WholeStep]:
    """The plain step, our steps and the peers' steps, each checked in float64."""
    plain = WholeStep(network, tasks)
    rows, gradients = {"plain": plain}, plain.rows()
    weights = {name: plain.weights(getattr(cs, name)(), gradients) for name in KEEPING}
    updates = {name: weights[name] @ gradients for name in KEEPING}
    at_features = plain.weights(cs.UPGrad(), plain.rows(at_features=True)) @ gradients
    del gradients
    for name in EXACT:
        rows[f"{name}, exact"] = row = Ours(network, tasks, METHODS[name]())
        _check(row, updates[name])
    rows["UPGrad, batched"] = row = OursBatched(network, tasks, cs.UPGrad())
    _check(row, updates["UPGrad"])  # The first passes of a task are made one by one.
    _check(row, updates["UPGrad"])
    for name in KEEPING:
        method = _keeping(name)
        if method is not None:
            rows[f"{name}, update_every={EVERY}"] = row = Ours(network, tasks, method)
            _check(row, updates[name])
            _check_kept(row, weights[name])
    rows["UPGrad, features=z"] = row = OursAtFeatures(network, tasks, cs.UPGrad())
    _check(row, at_features)
    for name, make in PEERS.items():
        of_torchjd = name.startswith("TorchJD")
        if of_torchjd and find_spec("torchjd") is None:
            continue
        rows[name] = row = make(network, tasks)
        if of_torchjd:
            _check(row, updates["UPGrad"], 1e-2)  # TorchJD regularizes the Gramian.
        elif tasks == 2:
            _check(row, updates["PCGrad"])
        else:  # The order of the projections is random.
            assert row.found().isfinite().all()
    return rows


def _run(name: str, row: WholeStep) -> Callable[[], float]:
    """Returns a timer of a step in milliseconds; with `update_every`, of the mean over a cycle."""
    if "update_every" not in name:
        return timed(row.step)

    def cycle() -> None:
        for _ in range(CYCLE):
            row.step()

    return lambda: timed(cycle)() / CYCLE


def _peaks(name: str, row: WholeStep) -> dict[str, int]:
    """The memory of a step that solves, and with `update_every` of a step that reuses weights."""
    if "update_every" not in name:
        return {"peak_bytes": row.peak()}
    peaks = [row.peak() for _ in range(EVERY)]
    return {"peak_bytes": max(peaks), "between_peak_bytes": min(peaks)}


def _measured(rows: dict[str, WholeStep], quick: bool, seconds: float) -> dict[str, dict[str, Any]]:
    """The entries of every row in a record, with times relative to the plain step."""
    runs = {name: _run(name, row) for name, row in rows.items()}
    times = in_turns(runs, 1 if quick else 11, seconds)
    milliseconds = medians(times)
    return {
        name: {
            "milliseconds": milliseconds[name],
            "over_plain": ratio(times[name], times["plain"]),
            "rounds": len(times[name]),
            "threads": THREADS,
        }
        for name in rows
    }


def _network(name: str, tasks: int, quick: bool) -> str:
    torch.set_num_threads(THREADS)
    if not quick:
        if find_spec("timm") is None:
            pytest.skip("timm is not installed")
        return name
    if (name, tasks) != ("resnet18", 2):
        pytest.skip("one small network")
    return "small"


# Attention's backward pass has no batching rule, so `torch.vmap` runs it task by task.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("tasks", [2, 4, 8])
@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_price(report: Any, quick: bool, name: str, tasks: int) -> None:
    network = _network(name, tasks, quick)
    rows = _rows(network, tasks)
    for way, measured in _measured(rows, quick, 60).items():
        peaks = _peaks(way, rows[way])
        report("price", step=way, **rows[way].setting.facts(), **measured, **peaks)


@pytest.mark.parametrize("tasks", [2, 4, 8])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit"])
def test_limits(report: Any, quick: bool, name: str, tasks: int) -> None:
    network = _network(name, tasks, quick)
    plain = WholeStep(network, tasks)
    rows, gradients = {"plain": plain}, plain.rows()
    for method in EXACT:
        rows[method] = Ours(network, tasks, METHODS[method]())
        _check(rows[method], plain.weights(METHODS[method](), gradients) @ gradients)
    del gradients
    if name == "resnet18":
        rows["ConnectionStrength, step"] = _per_task(network, tasks)
    for way, measured in _measured(rows, quick, 35).items():
        row = rows[way]
        limit = {"plain": 1.0, "ConnectionStrength, step": tasks}.get(way, (1 + 2 * tasks) / 3)
        more = {} if isinstance(row, OursPerTask) else {"peak_bytes": row.peak()}
        over = {"limit": limit, "over_limit": measured["over_plain"] / limit}
        report("limits", step=way, **row.setting.facts(), **measured, **over, **more)


def _per_task(network: str, tasks: int) -> OursPerTask:
    """Phase 2 with task-specific normalization; its first update must agree with the reference."""
    updates = []
    for backend in ("reference", None):
        row = OursPerTask(network, tasks, cs.ConnectionStrength(), convert=True)
        if backend is None:
            row.step()
        else:
            with cs.use_backend(backend):
                row.step()
        updates.append([p.grad for p in row.shared if p.grad is not None])
    assert_close(*updates, 1e-4)
    return row
