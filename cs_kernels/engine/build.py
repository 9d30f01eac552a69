"""Builds the engine of a MultiTaskOptimizer from its arguments."""

import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from cs_kernels.engine.arguments import (
    check_devices,
    check_dtypes,
    check_held,
    check_kinds,
    check_layers,
    check_trunk,
    check_weighting,
)
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.loss_graph import Backward
from cs_kernels.engine.torch_optimizers import TorchOptimizers
from cs_kernels.errors import described
from cs_kernels.methods import Method
from cs_kernels.options import checked_tasks
from cs_kernels.ranks.checksums import checksums
from cs_kernels.ranks.find import find_ranks
from cs_kernels.ranks.strategy import Training
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.schedules import Schedule
from cs_kernels.torch_internals.ddp import unwrapped
from cs_kernels.trunk.layers import shared_parameters
from cs_kernels.trunk.pairing import checked_overrides
from cs_kernels.trunk.trunk import Trunk
from cs_kernels.weightings import Weighting


def build_engine(
    trunk: nn.Module,
    optimizer: object,
    tasks: Iterable[str],
    method: Method,
    schedule: Schedule,
    weighting: Weighting,
    layers: Mapping[str, str | None],
    scaler: torch.amp.GradScaler | None,
    backward: Backward | None,
    process_group: dist.ProcessGroup | None,
    *,
    check_passes: bool,
) -> Engine:
    """Checks the arguments, also across ranks, and builds the engine.

    Raises:
        ValueError: An argument does not fit; the message names it and quotes the value.
        TypeError: An argument has the wrong type.

    """
    names = checked_tasks(tasks)
    if not isinstance(trunk, nn.Module):
        raise TypeError(f"trunk must be a torch.nn.Module, got {described(trunk)}")
    wrappers = Wrappers()
    for module in trunk.modules():
        wrappers.take(module)
    inner = unwrapped(trunk)
    shared = shared_parameters(inner)
    ranks = find_ranks(inner, shared, names, process_group, wrappers)
    try:
        with ranks.building():
            check_kinds(method, schedule, weighting, scaler, backward)
            weighting.check(names)
            optimizers = TorchOptimizers.of(optimizer)
            check_weighting(weighting, method, ranks)
            check_trunk(inner, names, method)
            check_devices(shared, names, method)
            check_dtypes(shared, method)
            overrides = checked_overrides(inner, layers)
            check_layers(layers, method)
            check_held(inner, shared, set(optimizers.held()), weighting)
            if scaler is not None and scaler.is_enabled():
                optimizers.check_scales()
            reach, held = ranks.reach, optimizers.held
            known = Trunk(inner, names, reach, held, overrides, wrappers.take)
            parts = known, optimizers, ranks, method, schedule, weighting, scaler, backward
            engine = Engine(*parts, check_passes=check_passes)
        _agree(engine)
    except BaseException:
        ranks.close()
        raise
    weakref.finalize(engine, ranks.close).atexit = False  # At exit, process groups may be gone.
    return engine


def _agree(engine: Engine) -> None:
    """Checks that all ranks have the same setup."""
    trunk, optimizers, monitor = engine.trunk, engine.optimizers, engine.monitor
    shared = set(trunk.shared)
    others = [p for p in optimizers.held() if p not in shared]
    # The ranks keep `planned`: a weak reference avoids a reference cycle.
    scaler, this = engine.scaler, weakref.proxy(engine)

    def planned() -> dict[str, list[object]]:
        return {
            "options of the optimizer": optimizers.numbers(),
            "threshold of count_conflicts": [monitor.threshold],
            "step of the kept task weights": [this.kept.since],
        }

    def facts() -> dict[str, object]:
        return {
            "tasks, in this order": list(trunk.tasks),
            "method": _named(engine.method),
            "schedule": _named(engine.schedule),
            "weighting": _named(engine.weighting),
            "use of a scaler": scaler is not None and scaler.is_enabled(),
            "use of backward=": engine.graph.backward is not None,
            "number of shared parameters": len(trunk.shared),
            "shared parameters": [
                (name, tuple(p.shape), str(p.dtype), p.requires_grad)
                for name, p in zip(trunk.names, trunk.shared, strict=True)
            ],
            "number of other parameters in the optimizer": len(others),
            "other parameters in the optimizer": [(tuple(p.shape), str(p.dtype)) for p in others],
        }

    engine.ranks.agree(
        Training(
            facts,
            trunk,
            planned,
            lambda: checksums(
                optimizers.held(), {p: f"trunk.{n}" for n, p in trunk.module.named_parameters()}
            ),
            factor_is_hidden=engine.graph.backward is not None,
        )
    )


def _named(part: object) -> str:
    """The object's repr, or its class name if it has only the default repr."""
    return type(part).__name__ if type(part).__repr__ is object.__repr__ else repr(part)
