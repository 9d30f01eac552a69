"""The state of a training loop, for checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from cs_kernels.engine.engine import Engine
from cs_kernels.engine.kept import Kept
from cs_kernels.methods import Method
from cs_kernels.options import checked_integer
from cs_kernels.stateful import check_epoch, check_names
from cs_kernels.weightings import Weighting


def state_of(engine: Engine) -> dict[str, Any]:
    """Implements `MultiTaskOptimizer.state_dict`."""
    # Distributed checkpoints split a dictionary into its entries, and load it only into a
    # dictionary with the same entries; they keep a tuple whole.
    state: dict[str, Any] = {
        "tasks": list(engine.trunk.tasks),
        "epoch": engine.epoch,
        "steps": engine.steps,
        "reach": (engine.trunk.reach.state_dict(),),
        "method": _named_state(engine.method),
        "weighting": _named_state(engine.weighting),
        "kept": (engine.kept.state_dict(),),
    }
    if engine.monitor.counter is not None:
        state["conflicts"] = (engine.monitor.counter.state_dict(),)
    if engine.method.keeps is not None:
        state["anchors"] = engine.anchors.state_dict(engine.method.keeps)
    return state


def load_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Implements `MultiTaskOptimizer.load_state_dict`."""
    _check(engine, state)
    before = state_of(engine)
    try:
        _check_values(engine, state)
        _load(engine, state)
    except Exception as error:
        _load(engine, before)
        raise ValueError(
            f"state must be a complete state_dict with valid values, but loading raised {error!r}"
        ) from error
    # The loaded reach may lack parameters that earlier graphs have shown: check graphs again.
    engine.graph.forget()
    if engine.accumulation.step is not None:
        engine.transaction.clear(engine.trunk.held())
    engine.accumulation.clear()
    engine.accumulation.forget_dropped()
    engine.guard.clear()
    engine.monitor.done = None
    engine.ranks.recheck_networks()


def _check(engine: Engine, state: Mapping[str, Any]) -> None:
    optional = "conflicts", "kept"
    expected = {key: of for key, of in state_of(engine).items() if key not in optional}
    check_names(state, expected)
    tasks = state["tasks"]
    if not isinstance(tasks, Sequence) or list(tasks) != list(engine.trunk.tasks):
        raise ValueError(f"state must have tasks {list(engine.trunk.tasks)}, got {tasks!r}")
    for part in ("method", "weighting"):
        given = state[part]
        name = given[0] if isinstance(given, Sequence) and len(given) == 2 else given
        if name != expected[part][0]:
            raise ValueError(f"state must be for {part} {expected[part][0]}, got one for {name}")


def _check_values(engine: Engine, state: Mapping[str, Any]) -> None:
    """Checks entries before any is loaded; `reach` and `conflicts` are checked while they load."""
    tasks = engine.trunk.tasks
    checked_integer("steps", state["steps"], 0, 1 << 63)
    check_epoch(state["epoch"])
    (_, of_method), (_, of_weighting) = state["method"], state["weighting"]
    engine.method.check_state(of_method, tasks)
    engine.weighting.check_state(of_weighting, tasks)
    (kept,) = state.get("kept", (None,))
    Kept.check_state(kept, tasks)
    if engine.method.keeps is not None:
        engine.anchors.check_state(state["anchors"], engine.method.keeps)


def _load(engine: Engine, state: Mapping[str, Any]) -> None:
    epoch, steps = state["epoch"], state["steps"]
    (reach,), (_, of_method), (_, of_weighting) = (
        state[part] for part in ("reach", "method", "weighting")
    )
    engine.trunk.reach.load_state_dict(reach)
    engine.method.load_state_dict(of_method)
    engine.weighting.load_state_dict(of_weighting)
    (kept,) = state.get("kept", (None,))
    engine.kept.load_state_dict(kept, engine.trunk.requires_grad())
    if engine.method.keeps is not None:
        engine.anchors.load_state_dict(state["anchors"], engine.method.keeps)
    if engine.monitor.counter is not None:
        (of_conflicts,) = state.get("conflicts", (None,))
        engine.monitor.counter.load_state_dict(of_conflicts)
    engine.epoch, engine.steps = epoch, steps


def _named_state(part: Method | Weighting) -> tuple[str, dict[str, Any]]:
    return type(part).__name__, part.state_dict()
