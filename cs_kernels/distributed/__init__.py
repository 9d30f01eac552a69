"""The same result on many ranks: torch.distributed below, nothing home-made.

The gradient of a task is that of its mean loss over the ranks that have labels for it, and surgery
takes place on these. `control` is what ranks tell each other about a step (its tasks, failures), on
the hosts; `replicated` and `sharded` are the gradients, of which a rank holds a part.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from cs_kernels.distributed.control import Control, timeout_of
from cs_kernels.distributed.partial import PartialGradients
from cs_kernels.distributed.ranks import Alone, Call, RankError, Ranks
from cs_kernels.distributed.replicated import ReplicatedGradients
from cs_kernels.distributed.sharded import (
    ShardedGradients,
    all_sharded_modules,
    is_sharded,
    mesh_of,
    reshard,
    sharded_parameters,
)
from cs_kernels.distributed.wrappers import Wrappers, unwrapped
from cs_kernels.gradients import TaskGradients

__all__ = [
    "Alone",
    "Call",
    "Control",
    "PartialGradients",
    "RankError",
    "Ranks",
    "Wrappers",
    "all_sharded_modules",
    "find_ranks",
    "is_sharded",
    "reshard",
    "sharded_parameters",
    "unwrapped",
]


def find_ranks(
    trunk: nn.Module,
    shared: Mapping[str, nn.Parameter],
    tasks: Sequence[str],
    process_group: dist.ProcessGroup | None,
    wrappers: Wrappers,
) -> tuple[Ranks, TaskGradients]:
    """The ranks that train a trunk, and this one's gradients of its shared parameters.

    Warns if there are several ranks, and neither a sharded trunk nor a process group says so.

    Raises:
        TypeError: `process_group` is not a process group.
        ValueError: It does not contain this process, has other ranks than a wrapper of the trunk,
            or is given for a sharded trunk; or the trunk is sharded in another way than
            `fully_shard` does.

    """
    if not shared:
        return Alone(), TaskGradients(shared, tasks)
    device = next(iter(shared.values())).device
    mesh = mesh_of(shared)
    if mesh is not None:
        if process_group is not None:
            raise ValueError(
                "process_group must be None for a trunk that is sharded on a mesh, whose ranks are"
                f" {mesh.mesh.tolist()}, got {process_group!r}"
            )
        ranks = mesh.mesh.flatten().tolist()
        control = Control(ranks, mesh.get_group(mesh.ndim - 1), device, sharded=True)
        return control, ShardedGradients(shared, tasks, control, mesh, trunk)
    group = wrappers.group() if process_group is None else process_group
    if group is None:
        is_alone = not (dist.is_available() and dist.is_initialized())
        if not is_alone:
            wrappers.watch(trunk, [])
        if not is_alone and dist.get_world_size() > 1:
            warnings.warn(
                f"process_group= is missing on {dist.get_world_size()} ranks: each trains a network"
                " of its own; give process_group=torch.distributed.group.WORLD, or the"
                " DistributedDataParallel network as trunk",
                stacklevel=3,
            )
        return Alone(), TaskGradients(shared, tasks)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a process group that contains this process, such as"
            f" torch.distributed.group.WORLD after init_process_group, got {group!r}"
        )
    ranks = dist.get_process_group_ranks(group)
    wrappers.watch(trunk, ranks)
    control = Control(ranks, group, device, sharded=False)
    # The user's own collectives, as those of SyncBatchNorm, may come in between in any order.
    own = control.new_group(ranks, timeout_of(group, device), dist.get_backend(group))
    return control, ReplicatedGradients(shared, tasks, control, own)
