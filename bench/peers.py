"""What people use instead, on the same gradients."""

import copy
import random

import torch
import torchjd.aggregation
import torchjd.autojac
from torch import Tensor, nn


def textbook_pcgrad(grads: list[list[Tensor]]) -> list[Tensor]:
    """PCGrad as it goes from repository to repository.

    Gradients and masks of the parameters that have one are flattened; every task's is projected
    against the others' in random order, pair by pair; shared and unshared elements are merged
    through the mask; the result is cut up again.

    Args:
        grads: For each task, a gradient for each parameter.

    """
    flat = [torch.cat([g.flatten() for g in of_task]) for of_task in grads]
    reached = [torch.cat([torch.ones_like(g).flatten() for g in of_task]) for of_task in grads]
    shared = torch.stack(reached).prod(0).bool()
    projected = copy.deepcopy(flat)
    for g_i in projected:
        random.shuffle(flat)
        for g_j in flat:
            dot = torch.dot(g_i, g_j)
            if dot < 0:
                g_i -= dot * g_j / (g_j.norm() ** 2)
    merged = torch.zeros_like(flat[0])
    merged[shared] = torch.stack([g[shared] for g in projected]).sum(0)
    merged[~shared] = torch.stack([g[~shared] for g in projected]).sum(0)
    result, start = [], 0
    for g in grads[0]:
        result.append(merged[start : start + g.numel()].view_as(g).clone())
        start += g.numel()
    return result


def torchjd_pcgrad(matrix: Tensor) -> Tensor:
    """TorchJD's aggregator alone, on a K x N matrix that is already there."""
    result: Tensor = torchjd.aggregation.PCGrad()(matrix)
    return result


def torchjd_step(parameters: list[nn.Parameter], jacobians: list[Tensor]) -> None:
    """What its users call: from each parameter's K gradients to its `.grad`."""
    for parameter, jacobian in zip(parameters, jacobians, strict=True):
        parameter.jac = jacobian  # type: ignore[attr-defined]
        parameter.grad = None
    torchjd.autojac.jac_to_grad(parameters, torchjd.aggregation.PCGrad())
