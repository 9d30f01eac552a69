"""Gramian, weighted sum and sign dropping, compiled."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cs_kernels import _C
from cs_kernels.ops.operands import (
    Operands,
    check_group_of,
    check_numel,
    check_tasks,
    first_present,
    option_word,
)


def gramian(
    grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
) -> Tensor:
    """Reads K * N gradients once."""
    check_tasks(tasks)
    operands = Operands(first_present(grads, len(group_of), tasks), grads, tasks, name="grads")
    check_group_of(group_of, groups)
    result = torch.empty((groups, tasks, tasks), dtype=torch.float64)
    _C.gramian(
        operands.native,
        group_of=list(group_of),
        groups=groups,
        out=result.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return result


def combine_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Tensor,
    group_of: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    check_tasks(tasks)
    operands = Operands(updates, grads, tasks)
    groups = len(weights)
    check_group_of(group_of, groups)
    check_numel(weights, groups * tasks, "weights")
    operands.check_device(weights, "weights")
    weights = weights.to(torch.float64).contiguous()
    _C.combine(
        operands.native,
        group_of=list(group_of),
        groups=groups,
        weights=weights.data_ptr(),
        threads=torch.get_num_threads(),
    )
    operands.finish()


def drop_signs_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaks: Sequence[float],
    seed: int,
    step: int,
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    check_tasks(tasks)
    operands = Operands(updates, grads, tasks)
    _C.drop_signs(
        operands.native,
        leaks=list(leaks),
        key=option_word(seed, step),
        threads=torch.get_num_threads(),
    )
    operands.finish()
