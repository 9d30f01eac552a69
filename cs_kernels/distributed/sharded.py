"""Sharded ranks: `fully_shard` has reduced the gradients, and each rank has some rows of each.

A mesh of two dimensions has replicas of the shards in its first one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.distributed.control import Control
from cs_kernels.distributed.partial import PartialGradients
from cs_kernels.distributed.pieces import ChannelArray
from cs_kernels.gradients import as_real
from cs_kernels.statistics import packed


def local_shard(tensor: Tensor) -> Tensor:
    """The shard of a DTensor on this rank."""
    shard: Tensor = cast("Any", tensor)._local_tensor
    return shard


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, as `fully_shard` makes of parameters."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def mesh_of(parameters: Mapping[str, Tensor]) -> Any:
    """The mesh of sharded parameters; None if none is sharded.

    Raises:
        ValueError: Some are sharded and some are not, or in another way than `fully_shard` does.

    """
    first = next((name for name, p in parameters.items() if is_sharded(p)), None)
    if first is None:
        return None
    mesh = cast("Any", parameters[first]).device_mesh
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"trunk must be sharded as a whole, got {name} that is not, beside {first}: call"
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


def _fsdp_modules(objects: Iterable[object]) -> list[Any]:
    """The modules after `fully_shard` among them."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    # By `type`, as a proxy's `__class__` is that of its object, which may be gone.
    return [] if kind is None else [found for found in objects if issubclass(type(found), kind)]


def reshard(network: nn.Module) -> None:
    """Frees whole parameters, which a pass without a backward pass may have left."""
    for module in _fsdp_modules(network.modules()):
        module.reshard()


def _groups(module: Any) -> list[Any]:
    """The groups of parameters that `fully_shard` reduces and gathers together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _end_passes(module: Any) -> None:
    """Brings a module back to where it was before its forward pass."""
    reset = getattr(module, "reset_iter_state", None)  # Since torch 2.13.
    with contextlib.suppress(RuntimeError):
        if reset is not None and module._get_fsdp_state()._is_root:
            reset()
        else:
            module.reshard()


def all_sharded_modules() -> list[nn.Module]:
    """All modules after `fully_shard` in this process; it is slow."""
    return _fsdp_modules(gc.get_objects())


def sharded_parameters(modules: Iterable[nn.Module]) -> dict[Tensor, nn.Parameter]:
    """By the whole parameter that a loss's graph has: the sharded one of the torch optimizer."""
    found: dict[Tensor, nn.Parameter] = {}
    for module in _fsdp_modules(modules):
        for parameter in (p for group in _groups(module) for p in group.fsdp_params):
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


