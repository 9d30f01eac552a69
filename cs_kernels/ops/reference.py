"""The operators in plain torch, on any device: the definition that the other backends are held to.

Everything is computed in float64 and rounded once. Names follow the paper: energy is the sum over q
of s_pq (eq:eq1), strength S (eq:eq3), normalized strength S^ (eq:eq5), priority nu (eq:eq6).
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from cs_kernels.ops.random import random_key, uniform_numbers
from cs_kernels.ops.solvers import (  # noqa: F401  (operators, too)
    aligned_mtl_weights,
    cagrad_weights,
    imtl_g_weights,
    mgda_weights,
    nash_mtl_weights,
    pcgrad_weights,
    upgrad_weights,
)


def channel_rows(tensor: Tensor, out_channel_dim: int, groups: int) -> Tensor:
    """[O, fan-in]: a row holds the weights that produce one output channel."""
    if out_channel_dim == 0:
        return tensor.flatten(1) if tensor.ndim > 1 else tensor.unsqueeze(1)
    fan_in, channels = tensor.shape[0] // groups, tensor.shape[1]
    split = tensor.reshape(groups, fan_in, channels, -1).movedim(2, 1)
    return split.reshape(groups * channels, -1)


def _from_channel_rows(rows: Tensor, like: Tensor, out_channel_dim: int, groups: int) -> Tensor:
    if out_channel_dim == 0:
        return rows.reshape(like.shape)
    fan_in, channels = like.shape[0] // groups, like.shape[1]
    split = rows.reshape(groups, channels, fan_in, *like.shape[2:])
    return split.movedim(1, 2).reshape(like.shape)


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """eq:eq1 and eq:eq3, and eq:eq5 where `normalize`."""
    kernel_size = prod(weight.shape[2:])
    rows = channel_rows(weight.double(), out_channel_dim, groups)
    energy = rows.square().sum(1) / kernel_size
    offset = torch.tensor(eps, dtype=torch.float64, device=weight.device).unsqueeze(1)
    scale = gamma.double().square() / (running_var.double() + offset)
    strength = scale * energy
    if not normalize:
        return strength
    total = strength.sum(1, keepdim=True)
    return torch.where(total == 0, 0.0, strength / total)


def task_priority(strength: Tensor) -> Tensor:
    """eq:eq6; torch.argmax would let a NaN win, and leaves open which of equals does."""
    numbers = strength.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    highest = numbers.amax(0, keepdim=True)
    return (numbers == highest).to(torch.int8).argmax(0)


def _projected_sum(grads: Tensor, priority: Tensor) -> Tensor:
    """Algorithm 1's loop over channel groups, for grads [K, O, fan-in] of one layer."""
    update = grads.sum(0)
    for i, g_i in enumerate(grads):
        group = (priority == i).unsqueeze(1)
        reference = torch.where(group, g_i, 0.0)
        d_ii = (reference * reference).sum()
        for j, g_j in enumerate(grads):
            if j != i:
                d_ij = (reference * torch.where(group, g_j, 0.0)).sum()
                conflict = (d_ij < 0) & (d_ii > 0)
                update = torch.where(group & conflict, update - d_ij / d_ii * g_i, update)
    return update


def project_conflicts_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Phase 2 of Algorithm 1 with the channel groups given, for each tensor on its own."""
    for t, update in enumerate(updates):
        present = [
            torch.zeros_like(update, dtype=torch.float64) if grad is None else grad.double()
            for grad in grads[t * tasks : (t + 1) * tasks]
        ]
        if t < len(priorities):
            layout = out_channel_dims[t], groups[t]
            rows = torch.stack([channel_rows(grad, *layout) for grad in present])
            total = _from_channel_rows(_projected_sum(rows, priorities[t]), update, *layout)
        else:
            total = torch.stack(present).sum(0)
        update.copy_(total)


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
    """Priorities from the weights, then Phase 2."""
    priorities = []
    start = 0
    for layer, weight in enumerate(weights):
        layout = out_channel_dims[layer], groups[layer]
        channels = len(channel_rows(weight, *layout))
        of_layer = slice(start, start + tasks * channels)
        strength = connection_strength(
            weight,
            gamma[of_layer].view(tasks, channels),
            running_var[of_layer].view(tasks, channels),
            eps[layer * tasks : (layer + 1) * tasks],
            True,
            *layout,
        )
        priorities.append(task_priority(strength))
        start = of_layer.stop
    project_conflicts_(updates, grads, priorities, out_channel_dims, groups, tasks)
    return torch.cat([gamma.new_empty(0, dtype=torch.int64), *priorities])


def gramian(
    grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
) -> Tensor:
    """Products of gradients, in float64, added up over the tensors of a group."""
    like = next(grad for grad in grads if grad is not None)
    result = like.new_zeros((groups, tasks, tasks), dtype=torch.float64)
    for t, group in enumerate(group_of):
        of_tensor = grads[t * tasks : (t + 1) * tasks]
        present = [i for i, grad in enumerate(of_tensor) if grad is not None]
        if present:
            rows = torch.stack([grad.double().flatten() for grad in of_tensor if grad is not None])
            here = torch.tensor(present, device=like.device)
            result[group, here.unsqueeze(1), here] += rows @ rows.T
    return result


def combine_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Tensor,
    group_of: Sequence[int],
    tasks: int,
) -> None:
    """Update = sum_j weights[group, j] * grads[j]."""
    for t, update in enumerate(updates):
        total = torch.zeros_like(update, dtype=torch.float64)
        for j, grad in enumerate(grads[t * tasks : (t + 1) * tasks]):
            if grad is not None:
                total += weights[group_of[t], j].double() * grad.double()
        update.copy_(total)


def drop_signs_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaks: Sequence[float],
    seed: int,
    step: int,
    tasks: int,
) -> None:
    """GradDrop (Chen et al. 2020) as a choice between two sums.

    Their share of the sum of absolute values is the probability of the positive ones.
    """
    key = random_key(seed, step)
    place = 0
    for t, update in enumerate(updates):
        positive = torch.zeros_like(update, dtype=torch.float64)
        negative, kept_positive, kept_negative, leaked = (
            torch.zeros_like(positive) for _ in "1234"
        )
        for leak, grad in zip(leaks, grads[t * tasks : (t + 1) * tasks], strict=True):
            if grad is not None:
                wide = grad.double()
                above = torch.where(wide > 0, wide, 0.0)
                below = torch.where(wide > 0, 0.0, wide)  # also what is not a number
                positive += above
                negative += below
                kept_positive += (1 - leak) * above
                kept_negative += (1 - leak) * below
                leaked += leak * wide
        u = _in_memory_order(uniform_numbers(key, place, update.numel(), update.device), update)
        chosen = torch.where(u * (positive - negative) < positive, kept_positive, kept_negative)
        # Zero times the sum: infinities and NaN are not dropped.
        update.copy_(chosen + leaked + 0 * (positive + negative))
        place += update.numel()


def _in_memory_order(numbers: Tensor, like: Tensor) -> Tensor:
    """A tensor in the shape of `like`, with the numbers as its elements lie in memory."""
    if torch.empty_like(like).stride() == like.stride():  # dense
        return numbers.as_strided(like.shape, like.stride())
    return numbers.view(like.shape)
