"""Finds the ranks that train a trunk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from cs_kernels.ranks.replicated import Replicated
from cs_kernels.ranks.sharded import Sharded
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.ranks.transport import Transport
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.torch_internals.fsdp import mesh_of
from cs_kernels.torch_internals.groups import timeout_of


def check_group(group: object) -> None:
    """Raises TypeError unless this is a process group that contains this process."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a process group that contains this process, such as"
            f" torch.distributed.group.WORLD after init_process_group, got {group!r}"
        )


def find_ranks(
    trunk: nn.Module,
    shared: Mapping[str, nn.Parameter],
    tasks: Sequence[str],
    process_group: dist.ProcessGroup | None,
    wrappers: Wrappers,
) -> Ranks:
    """Returns the strategy of the ranks that train a trunk.

    Warns if there are several ranks, but no sharded trunk, wrapper or process group names them.

    Raises:
        TypeError: `process_group` is not a process group.
        ValueError: `process_group` does not contain this process, has other ranks than a wrapper of
            the trunk, or is given for a sharded trunk; or the trunk is sharded in part, on several
            meshes, or in another way than by `fully_shard`.

    """
    if not shared:
        return Ranks(shared, tasks, wrappers)
    device = next(iter(shared.values())).device
    mesh = mesh_of(shared)
    if mesh is not None:
        if process_group is not None:
            raise ValueError(
                "process_group must be None for a trunk that is sharded on a mesh, whose ranks are"
                f" {mesh.mesh.tolist()}, got {process_group!r}"
            )
        ranks = mesh.mesh.flatten().tolist()
        transport = Transport(ranks, mesh.get_group(mesh.ndim - 1), device)
        return Sharded(shared, tasks, wrappers, transport, mesh, trunk)
    group = wrappers.group() if process_group is None else process_group
    if group is None:
        if dist.is_available() and dist.is_initialized():
            wrappers.watch(trunk, [])
            if dist.get_world_size() > 1:
                warnings.warn(
                    f"process_group= is missing on {dist.get_world_size()} ranks: each rank trains"
                    " its own network; pass process_group=torch.distributed.group.WORLD, or the"
                    " DistributedDataParallel network as trunk",
                    stacklevel=4,
                )
        return Ranks(shared, tasks, wrappers)
    check_group(group)
    ranks = dist.get_process_group_ranks(group)
    wrappers.watch(trunk, ranks)
    transport = Transport(ranks, group, device)
    # A separate group: the user's collectives, such as SyncBatchNorm's, may interleave with ours.
    own = transport.new_group(ranks, timeout_of(group, device), dist.get_backend(group))
    return Replicated(shared, tasks, wrappers, transport, own)
