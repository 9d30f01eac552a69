"""Sharded ranks: `fully_shard` reduces the gradients, and each rank has rows of each gradient.

Along the first dimension of a two-dimensional mesh, the shards are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.gradients import moved
from cs_kernels.ops.aliases import Grads
from cs_kernels.ranks.collectives import all_reduce
from cs_kernels.ranks.distributed import Distributed
from cs_kernels.ranks.pieces import ChannelArray
from cs_kernels.ranks.strategy import Call, RankError
from cs_kernels.ranks.transport import Transport
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.stage import Passes, Stage
from cs_kernels.torch_internals.fsdp import (
    end_passes,
    fsdp_modules,
    is_sharded,
    keep_unsharded,
    local_shard,
    modules_that_shard,
    restore_resharding,
    rows_of,
    set_local_shard,
)

_OF_STEP = Stage.TURN, Stage.JOINT
"""The possible first stages of `step`."""


class Sharded(Distributed):
    """Each rank holds a shard of each gradient: rows along dimension 0.

    Args:
        shared: The shared parameters, by name.
        tasks: The names of all tasks.
        wrappers: The DistributedDataParallel modules around the trunk.
        transport: Carries the messages between the ranks.
        mesh: The device mesh of the ranks.
        trunk: The shared module.

    """

    passes_are_counted = True

    def __init__(
        self,
        shared: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        wrappers: Wrappers,
        transport: Transport,
        mesh: Any,
        trunk: nn.Module,
    ) -> None:
        groups = [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]
        super().__init__(shared, tasks, wrappers, transport, groups)
        self._shards, self._replicas = groups[0], groups[1] if mesh.ndim == 2 else None
        self.scale = 1 / self.size  # `share` has a factor W, because `fully_shard` averages.
        self._modules = fsdp_modules(trunk.modules())
        of_trunk = set(self.parameters)
        self._of_norms = [p for p in trunk.parameters() if p not in of_trunk and is_sharded(p)]
        self._resharded: list[tuple[Any, bool]] = []
        """The groups of parameters that stay unsharded for now, each with the user's setting."""
        self._kept: dict[nn.Parameter, Tensor] = {}
        """The normalizations' gradients that have memory of their own."""

    # --- agreement: all ranks must run the same passes ---

    def has(self, task: str) -> bool:
        """Whether this rank runs the passes of a task: always, because all ranks run all passes."""
        return True

    def share(self, task: str) -> float:
        """W / n for n of W ranks with labels, because `fully_shard` averages over all W ranks."""
        ranks = self.facts.ranks_of[task]
        return self.size / len(ranks) if self.transport.rank in ranks else 0.0

    def must_be_alike(self, call: Call) -> dict[str, str]:
        """`step` needs the same number of passes on every rank."""
        return {"passes": "number of micro-batches"} if call.stage in _OF_STEP else {}

    def check_tasks(self, call: Call) -> None:
        """Raises RankError if a rank lacks a loss in `backward`."""
        for rank in range(self.size if call.stage not in _OF_STEP else 0):
            missing = [task for task, ranks in self.facts.ranks_of.items() if rank not in ranks]
            if missing:
                self.messages.failures.raise_on_all(
                    RankError(
                        "losses must have the same tasks on all ranks after fully_shard: rank"
                        f" {self.transport.numbers[rank]} lacks {missing}; pass a loss of zero"
                        " there, or use step(closure, tasks=...), where such a loss has no weight"
                    )
                )

    # --- passes ---

    def before_backward(self, *, retains: bool) -> None:
        """Keeps parameters unsharded until the last backward pass through a graph."""
        self._keep_norms()
        if retains and not self._resharded:
            self._resharded = keep_unsharded(self._modules)
        elif not retains:
            self._restore_resharding()

    def _restore_resharding(self) -> None:
        restore_resharding(self._resharded)
        self._resharded = []

    def recover(self, held: Sequence[nn.Parameter]) -> None:
        """Cleans up unsharded parameters and pending callbacks after a failed pass."""
        self._restore_resharding()
        for module in modules_that_shard(held):  # Heads have their own FSDP roots.
            end_passes(module)

    def collect(self, task: str) -> bool:
        """Moves the shards of every `.grad` into a task's row, or adds them to the shards there."""
        self._keep_norms()
        row: list[Tensor | None] = [None] * len(self.parameters)
        unreached = []
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                unreached.append(i)
            else:
                row[i], parameter.grad = local_shard(parameter.grad), None
        return self.gradients.put(task, row, unreached)

    def note(self, task: str) -> bool:
        """Records a task's gradients, which stay in `.grad`; returns whether there are any."""
        self._keep_norms()
        return super().note(task)

    def _keep_norms(self) -> None:
        """Copies the normalizations' new gradients, since they alias a buffer of all gradients."""
        grads = [(p, p.grad) for p in self._of_norms if p.grad is not None]
        new = {p: grad for p, grad in grads if self._kept.get(p) is not grad}
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in new:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        for parameters in kinds.values():
            shards = [local_shard(new[parameter]) for parameter in parameters]
            packed = torch.cat([shard.flatten() for shard in shards])
            copies = torch.split(packed, [shard.numel() for shard in shards])
            for parameter, shard, own in zip(parameters, shards, copies, strict=True):
                set_local_shard(new[parameter], own.view(shard.shape))
        self._kept = dict(grads)

    def _end_passes(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        self._keep_norms()
        super()._end_passes(passes, held)

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the shards; the first replica broadcasts it, so all get the same bits."""
        all_reduce(tensor, group=self._shards)
        if self._replicas is not None:
            dist.broadcast(tensor, group=self._replicas, group_src=0)
        return tensor

    def span(self, parameter: int) -> tuple[int, int]:
        """The range of elements in this rank's rows."""
        weight = self.parameters[parameter]
        first, last = rows_of(weight)
        row = prod(weight.shape[1:])
        return first * row, last * row

    def array(self, parameter: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """Describes a weight, which `fully_shard` requires to be contiguous."""
        shape = self.parameters[parameter].shape
        outer = shape[0] // groups if out_channel_dim == 1 else 1
        return groups, outer, shape[out_channel_dim], prod(shape[out_channel_dim + 1 :])

    def weight_shard(self, parameter: int) -> Tensor | None:
        """The local rows of a weight, flat."""
        return local_shard(self.parameters[parameter].detach()).flatten()

    def update_shards(self, parameters: Sequence[int], over: Grads | None = None) -> list[Tensor]:
        """The local rows of the updates."""
        del over
        return [local_shard(self._update_of(i)) for i in parameters]

    def _update_of(self, i: int) -> Tensor:
        update, like = self._updates[i], self.parameters[i]
        if update is None or (update.dtype, update.device) != (like.dtype, like.device):
            update = self._updates[i] = torch.empty_like(like, requires_grad=False)
        return update

    def publish_updates(self, parameters: Sequence[int]) -> None:
        """Assigns the sharded updates to `.grad`."""
        for i in parameters:
            self.parameters[i].grad = self._updates[i]

    def lend(self, parameter: int, grad: Tensor) -> Tensor:
        """An uninitialized tensor for a parameter's update."""
        del grad
        return self._update_of(parameter)

    # --- gradients that are kept between steps ---

    def saved(self, parameter: int, kept: Tensor | None) -> Tensor:
        """A parameter's kept gradient, sharded like the parameter; zeros if there is none."""
        saved = super().saved(parameter, None)
        if kept is not None:
            local_shard(saved).copy_(kept)
        return saved

    def loaded(self, parameter: int, saved: Tensor, device: str | None) -> Tensor:
        """The local shard of a kept gradient, which is sharded or whole in the checkpoint."""
        whole = self.parameters[parameter]
        shard = local_shard(saved) if is_sharded(saved) else saved[slice(*rows_of(whole))]
        like = local_shard(whole)
        return moved(torch.empty_like(like, requires_grad=False).copy_(shard), device)

    def like(self) -> Tensor:
        """A plain tensor on the gradients' device."""
        return local_shard(self.parameters[0].detach())
