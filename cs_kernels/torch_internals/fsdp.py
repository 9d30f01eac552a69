"""Undocumented features of `fully_shard` (FSDP2) and DTensor, all in one file.

Tested with torch 2.10 to 2.14: `DTensor._local_tensor`; `FSDPModule._get_fsdp_state` with its group
of parameters, or, in 2.13 and 2.14, a list of groups; a group's `fsdp_params`, each with a
`sharded_param`, an `unsharded_accumulated_grad` and, from its first pass on, an `_unsharded_param`;
`reset_iter_state`, since 2.13. `groups_of` raises a clear error if torch has changed the groups.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn


def local_shard(tensor: Tensor) -> Tensor:
    """The shard of a DTensor on this rank."""
    shard: Tensor = cast("Any", tensor)._local_tensor
    return shard


def counter_of(grad: Tensor) -> Tensor:
    """The tensor whose version counts changes of a gradient: for a DTensor, its local tensor."""
    counter: Tensor = getattr(grad, "_local_tensor", grad)
    return counter


def set_local_shard(tensor: Tensor, shard: Tensor) -> None:
    """Replaces a DTensor's memory on this rank."""
    cast("Any", tensor)._local_tensor = shard


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, like parameters after `fully_shard`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def mesh_of(parameters: Mapping[str, Tensor]) -> Any:
    """The mesh of sharded parameters; None if none is sharded.

    Raises:
        ValueError: Only some parameters are sharded, a layout is not `fully_shard`'s, or there are
            several meshes.

    """
    first = next((name for name, p in parameters.items() if is_sharded(p)), None)
    if first is None:
        return None
    mesh = cast("Any", parameters[first]).device_mesh
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"trunk must be sharded as a whole, but {name} is not, while {first} is: call"
                " fully_shard(trunk) after fully_shard on its layers"
            )
        placements = cast("Any", parameter).placements
        kinds = [type(placement).__name__ for placement in placements]
        rows = kinds[-1] == "Shard" and placements[-1].dim == 0
        if kinds[:-1] not in ([], ["Replicate"]) or not rows:
            raise ValueError(
                "trunk must be sharded along dimension 0, on a mesh of one dimension, or of two"
                f" with replicas along the first, got {name} with {tuple(placements)}"
            )
        if cast("Any", parameter).device_mesh != mesh:
            raise ValueError(
                f"trunk must be sharded on one mesh, got {first} on {mesh} and {name} on"
                f" {cast('Any', parameter).device_mesh}"
            )
    return mesh


def fsdp_modules(objects: Iterable[object]) -> list[Any]:
    """The `fully_shard` modules among these objects."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    # Not isinstance, because a weak proxy's `__class__` is its referent's, which may be gone.
    return [] if kind is None else [found for found in objects if issubclass(type(found), kind)]


def reshard(network: nn.Module) -> None:
    """Frees unsharded parameters, which a forward pass without a backward pass may leave behind."""
    for module in fsdp_modules(network.modules()):
        module.reshard()


def groups_of(module: Any) -> list[Any]:
    """The groups of parameters that `fully_shard` reduces and gathers together."""
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        found = [group for group in groups if group is not None]
        for group in found:
            _ = group.reshard_after_backward, [p.sharded_param for p in group.fsdp_params]
    except AttributeError as error:
        raise RuntimeError(
            f"fully_shard of torch {torch.__version__} keeps its parameters differently from torch"
            f" 2.10 to 2.14, which cs_kernels supports: {error}"
        ) from error
    return found


def keep_unsharded(modules: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Keeps modules unsharded after backward passes; returns what `restore_resharding` takes."""
    groups = [group for module in modules for group in groups_of(module)]
    before = [(group, group.reshard_after_backward) for group in groups]
    for group in groups:
        group.reshard_after_backward = False
    return before


def restore_resharding(before: Iterable[tuple[Any, Any]]) -> None:
    """Ends `keep_unsharded`."""
    for group, value in before:
        group.reshard_after_backward = value


def end_passes(module: Any) -> None:
    """Resets a module to its state before the forward pass."""
    reset = getattr(module, "reset_iter_state", None)  # Since torch 2.13.
    with contextlib.suppress(RuntimeError):
        if reset is not None and module._get_fsdp_state()._is_root:
            reset()
        else:
            module.reshard()
    for parameter in (p for group in groups_of(module) for p in group.fsdp_params):
        if hasattr(parameter, "_unsharded_param"):
            # Otherwise, the next pass would add to these gradients.
            parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None


def all_sharded_modules() -> list[nn.Module]:
    """All `fully_shard` modules in this process; slow."""
    return fsdp_modules(gc.get_objects())


def modules_that_shard(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The `fully_shard` modules that manage any of the parameters, in the whole process."""
    wanted = {p for p in parameters if is_sharded(p)}
    return [
        module
        for module in (all_sharded_modules() if wanted else ())
        if any(p.sharded_param in wanted for group in groups_of(module) for p in group.fsdp_params)
    ]


def sharded_parameters(modules: Iterable[nn.Module]) -> dict[Tensor, nn.Parameter]:
    """Maps each unsharded parameter in a loss's graph to the torch optimizer's sharded one."""
    found: dict[Tensor, nn.Parameter] = {}
    for module in fsdp_modules(modules):
        for parameter in (p for group in groups_of(module) for p in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)  # Made in the first pass.
            if whole is not None:
                found[whole] = parameter.sharded_param
    return found


def rows_of(parameter: Tensor) -> tuple[int, int]:
    """The range of dimension 0 in this rank's shard."""
    mesh = cast("Any", parameter).device_mesh
    rows = -(-parameter.shape[0] // mesh.size(-1))
    first = min(mesh.get_local_rank(mesh.ndim - 1) * rows, parameter.shape[0])
    return first, first + local_shard(parameter).shape[0]


def shards_of(tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """For each vector, the index of this rank's first element, and this rank's elements."""
    found = []
    for tensor in tensors:
        if is_sharded(tensor):
            found.append((rows_of(tensor)[0], local_shard(tensor.detach())))
        else:
            found.append((0, tensor.detach()))
    return found
