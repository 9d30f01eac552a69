"""Common implementations, as the methods are copied from repository to repository.

Flattened gradients, plain torch, the small problem on the host.
"""

import copy
import random
from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

Gradients = list[list[Tensor]]
"""For each task, a gradient for each parameter."""


def textbook_pcgrad(grads: Gradients) -> list[Tensor]:
    """PCGrad as it is copied from repository to repository.

    Gradients and masks of the parameters that have one are flattened; every task's is projected
    against the others' in random order, pair by pair; shared and unshared elements are merged
    through the mask; the result is cut up again.
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
    return _cut_up(merged, grads[0])


def _flattened(grads: Gradients) -> Tensor:
    return torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in grads])


def _cut_up(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    result, start = [], 0
    for g in like:
        result.append(vector[start : start + g.numel()].view_as(g).clone())
        start += g.numel()
    return result


def textbook_mgda(grads: Gradients) -> list[Tensor]:
    """Products pair by pair, then at most 250 Frank-Wolfe steps."""
    flat = _flattened(grads)
    tasks = len(flat)
    gram = np.zeros((tasks, tasks))
    for i in range(tasks):
        for j in range(i, tasks):
            gram[i, j] = gram[j, i] = (flat[i] * flat[j]).sum().item()
    w = np.ones(tasks) / tasks
    for _ in range(250):
        toward = np.eye(tasks)[(gram @ w).argmin()]
        difference = w - toward
        curvature = difference @ gram @ difference
        step = 0.0 if curvature <= 0 else np.clip(w @ gram @ difference / curvature, 0, 1)
        if step < 1e-5:
            break
        w = (1 - step) * w + step * toward
    merged = sum(float(w[i]) * flat[i] for i in range(tasks))
    return _cut_up(merged, grads[0])


def textbook_cagrad(grads: Gradients) -> list[Tensor]:
    """The Gramian to the host, SLSQP from the uniform weights, the direction from g_w."""
    flat = _flattened(grads)
    tasks = len(flat)
    gram = (flat @ flat.t()).cpu().numpy().astype(np.float64)
    mean = flat.mean(0)
    radius = 0.4 * np.sqrt(gram.mean() + 1e-8)
    along = gram.mean(1)

    def objective(w: np.ndarray) -> float:
        return float(w @ along + radius * np.sqrt(w @ gram @ w + 1e-8))

    w = scipy.optimize.minimize(
        objective,
        np.ones(tasks) / tasks,
        bounds=[(0, 1)] * tasks,
        constraints={"type": "eq", "fun": lambda x: 1 - x.sum()},
    ).x
    g_w = (flat * torch.tensor(w, dtype=flat.dtype).unsqueeze(1)).sum(0)
    return _cut_up(mean + radius / (g_w.norm() + 1e-8) * g_w, grads[0])


def textbook_aligned_mtl(grads: Gradients) -> list[Tensor]:
    """An eigendecomposition of the Gramian; the balanced gradients, then their sum."""
    flat = _flattened(grads)
    values, vectors = torch.linalg.eigh(flat @ flat.t())
    kept = values > values.max() * len(flat) * torch.finfo(flat.dtype).eps
    values, vectors = values[kept], vectors[:, kept]
    balance = values.min().sqrt() * vectors @ torch.diag(values.rsqrt()) @ vectors.t()
    return _cut_up((balance.sum(0).unsqueeze(0) @ flat).squeeze(0), grads[0])


def textbook_imtl_g(grads: Gradients) -> list[Tensor]:
    """The closed form with differences of gradients and of unit gradients."""
    flat = _flattened(grads)
    unit = flat / flat.norm(dim=1, keepdim=True)
    d = flat[0:1] - flat[1:]
    u = unit[0:1] - unit[1:]
    rest = flat[0:1] @ u.t() @ torch.linalg.inv(d @ u.t())
    weights = torch.cat([1 - rest.sum(1, keepdim=True), rest], dim=1).squeeze(0)
    return _cut_up(sum(weights[i] * flat[i] for i in range(len(flat))), grads[0])


def textbook_graddrop(grads: Gradients) -> list[Tensor]:
    """Sign purity and masks, task by task."""
    flat = _flattened(grads)
    purity = 0.5 * (1 + flat.sum(0) / (flat.abs().sum(0) + 1e-8))
    uniform = torch.rand_like(purity)
    merged = torch.zeros_like(flat[0])
    for g in flat:
        mask = (purity > uniform) * (g > 0) + (purity < uniform) * (g < 0)
        merged += mask * g
    return _cut_up(merged, grads[0])


TEXTBOOK: dict[str, Callable[[Gradients], list[Tensor]]] = {
    "PCGrad": textbook_pcgrad,
    "CAGrad": textbook_cagrad,
    "MGDA": textbook_mgda,
    "AlignedMTL": textbook_aligned_mtl,
    "IMTLG": textbook_imtl_g,
    "GradDrop": textbook_graddrop,
}
