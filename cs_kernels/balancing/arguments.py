"""Checks a GradientBalancer's arguments, and determines the process groups of its parameters."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.errors import described
from cs_kernels.methods import GramianMethod, Method, Sum, UPGrad
from cs_kernels.methods.sum import Ones
from cs_kernels.ops.checks import LEAST_SKETCH, MOST_SKETCH, check_float64
from cs_kernels.options import checked_integer
from cs_kernels.ranks.find import check_group
from cs_kernels.torch_internals.fsdp import is_sharded


def torch_optimizer(optimizer: object) -> torch.optim.Optimizer | None:
    """Unwraps a framework's optimizer; the inner one steps only after the last micro-batch."""
    if optimizer is None:
        return None
    inner = getattr(optimizer, "optimizer", optimizer)
    scheduler = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
    if isinstance(inner, torch.optim.Optimizer) and not scheduler:
        return inner
    raise TypeError(
        f"optimizer must be a torch optimizer or None, got {type(optimizer).__name__}: for another"
        " kind of optimizer, or several, pass None and call update() after each step"
    )


def checked_method(
    method: Method | None, tasks: tuple[str, ...]
) -> tuple[GramianMethod | Sum, GramianMethod]:
    """Returns the method, and the Gramian method that computes weights: `Ones` for `Sum`."""
    method = UPGrad() if method is None else method
    if not isinstance(method, GramianMethod | Sum):
        raise TypeError(
            "method must be a Gramian method or Sum(), which need only the gradients' products, got"
            f" {described(method)}: use MultiTaskOptimizer for other methods"
        )
    if method.keeps is not None:
        raise ValueError(
            f"method must not keep gradients, got {method!r}: leave out refresh_every and rank; a"
            " GradientBalancer uses the last products of a task that is absent from a step"
        )
    if method.update_every != 1:
        raise ValueError(f"method must have update_every=1, got {method!r}: use every= instead")
    solver = Ones() if isinstance(method, Sum) else method
    solver.check(tasks)
    return method, solver


def checked_parameters(
    parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]], *, needs_names: bool
) -> list[tuple[str, nn.Parameter]]:
    """Names (or numbers) and parameters; each parameter appears once, with its first name."""
    if isinstance(parameters, nn.Module | Tensor):
        raise TypeError(
            f"parameters must be an iterable of parameters, got {type(parameters).__name__}: pass"
            " module.parameters() or module.named_parameters()"
        )
    found: dict[nn.Parameter, str] = {}
    for n, entry in enumerate(parameters):
        if needs_names and not isinstance(entry, tuple):
            raise ValueError(
                "parameters must have names for groups='layer', got none: pass"
                " module.named_parameters()"
            )
        name, p = entry if isinstance(entry, tuple) else (str(n), entry)
        if not isinstance(p, nn.Parameter):
            raise TypeError(
                f"parameters must be torch.nn.Parameter, got {type(p).__name__} for {name!r}"
            )
        if hasattr(p, "ds_shape"):
            raise ValueError(
                f"parameters must be whole, but DeepSpeed's ZeRO stage 3 has partitioned {name!r}:"
                " use stage 2, or fully_shard"
            )
        found.setdefault(p, name)
    if not found:
        raise ValueError("parameters must have at least one parameter, got none")
    devices = {str(p.device): p.device for p in found}
    if len(devices) > 1:
        raise ValueError(f"parameters must be on one device, got {sorted(devices)}")
    for device in devices.values():
        check_float64(device, "parameters")
    return [(name, p) for p, name in found.items()]


def checked_size(sketch: int) -> int:
    """The number of elements of a sketch; raises ValueError unless it is an allowed power of 2."""
    size = checked_integer("sketch", sketch, LEAST_SKETCH)
    if size & (size - 1) or size > MOST_SKETCH:
        raise ValueError(
            f"sketch must be a power of two from {LEAST_SKETCH} to {MOST_SKETCH}, got {size}"
        )
    return size


def groups_of(
    parameters: list[nn.Parameter], group: "dist.ProcessGroup | None"
) -> tuple[list[object], int]:
    """The process groups over which to average sketches in turn, and the total number of ranks."""
    if group is not None:
        check_group(group)
    meshes = [cast("Any", p).device_mesh for p in parameters if is_sharded(p)]
    if meshes:
        if group is not None:
            raise ValueError(f"process_group must be None after fully_shard, got {group!r}")
        if any(mesh != meshes[0] for mesh in meshes) or len(meshes) < len(parameters):
            raise ValueError(
                "parameters must all be sharded on the same mesh, or all be whole, got"
                f" {len(meshes)} of {len(parameters)} sharded"
            )
        return [meshes[0].get_group(dim) for dim in range(meshes[0].ndim)], meshes[0].size()
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    ranks = 1 if group is None else dist.get_world_size(group)
    return ([group], ranks) if ranks > 1 else ([], 1)


def check_agreement(groups: Sequence[Any], facts: object) -> None:
    """Raises ValueError if ranks have different settings, since sketches could not be averaged."""
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, facts, group=group)
        for rank, others in enumerate(found):
            if others != found[0]:
                raise ValueError(
                    "all ranks must use the same tasks, method, every=, sketch=, seed= and"
                    f" parameter shapes, but rank 0 of a group uses {found[0]} and rank {rank} uses"
                    f" {others}"
                )
