"""Collectives under their old and new names in torch; complex tensors are sent as real pairs."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from cs_kernels.gradients import as_real


def _named(*names: str) -> Any:
    return next((function for name in names if (function := getattr(dist, name, None))), None)


_all_gather = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


def all_gather(output: Tensor, part: Tensor, **options: Any) -> Any:
    """Writes the ranks' parts, concatenated, to `output`."""
    return _all_gather(as_real(output), as_real(part), **options)


def reduce_scatter(part: Tensor, flat: Tensor, **options: Any) -> Any:
    """Writes this rank's part of the sum over the ranks to `part`."""
    return _reduce_scatter(as_real(part), as_real(flat), **options)


def all_reduce(tensor: Tensor, **options: Any) -> Any:
    """Sums a tensor over the ranks, in place."""
    return dist.all_reduce(as_real(tensor), **options)
