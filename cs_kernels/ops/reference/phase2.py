"""Connection strength, priority and Phase 2 in plain torch.

Names follow the paper: energy is the sum of s_pq over q, Eq. (4); strength is S, Eq. (6);
normalized strength is S^, Eq. (7); priority is nu, Eq. (10).
"""

from math import prod

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
from cs_kernels.ops.checks import (
    check_energies,
    check_gradients,
    check_layer,
    check_layouts,
    check_like,
    check_priorities,
    check_products,
    check_statistics,
    check_strength,
    check_weights,
    device_of,
)


def channel_rows(tensor: Tensor, out_channel_dim: int, groups: int) -> Tensor:
    """Returns [O, fan-in]; a row has the weights that produce one output channel."""
    if out_channel_dim == 0:
        return tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)
    fan_in, channels = tensor.shape[0] // groups, tensor.shape[1]
    kernel_size = prod(tensor.shape[2:])
    split = tensor.reshape(groups, fan_in, channels, kernel_size).movedim(2, 1)
    return split.reshape(groups * channels, fan_in * kernel_size)


def _from_channel_rows(rows: Tensor, like: Tensor, out_channel_dim: int, groups: int) -> Tensor:
    if out_channel_dim == 0:
        return rows.reshape(like.shape)
    fan_in, channels = like.shape[0] // groups, like.shape[1]
    split = rows.reshape(groups, channels, fan_in, *like.shape[2:])
    return split.movedim(1, 2).reshape(like.shape)


def channel_energies(weights: Tensors, out_channel_dims: Ints, groups: Ints) -> Tensor:
    """Sums of squares: Eq. (4) times the size of the kernel window."""
    check_weights(weights, out_channel_dims, groups)
    energies = [
        channel_rows(weight.double(), dim, layer_groups).square().sum(1)
        for weight, dim, layer_groups in zip(weights, out_channel_dims, groups, strict=True)
    ]
    return torch.cat(energies)


def _strength(
    energy: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, normalize: bool
) -> Tensor:
    """Eq. (6), followed by Eq. (7) if `normalize`."""
    offset = torch.tensor(eps, dtype=torch.float64, device=energy.device).unsqueeze(1)
    scale = gamma.double().square() / (running_var.double() + offset)
    strength = scale * energy
    if not normalize:
        return strength
    total = strength.sum(1, keepdim=True)
    return torch.where(total == 0, 0.0, strength / total)


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Floats,
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """Eq. (4) and (6), followed by Eq. (7) if `normalize`."""
    check_layer(weight, gamma, running_var, eps, out_channel_dim, groups)
    kernel_size = prod(weight.shape[2:])
    energy = channel_energies([weight], [out_channel_dim], [groups]) / kernel_size
    return _strength(energy, gamma, running_var, eps, normalize)


def task_priority(strength: Tensor) -> Tensor:
    """Eq. (10). Ties go to the first task; a NaN never wins, unlike in `torch.argmax`."""
    check_strength(strength)
    numbers = strength.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    highest = numbers.amax(0, keepdim=True)
    return (numbers == highest).to(torch.int8).argmax(0)


def energy_priority(
    energies: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, channels: Ints
) -> Tensor:
    """Eq. (6), (7) and (10), layer by layer."""
    tasks = check_energies(energies, gamma, running_var, eps, channels)
    priorities = [energies.new_empty(0, dtype=torch.int64)]
    statistics = (
        torch.split(x.flatten(), [tasks * o for o in channels]) for x in (gamma, running_var)
    )
    for layer, (energy, *flat) in enumerate(
        zip(torch.split(energies, list(channels)), *statistics, strict=True)
    ):
        layer_gamma, layer_var = (x.view(tasks, channels[layer]) for x in flat)
        layer_eps = eps[layer * tasks : (layer + 1) * tasks]
        priorities.append(task_priority(_strength(energy, layer_gamma, layer_var, layer_eps, True)))
    return torch.cat(priorities)


def _check(
    updates: Tensors, grads: Grads, priorities: Tensors, dims: Ints, groups: Ints, tasks: int
) -> None:
    check_gradients(updates, grads, tasks)
    channels = check_layouts(updates, dims, groups, len(priorities), "priorities")
    check_priorities(priorities, channels, device_of(updates))


def _task_grads(grads: Grads, t: int, tasks: int, like: Tensor) -> Tensor:
    """Tensor t's gradients, float64 [K, ...]; zeros for a missing gradient."""
    zeros = torch.zeros_like(like, dtype=torch.float64)
    task_grads = grads[t * tasks : (t + 1) * tasks]
    return torch.stack([zeros if grad is None else grad.double() for grad in task_grads])


