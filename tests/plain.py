"""The paper's formulas in plain torch, independent of the package.

In float64 they check the reference; in a tensor's own dtype, their error is the yardstick for a
kernel's error.
"""

from math import prod

import torch
from layers import Kind
from torch import Tensor


def rows(tensor: Tensor, kind: Kind) -> Tensor:
    """The tensor as [O, fan-in], with one row per output channel."""
    if kind.out_channel_dim == 0:
        return tensor.flatten(1)
    return torch.cat([part.transpose(0, 1).flatten(1) for part in tensor.chunk(kind.groups)])


def strength(weight: Tensor, gamma: Tensor, var: Tensor, eps: list[float], kind: Kind) -> Tensor:
    """Connection strengths, Eq. (6) with Eq. (4)."""
    energy = (rows(weight, kind) ** 2).sum(1) / prod(kind.shape[2:])
    return torch.stack([gamma[i] ** 2 / (var[i] + eps[i]) * energy for i in range(len(gamma))])


def projected_rows(grads: Tensor, priority: Tensor, kind: Kind) -> Tensor:
    """Algorithm 1, Phase 2, with sequential replacements as in the paper; returns [O, fan-in]."""
    modified = [rows(g, kind).clone() for g in grads]
    for i in range(len(grads)):
        group = priority == i
        g_i = rows(grads[i], kind)[group]
        for j in range(len(grads)):
            g_j = rows(grads[j], kind)[group]
            dot = torch.dot(g_i.reshape(-1), g_j.reshape(-1))
            if j != i and dot < 0:
                norm = torch.dot(g_i.reshape(-1), g_i.reshape(-1))
                modified[j][group] = g_j - dot / norm * g_i
    return sum(modified[1:], modified[0])


def closed_form_rows(grads: Tensor, priority: Tensor, kind: Kind) -> Tensor:
    """The same update in the form that kernels compute, sum_j G_j + a_i G_i."""
    matrices = torch.stack([rows(g, kind) for g in grads])
    total = matrices.sum(0)
    for i, g_i in enumerate(matrices):
        group = priority == i
        flat = matrices[:, group].flatten(1)
        dots = flat @ flat[i]
        others = torch.arange(len(grads)) != i
        a_i = -(dots[others & (dots < 0)] / dots[i]).sum()
        total[group] += a_i * g_i[group]
    return total
