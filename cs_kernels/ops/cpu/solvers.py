"""Task weights from Gramians, compiled."""

import torch
from torch import Tensor

from cs_kernels import _C
from cs_kernels.ops.operands import check_gramian, option_word
from cs_kernels.ops.solvers import SOLVERS

_SOLVERS = {name: number for number, name in enumerate(SOLVERS)}


def solve(name: str, gramian: Tensor, *options: int | float | str) -> Tensor:
    """Reads K * K numbers and writes K for each Gramian."""
    check_gramian(gramian)
    tasks = gramian.shape[-1]
    gramians = gramian.to(torch.float64).contiguous()
    weights = torch.empty(gramians.shape[:-1], dtype=torch.float64)
    _C.solve(
        _SOLVERS[name],
        gramians.data_ptr(),
        weights.numel() // tasks,
        tasks,
        weights.data_ptr(),
        option_word(*options),
    )
    return weights
