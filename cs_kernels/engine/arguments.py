"""Checks of the arguments of a MultiTaskOptimizer."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cs_kernels.errors import described, first_of
from cs_kernels.methods import Method
from cs_kernels.nn.task_norm import TaskBatchNorm, task_norms
from cs_kernels.ops.checks import DTYPES, MOST_TASKS, check_float64
from cs_kernels.options import check_scaler
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.schedules import Schedule
from cs_kernels.weightings import Weighting

_A_METHOD = "a method such as cs.PCGrad()"


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {example}, got {described(value)}")


def check_kinds(
    method: object,
    schedule: object,
    weighting: object,
    scaler: object,
    backward: object,
) -> None:
    """Raises TypeError for an argument of the wrong type, such as a class instead of an object."""
    for name, value, kind, example in (
        ("method", method, Method, _A_METHOD),
        ("schedule", schedule, Schedule, "a schedule such as cs.Mixed(epochs=200)"),
        ("weighting", weighting, Weighting, "a weighting such as cs.EqualWeights()"),
    ):
        _check_kind(name, value, kind, example)
    check_scaler(scaler)
    if backward is not None and not callable(backward):
        raise TypeError(f"backward must be a function of a loss, got {backward!r}")


def check_layers(layers: Mapping[str, str | None], method: Method) -> None:
    """Raises if `layers` is given to a method that treats all layers alike and would ignore it."""
    if layers and method.separate_gradients and not method.prioritizes:
        raise ValueError(
            f"layers must be empty for {method!r}, which treats all layers alike, got {layers!r}:"
            " use ConnectionStrength()"
        )


def check_trunk(trunk: nn.Module, tasks: Sequence[str], method: Method) -> None:
    """Raises if the trunk has a scripted module, or does not fit the tasks or the method."""
    for name, norm in trunk.named_modules():
        if isinstance(norm, torch.jit.ScriptModule):
            raise ValueError(
                "trunk must have no traced or scripted module, whose buffers a failed step cannot"
                f" restore, got {name or 'trunk itself'}: pass the module from before torch.jit"
            )
        if isinstance(norm, TaskBatchNorm):
            for task in tasks:
                if task not in norm.tasks:
                    raise ValueError(
                        f"every task-specific normalization of trunk must have all tasks, but"
                        f" {name or 'trunk itself'} has {list(norm.tasks)} and lacks {task!r}"
                    )
    check_method(method, trunk, tasks)


def check_method(method: Method, trunk: nn.Module, tasks: Sequence[str]) -> None:
    """Raises if the method does not fit the tasks, or needs normalizations that the trunk lacks."""
    _check_kind("method", method, Method, _A_METHOD)
    method.check(tasks)
    if method.prioritizes and not task_norms(trunk):
        raise ValueError(
            f"trunk must have task-specific normalization for {method!r}, but"
            f" {type(trunk).__name__} has none: convert it with cs.nn.convert_task_batchnorm, or"
            " pass another method, such as cs.UPGrad()"
        )


def check_weighting(weighting: Weighting, method: Method, ranks: Ranks) -> None:
    """Raises if the method or the number of ranks does not fit the weighting."""
    if weighting.needs_gramian and not method.has_gramian:
        raise ValueError(
            f"method must be a Gramian method for {weighting!r}, got {method!r}: for the plain sum,"
            " use Sum(separate=True)"
        )
    if ranks.is_distributed and weighting.reevaluates:
        raise ValueError(
            f"weighting must not compute losses again on {ranks.size} ranks, got {weighting!r}: use"
            " FAMO(reevaluate=False)"
        )


def check_devices(shared: Mapping[str, nn.Parameter], tasks: Sequence[str], method: Method) -> None:
    """Raises if the method cannot run for these tasks on the shared parameters' devices."""
    first: dict[torch.device, str] = {}
    for name, parameter in shared.items():
        first.setdefault(parameter.device, name)
    if method.separate_gradients and len(first) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(f"trunk must be on one device for {method!r}, got {found}")
    for device in first if method.separate_gradients else ():
        check_float64(device, "trunk")
    on_gpu = any(device.type == "cuda" for device in first)
    if method.separate_gradients and on_gpu and len(tasks) > MOST_TASKS:
        raise ValueError(
            f"tasks must name at most {MOST_TASKS} tasks on a GPU for {method!r}, got {len(tasks)}"
        )


def check_dtypes(shared: Mapping[str, nn.Parameter], method: Method) -> None:
    """Raises if the method cannot handle the dtype of a shared parameter that trains."""
    if not method.separate_gradients:
        return
    for name, parameter in shared.items():
        is_complex, dtype = parameter.is_complex(), parameter.dtype.to_real()
        if parameter.requires_grad and (
            dtype not in DTYPES or (is_complex and not method.takes_complex)
        ):
            kinds = ", ".join(str(kind) for kind in DTYPES)
            pairs = ", or complex pairs of these" if method.takes_complex else ""
            raise ValueError(
                f"trunk must have shared parameters of {kinds}{pairs} for {method!r}, got {name} of"
                f" {parameter.dtype}: use Sum()"
            )


def check_held(
    trunk: nn.Module,
    shared: Mapping[str, nn.Parameter],
    held: set[nn.Parameter],
    weighting: Weighting,
) -> None:
    """Raises if no shared parameter trains, or the optimizer lacks a parameter that trains."""
    if not any(p.requires_grad for p in shared.values()):
        raise ValueError(
            f"trunk must have a shared parameter that requires a gradient,"
            f" but none of its {len(shared)} does: unfreeze some, or train the heads with the torch"
            " optimizer alone"
        )
    missing = [name for name, p in trunk.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"optimizer must hold every parameter of trunk that requires a gradient, but"
            f" lacks {first_of(missing)}"
            " (was it built before the conversion, or from copies in another precision?)"
        )
    if any(parameter not in held for parameter in weighting.parameters()):
        raise ValueError(
            "optimizer must hold the parameters() of weighting, but lacks some parameters of"
            f" {weighting!r}"
        )
