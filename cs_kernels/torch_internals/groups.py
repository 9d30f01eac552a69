"""Timeouts and names of process groups."""

from datetime import timedelta

import torch
import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The time after which a collective of a group fails."""
    options = getattr(group._get_backend(device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return timeout


def names_are_counted(ranks: int) -> bool:
    """Whether a new group of this many ranks gets a name that no earlier group has had.

    Torch numbers the groups that all ranks make together. Before 2.14, any other group's name
    depends on the number of existing groups, so a new group may reuse a destroyed group's name, and
    find its entries in the store.
    """
    return ranks == dist.get_world_size() or torch.__version__ >= "2.14"


def number_of_groups(*, counted: bool) -> int:
    """The number that a new group's name would have.

    Args:
        counted: Whether the number counts all groups ever made, or only the existing ones.

    """
    world = getattr(dist.distributed_c10d, "_world", None)
    return getattr(world, "group_count", 0) if counted else len(getattr(world, "pg_names", ()))
