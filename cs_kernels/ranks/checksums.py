"""Checksums that show whether ranks hold the same parameters."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cs_kernels.gradients import as_real
from cs_kernels.torch_internals.fsdp import is_sharded, local_shard, rows_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(held: Sequence[Tensor], names: Mapping[Tensor, str]) -> dict[str, int]:
    """The sum of each parameter's values, with their bits read as integers, by parameter name.

    The name of a sharded parameter ends with the range of rows in this rank's shard.
    """
    sums: dict[str, Tensor] = {}
    for n, parameter in enumerate(held):
        name = names.get(parameter, f"parameter {n} of the optimizer")
        values = parameter.detach()
        if is_sharded(values):
            first, last = rows_of(values)
            name = f"{name}[{first}:{last}]"
            values = local_shard(values)
        values = as_real(values)
        sums[name] = values.view(_INTEGERS[values.itemsize]).sum(dtype=torch.int64)
    by_device: dict[torch.device, list[str]] = {}
    for name, total in sums.items():
        by_device.setdefault(total.device, []).append(name)
    return {
        name: number
        for of_device in by_device.values()
        for name, number in zip(
            of_device, torch.stack([sums[name] for name in of_device]).tolist(), strict=True
        )
    }
