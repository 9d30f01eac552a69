"""Gramian, weighted sum and sign dropping in plain torch."""

from itertools import accumulate

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
from cs_kernels.ops.checks import (
    check_gradients,
    check_group_of,
    check_signs,
    check_task_weights,
    check_tasks,
    first_present,
)
from cs_kernels.ops.random import random_key, uniform_numbers


def gramian(grads: Grads, group_of: Ints, groups: int, tasks: int) -> Tensor:
    """Dot products of gradients in float64, summed over each group's tensors."""
    check_tasks(tasks)
    check_group_of(group_of, groups, len(group_of))
    present_grads = first_present(grads, len(group_of), tasks)
    check_gradients(present_grads, grads, tasks, "grads")
    like = present_grads[0]
    result = like.new_zeros((groups, tasks, tasks), dtype=torch.float64)
    for t, group in enumerate(group_of):
        task_grads = grads[t * tasks : (t + 1) * tasks]
        present = [i for i, grad in enumerate(task_grads) if grad is not None]
        if present:
            rows = torch.stack([grad.double().flatten() for grad in task_grads if grad is not None])
            index = torch.tensor(present, device=like.device)
            products = rows @ rows.T
            # A matrix product may round the two triangles differently.
            result[group, index.unsqueeze(1), index] += (products + products.T) / 2
    return result


def combine_(
    updates: Tensors,
    grads: Grads,
    weights: Tensor,
    group_of: Ints,
    tasks: int,
    protected: int | None = None,
) -> None:
    """Update = sum_j weights[group, j] * grads[j].

    Where the protected gradient is nonzero and the sum differs from it in sign, the update is this
    gradient.
    """
    check_task_weights(weights, group_of, tasks, updates, protected)
    check_gradients(updates, grads, tasks)
    for t, update in enumerate(updates):
        total = torch.zeros_like(update, dtype=torch.float64)
        for j, grad in enumerate(grads[t * tasks : (t + 1) * tasks]):
            if grad is not None:
                total += weights[group_of[t], j].double() * grad.double()
        guide = None if protected is None else grads[t * tasks + protected]
        if guide is not None:
            wide = guide.double()
            differs = ((wide > 0) & ~(total > 0)) | ((wide < 0) & ~(total < 0))
            # Adding zero times both gives NaN if either is infinite or NaN, chosen or not.
            total = torch.where(differs, wide, total) + 0 * (total + wide)
        update.copy_(total)


def drop_signs_(
    updates: Tensors,
    grads: Grads,
    leaks: Floats,
    seed: int,
    step: int,
    tasks: int,
    counter: Tensor | None = None,
    offsets: Ints | None = None,
) -> None:
    """GradDrop (Chen et al. 2020), as a random choice between two sums.

    The probability of the positive sum is its share of the sum of absolute values.
    """
    check_signs(updates, leaks, tasks, counter, offsets)
    check_gradients(updates, grads, tasks)
    key = random_key(seed, step, counter)
    if offsets is None:
        offsets = list(accumulate((update.numel() for update in updates), initial=0))
    for t, update in enumerate(updates):
        positive = torch.zeros_like(update, dtype=torch.float64)
        negative, positive_rest, negative_rest, leaked = (
            torch.zeros_like(positive) for _ in "1234"
        )
        for leak, grad in zip(leaks, grads[t * tasks : (t + 1) * tasks], strict=True):
            if grad is not None:
                wide = grad.double()
                above = torch.where(wide > 0, wide, 0.0)
                below = torch.where(wide > 0, 0.0, wide)  # includes NaN
                positive += above
                negative += below
                positive_rest += (1 - leak) * above
                negative_rest += (1 - leak) * below
                leaked += leak * wide
        numbers = uniform_numbers(key, offsets[t], update.numel(), update.device)
        u = _in_memory_order(numbers, update)
        chosen = torch.where(u * (positive - negative) < positive, positive_rest, negative_rest)
        # Adding zero times the sum gives NaN if any gradient is infinite or NaN, chosen or not.
        update.copy_(chosen + leaked + 0 * (positive + negative))


def _in_memory_order(numbers: Tensor, like: Tensor) -> Tensor:
    """The numbers in the shape of `like`, assigned in the memory order of its elements."""
    if torch.empty_like(like).stride() == like.stride():  # dense
        return numbers.as_strided(like.shape, like.stride())
    return numbers.view(like.shape)
