"""Connection strength, priority and Phase 2, compiled."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from cs_kernels import _C
from cs_kernels.ops.operands import (
    TYPES,
    ChannelLayout,
    Operands,
    as_channels,
    check_device,
    check_energies,
    check_numel,
    check_type,
)


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64).contiguous()


def _channels(layout: ChannelLayout) -> int:
    return layout[0] * layout[2]


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
    channels = _channels(layout)
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        check_device(tensor, weight.device, name)
        check_numel(tensor, len(eps) * channels, name)
    gamma, variance = _in_double(gamma), _in_double(running_var)
    strength = torch.empty((len(eps), channels), dtype=torch.float64)
    _C.connection_strength(
        type=TYPES[weight.dtype],
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
    numbers = _in_double(strength)
    tasks, channels = numbers.shape
    priority = torch.empty(channels, dtype=torch.int64)
    _C.task_priority(
        strength=numbers.data_ptr(), tasks=tasks, rows=channels, priority=priority.data_ptr()
    )
    return priority


def channel_energies(
    weights: Sequence[Tensor], out_channel_dims: Sequence[int], groups: Sequence[int]
) -> Tensor:
    """Reads the weights once."""
    energies = []
    for given, dim, of_layer in zip(weights, out_channel_dims, groups, strict=True):
        check_type(given, "weights")
        weight, layout = as_channels(given, dim, of_layer)
        energies.append(torch.empty(_channels(layout), dtype=torch.float64))
        _C.channel_energies(
            type=TYPES[weight.dtype],
            layout=layout,
            weight=weight.data_ptr(),
            energy=energies[-1].data_ptr(),
            threads=torch.get_num_threads(),
        )
    return torch.cat(energies)


def energy_priority(
    energies: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    channels: Sequence[int],
) -> Tensor:
    """Reads (2 K + 1) O numbers and writes O."""
    tasks = check_energies(energies, gamma, running_var, eps, channels)
    energies, gamma, variance = map(_in_double, (energies, gamma.flatten(), running_var.flatten()))
    priority = torch.empty(len(energies), dtype=torch.int64)
    first = 0
    for layer, rows in enumerate(channels):
        _C.energy_priority(
            energy=energies[first:].data_ptr(),
            gamma=gamma[tasks * first :].data_ptr(),
            variance=variance[tasks * first :].data_ptr(),
            epsilon=list(eps[layer * tasks : (layer + 1) * tasks]),
            rows=rows,
            priority=priority[first:].data_ptr(),
        )
        first += rows
    return priority


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
    _kept, addresses = operands.priority_addresses(priorities)
    _C.phase2(
        operands.native,
        priorities=addresses,
        weights=[],
        gamma=0,
        variance=0,
        epsilon=[],
        threads=torch.get_num_threads(),
    )
    operands.finish()


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
    priorities, addresses = operands.new_priorities(channels)
    _C.phase2(
        operands.native,
        priorities=addresses,
        weights=[weight.data_ptr() for weight in weights],
        gamma=gamma.data_ptr(),
        variance=variance.data_ptr(),
        epsilon=list(eps),
        threads=torch.get_num_threads(),
    )
    operands.finish()
    return priorities


def phase2_products_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> Tensor:
    """Reads K * N gradients once and writes N."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    _kept, addresses = operands.priority_addresses(priorities)
    products = torch.empty((len(priorities), tasks, tasks), dtype=torch.float64)
    _C.phase2_products(
        operands.native,
        priorities=addresses,
        products=products.data_ptr(),
        threads=torch.get_num_threads(),
    )
    operands.finish()
    return products


def phase2_apply_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    products: Tensor,
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Reads and writes the rows of channel groups in conflict; their gradients once."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    operands.read_outputs()
    _kept, addresses = operands.priority_addresses(priorities)
    operands.check_products(products, len(priorities))
    products = products.contiguous()
    _C.phase2_apply(
        operands.native,
        priorities=addresses,
        products=products.data_ptr(),
        threads=torch.get_num_threads(),
    )
    operands.finish()
