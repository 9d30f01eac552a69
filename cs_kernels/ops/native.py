"""The operators through the compiled module `cs_kernels._C`."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops.operands import (
    ALIGNED_SCALES,
    DTYPES,
    Operands,
    as_channels,
    check_device,
    check_gramian,
    check_group_of,
    check_numel,
    check_scale,
    check_type,
    first_present,
    unavailable,
)

if unavailable is None:
    from cs_kernels import _C

_TYPES = {dtype: code for code, dtype in enumerate(DTYPES)}


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64).contiguous()


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """Reads the weight once."""
    check_type(weight, "weight")
    weight, layout = as_channels(weight, out_channel_dim, groups)
    channels = layout[0] * layout[2]
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        check_device(tensor, weight.device, name)
        check_numel(tensor, len(eps) * channels, name)
    gamma, variance = _in_double(gamma), _in_double(running_var)
    strength = torch.empty((len(eps), channels), dtype=torch.float64)
    _C.connection_strength(
        type=_TYPES[weight.dtype],
        layout=layout,
        weight=weight.data_ptr(),
        kernel_size=prod(weight.shape[2:]),
        gamma=gamma.data_ptr(),
        variance=variance.data_ptr(),
        epsilon=list(eps),
        normalize=normalize,
        strength=strength.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return strength


def task_priority(strength: Tensor) -> Tensor:
    """Reads K * O numbers, writes O."""
    numbers = strength.to(torch.float64).contiguous()
    tasks, channels = numbers.shape
    priority = torch.empty(channels, dtype=torch.int64)
    _C.task_priority(
        strength=numbers.data_ptr(), tasks=tasks, rows=channels, priority=priority.data_ptr()
    )
    return priority


def _phase2(
    operands: Operands,
    priorities: Sequence[int],
    weights: Sequence[Tensor] = (),
    gamma: int = 0,
    variance: int = 0,
    eps: Sequence[float] = (),
) -> None:
    _C.phase2(
        tasks=operands.tasks,
        types=operands.types,
        layouts=operands.layouts,
        updates=operands.addresses,
        gradients=operands.gradients,
        priorities=priorities,
        weights=[weight.data_ptr() for weight in weights],
        gamma=gamma,
        variance=variance,
        epsilon=list(eps),
        threads=torch.get_num_threads(),
    )
    operands.finish()


def project_conflicts_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N; rows in conflict are visited again in cache."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    operands.check_priorities(priorities)
    priorities = [priority.contiguous() for priority in priorities]
    _phase2(operands, [priority.data_ptr() for priority in priorities])


def phase2_update_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> Tensor:
    """Reads N weights and K * N gradients once and writes N; conflicts again in cache."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    weights = operands.weights(weights)
    channels = operands.check_statistics(weights, gamma, running_var, eps)
    gamma, variance = _in_double(gamma), _in_double(running_var)
    priorities, addresses = operands.priorities(channels)
    _phase2(operands, addresses, weights, gamma.data_ptr(), variance.data_ptr(), eps)
    return priorities


def _gradients(operands: Operands) -> dict[str, Any]:
    """The arguments of every function over gradients."""
    if not 1 <= operands.tasks <= _C.max_tasks:
        raise ValueError(f"tasks must be in [1, {_C.max_tasks}], got {operands.tasks}")
    return {
        "tasks": operands.tasks,
        "types": operands.types,
        "sizes": operands.sizes,
        "gradients": operands.gradients,
        "threads": torch.get_num_threads(),
    }


def gramian(
    grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
) -> Tensor:
    """Reads K * N gradients once."""
    operands = Operands(first_present(grads, len(group_of), tasks), grads, tasks, name="grads")
    check_group_of(group_of, groups)
    result = torch.empty((groups, tasks, tasks), dtype=torch.float64)
    _C.gramian(
        **_gradients(operands), groups=groups, group_of=list(group_of), out=result.data_ptr()
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
    operands = Operands(updates, grads, tasks)
    groups = len(weights)
    check_group_of(group_of, groups)
    check_numel(weights, groups * tasks, "weights")
    operands.check_here(weights, "weights")
    weights = _in_double(weights)
    _C.combine(
        **_gradients(operands),
        groups=groups,
        group_of=list(group_of),
        updates=operands.addresses,
        weights=weights.data_ptr(),
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
    operands = Operands(updates, grads, tasks)
    _C.drop_signs(
        **_gradients(operands),
        updates=operands.addresses,
        leaks=list(leaks),
        seed=seed,
        step=step,
    )
    operands.finish()


def _solve(solver: Callable[..., None], gramian: Tensor, *options: float) -> Tensor:
    check_gramian(gramian, _C.max_tasks)
    tasks = gramian.shape[-1]
    numbers = gramian.to(torch.float64).contiguous()
    weights = torch.empty(numbers.shape[:-1], dtype=torch.float64)
    count = weights.numel() // tasks
    solver(numbers.data_ptr(), count, tasks, weights.data_ptr(), *options)
    return weights


def pcgrad_weights(gramian: Tensor, seed: int, step: int) -> Tensor:
    """All solvers read K * K numbers and write K; this one takes K^3 operations."""
    return _solve(_C.pcgrad_weights, gramian, seed, step)


def cagrad_weights(gramian: Tensor, c: float) -> Tensor:
    """A few non-negative quadratic programs."""
    return _solve(_C.cagrad_weights, gramian, c)


def mgda_weights(gramian: Tensor) -> Tensor:
    """One non-negative quadratic program."""
    return _solve(_C.mgda_weights, gramian)


def aligned_mtl_weights(gramian: Tensor, scale: str) -> Tensor:
    """One eigendecomposition."""
    return _solve(_C.aligned_mtl_weights, gramian, ALIGNED_SCALES.index(check_scale(scale)))


def nash_mtl_weights(gramian: Tensor) -> Tensor:
    """At most 100 Newton steps, usually below 10."""
    return _solve(_C.nash_mtl_weights, gramian)


def imtl_g_weights(gramian: Tensor) -> Tensor:
    """One eigendecomposition."""
    return _solve(_C.imtl_g_weights, gramian)


def upgrad_weights(gramian: Tensor) -> Tensor:
    """K non-negative quadratic programs."""
    return _solve(_C.upgrad_weights, gramian)