def _products(grads: Tensor, priority: Tensor) -> Tensor:
    """d_ij = <G_i, G_j> over channel group i, [K, K], from one layer's grads [K, O, fan-in]."""
    rows = []
    for i, g_i in enumerate(grads):
        group = (priority == i).unsqueeze(1)
        reference = torch.where(group, g_i, 0.0)
        rows.append(
            torch.stack([(reference * torch.where(group, g_j, 0.0)).sum() for g_j in grads])
        )
    return torch.stack(rows)


def _project(update: Tensor, grads: Tensor, priority: Tensor, products: Tensor) -> Tensor:
    """Algorithm 1's loop over channel groups (float64): update - d_ij / d_ii * G_i per conflict."""
    for i, g_i in enumerate(grads):
        group = (priority == i).unsqueeze(1)
        for j in range(len(grads)):
            if j != i:
                d_ij, d_ii = products[i, j], products[i, i]
                conflict = (d_ij < 0) & (d_ii > 0)
                update = torch.where(group & conflict, update - d_ij / d_ii * g_i, update)
    return update


def project_conflicts_(
    updates: Tensors,
    grads: Grads,
    priorities: Tensors,
    out_channel_dims: Ints,
    groups: Ints,
    tasks: int,
    products_out: Tensor | None = None,
) -> None:
    """Phase 2 of Algorithm 1 for given priorities, tensor by tensor.

    `products_out`, float64 [layers, K, K], receives the channel groups' d_ij.
    """
    _check(updates, grads, priorities, out_channel_dims, groups, tasks)
    for t, update in enumerate(updates):
        stacked = _task_grads(grads, t, tasks, update)
        if t < len(priorities):
            layout = out_channel_dims[t], groups[t]
            rows = torch.stack([channel_rows(grad, *layout) for grad in stacked])
            products = _products(rows, priorities[t])
            if products_out is not None:
                products_out[t] = products
            projected = _project(rows.sum(0), rows, priorities[t], products)
            update.copy_(_from_channel_rows(projected, update, *layout))
        else:
            update.copy_(stacked.sum(0))


def phase2_products_(
    updates: Tensors,
    grads: Grads,
    priorities: Tensors,
    out_channel_dims: Ints,
    groups: Ints,
    tasks: int,
) -> Tensor:
    """Writes the rounded plain sums; returns every layer's d_ij."""
    _check(updates, grads, priorities, out_channel_dims, groups, tasks)
    like = updates[0] if updates else torch.empty(0)
    products = like.new_zeros((len(priorities), tasks, tasks), dtype=torch.float64)
    for t, update in enumerate(updates):
        stacked = _task_grads(grads, t, tasks, update)
        update.copy_(stacked.sum(0))
        if t < len(priorities):
            layout = out_channel_dims[t], groups[t]
            rows = torch.stack([channel_rows(grad, *layout) for grad in stacked])
            products[t] = _products(rows, priorities[t])
    return products


def phase2_apply_(
    updates: Tensors,
    grads: Grads,
    priorities: Tensors,
    products: Tensor,
    out_channel_dims: Ints,
    groups: Ints,
    tasks: int,
) -> None:
    """Adds a_i * G_i to the rounded sums."""
    _check(updates, grads, priorities, out_channel_dims, groups, tasks)
    check_products(products, len(priorities), tasks, device_of(updates))
    for t, priority in enumerate(priorities):
        layout = out_channel_dims[t], groups[t]
        stacked = _task_grads(grads, t, tasks, updates[t])
        rows = torch.stack([channel_rows(grad, *layout) for grad in stacked])
        update = channel_rows(updates[t].to(torch.float64, copy=True), *layout)
        projected = _project(update, rows, priority, products[t])
        updates[t].copy_(_from_channel_rows(projected, updates[t], *layout))


def phase2_update_(
    updates: Tensors,
    grads: Grads,
    weights: Tensors,
    gamma: Tensor,
    running_var: Tensor,
    eps: Floats,
    out_channel_dims: Ints,
    groups: Ints,
    tasks: int,
    products: Tensor | None = None,
) -> Tensor:
    """Derives the priorities from the weights, then runs Phase 2."""
    check_gradients(updates, grads, tasks)
    channels = check_layouts(updates, out_channel_dims, groups, len(weights), "weights")
    for weight, update in zip(weights, updates, strict=False):
        check_like(weight, update, "weights")
    check_statistics(gamma, running_var, eps, channels, tasks, device_of(updates))
    if products is not None:
        check_products(products, len(weights), tasks, device_of(updates), written=True)
    priorities = gamma.new_empty(0, dtype=torch.int64)
    if weights:
        energies = channel_energies(weights, out_channel_dims, groups)
        priorities = energy_priority(energies, gamma, running_var, eps, channels)
    channel_groups = torch.split(priorities, channels)
    for weight, priority in zip(weights, channel_groups, strict=True):
        if not weight.numel():
            priority.zero_()  # As in the kernels, which skip layers without elements.
    project_conflicts_(updates, grads, channel_groups, out_channel_dims, groups, tasks, products)
    return priorities