class ShardedGradients(PartialGradients):
    """A shard of each gradient: rows along dimension 0.

    Args:
        parameters: The shared parameters, by name.
        tasks: The names of all tasks.
        control: The ranks.
        mesh: Their mesh.
        trunk: The shared module.

    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        control: Control,
        mesh: Any,
        trunk: nn.Module,
    ) -> None:
        groups = [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]
        super().__init__(parameters, tasks, control, groups)
        self._shards, self._replicas = groups[0], groups[1] if mesh.ndim == 2 else None
        self._others_scale = 1 / control.size
        self._modules = _fsdp_modules(trunk.modules())
        shared = set(self.parameters)
        self._of_norms = [p for p in trunk.parameters() if p not in shared and is_sharded(p)]
        self._resharded: list[tuple[Any, bool]] = []
        """The groups whose parameters stay whole now, and what the user has set."""
        self._kept: dict[nn.Parameter, Tensor] = {}
        """The gradients of the normalizations that have memory of their own."""

    def before_backward(self, *, retains: bool) -> None:
        """Keeps whole parameters until the last backward pass of a forward pass."""
        if retains and not self._resharded:
            groups = [group for module in self._modules for group in _groups(module)]
            self._resharded = [(group, group.reshard_after_backward) for group in groups]
            for group in groups:
                group.reshard_after_backward = False
        elif not retains:
            self._restore_resharding()

    def _restore_resharding(self) -> None:
        for group, value in self._resharded:
            group.reshard_after_backward = value
        self._resharded = []

    def recover(self, held: Sequence[nn.Parameter]) -> None:
        """Ends what a failed pass has left: whole parameters, and callbacks that wait."""
        self._restore_resharding()
        of_optimizer = set(held)
        for module in all_sharded_modules():  # Heads have roots of their own.
            groups = _groups(module)
            if any(p.sharded_param in of_optimizer for group in groups for p in group.fsdp_params):
                _end_passes(module)

    def collect(self, task: str) -> bool:
        """Moves the shards of every `.grad` into a task's row, or adds them to those there."""
        self._keep_norms()
        row: list[Tensor | None] = [None] * len(self.parameters)
        unreached = []
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                unreached.append(i)
            else:
                row[i], parameter.grad = local_shard(parameter.grad), None
        return self._put(task, row, unreached)

    def note(self, task: str) -> bool:
        """Notes the gradients in `.grad` as a task's; returns whether there is any."""
        self._keep_norms()
        return super().note(task)

    def _keep_norms(self) -> None:
        """Copies the new gradients of the normalizations: parts of a buffer with all gradients."""
        grads = [(p, p.grad) for p in self._of_norms if p.grad is not None]
        new = {p: grad for p, grad in grads if self._kept.get(p) is not grad}
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in new:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        for parameters in kinds.values():
            copies = packed([local_shard(new[parameter]).contiguous() for parameter in parameters])
            for parameter, own in zip(parameters, copies, strict=True):
                cast("Any", new[parameter])._local_tensor = own
        self._kept = dict(grads)

    def _others(self, held: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for parameter in held if not is_sharded(parameter)]

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """One small collective over the shards; replicas get the bits of the first one."""
        dist.all_reduce(tensor, group=self._shards)
        if self._replicas is not None:
            dist.broadcast(tensor, group=self._replicas, group_src=0)
        return tensor

    def span(self, parameter: int) -> tuple[int, int]:
        """Whole rows."""
        weight = self.parameters[parameter]
        first, last = rows_of(weight)
        row = prod(weight.shape[1:])
        return first * row, last * row

    def array(self, parameter: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """`fully_shard` takes contiguous weights."""
        shape = self.parameters[parameter].shape
        outer = shape[0] // groups if out_channel_dim == 1 else 1
        return groups, outer, shape[out_channel_dim], prod(shape[out_channel_dim + 1 :])

    def weight_part(self, parameter: int) -> Tensor | None:
        """Whole rows."""
        return local_shard(self.parameters[parameter].detach()).flatten()

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """The rows of the updates."""
        for i in parameters:
            update, like = self._updates[i], self.parameters[i]
            if update is None or (update.dtype, update.device) != (like.dtype, like.device):
                self._updates[i] = torch.empty_like(like, requires_grad=False)
        updates = (local_shard(cast("Tensor", self._updates[i])) for i in parameters)
        return list(map(as_real, updates))

    def like(self) -> Tensor:
        """A plain tensor on the gradients' device."""
        return local_shard(self.parameters[0].detach())

    def release_own(self) -> None:
        """Every task's own parameters get the plain sum."""
        for i in self._sum_own():
            self.parameters[i].grad = self._updates[i]

    def lend(self) -> tuple[int, Tensor] | None:
        """A tensor for `.grad`, between two calls that add up."""
        first = self.first()
        if first is None:
            return None
        self.updates([first[0]])
        update = self._updates[first[0]]
        assert update is not None
        return first[0], update


def shards_of(tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """For each vector: this rank's elements, and the index of the first one."""
    found = []
    for tensor in tensors:
        if is_sharded(tensor):
            found.append((rows_of(tensor)[0], local_shard(tensor.detach())))
        else:
            found.append((0, tensor.detach()))
    return found
