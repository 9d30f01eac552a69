"""The collectives under one name for all versions of torch."""

from typing import Any

import torch.distributed as dist


def _named(*names: str) -> Any:
    return next((function for name in names if (function := getattr(dist, name, None))), None)


all_gather = _named("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
