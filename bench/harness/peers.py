"""The peers: TorchJD, and the loops that many repositories copy.

TorchJD's Nash-MTL is the authors' own code, and UPGrad was published with TorchJD. The copied
loops, called "textbook", flatten the gradients in plain torch; MGDA and CAGrad solve the K x K
problem on the host.
"""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Rows = list[list[Tensor]]
"""For each task, a gradient for each parameter."""


def flattened(rows: Rows) -> Tensor:
    """The K x N matrix."""
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def stacked(rows: Rows) -> list[Tensor]:
    """TorchJD's `.jac` of each parameter: its K gradients as one tensor."""
    return [torch.stack(of_parameter) for of_parameter in zip(*rows, strict=True)]


def _pcgrad(rows: Rows) -> Tensor:
    """Projects pair by pair in random order; masks mark the shared elements."""
    flat = [torch.cat([g.flatten() for g in row]) for row in rows]
    reached = [torch.cat([torch.ones_like(g).flatten() for g in row]) for row in rows]
    shared = torch.stack(reached).prod(0).bool()
    projected = copy.deepcopy(flat)
    for g_i in projected:
        random.shuffle(flat)
        for g_j in flat:
            dot = torch.dot(g_i, g_j)
            if dot < 0:
                g_i -= dot * g_j / (g_j.norm() ** 2)
    merged = torch.zeros_like(flat[0])
    for part in (shared, ~shared):
        merged[part] = torch.stack([g[part] for g in projected]).sum(0)
    return merged


def _mgda(rows: Rows) -> Tensor:
    """Computes products pair by pair, then makes at most 250 Frank-Wolfe steps."""
    flat = flattened(rows)
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
    return sum(float(w[i]) * flat[i] for i in range(tasks))


def _cagrad(rows: Rows) -> Tensor:
    """Copies the Gramian to the host, runs SLSQP from uniform weights, and corrects along g_w."""
    import scipy.optimize

    flat = flattened(rows)
    tasks = len(flat)
    gram = (flat @ flat.t()).cpu().numpy().astype(np.float64)
    radius = 0.4 * np.sqrt(gram.mean() + 1e-8)
    w = scipy.optimize.minimize(
        lambda w: float(w @ gram.mean(1) + radius * np.sqrt(w @ gram @ w + 1e-8)),
        np.ones(tasks) / tasks,
        bounds=[(0, 1)] * tasks,
        constraints={"type": "eq", "fun": lambda x: 1 - x.sum()},
    ).x
    g_w = (flat * torch.tensor(w, dtype=flat.dtype).unsqueeze(1)).sum(0)
    return flat.mean(0) + radius / (g_w.norm() + 1e-8) * g_w


def _aligned_mtl(rows: Rows) -> Tensor:
    """Decomposes the Gramian into eigenvectors, balances the gradients, and adds them."""
    flat = flattened(rows)
    values, vectors = torch.linalg.eigh(flat @ flat.t())
    kept = values > values.max() * len(flat) * torch.finfo(flat.dtype).eps
    values, vectors = values[kept], vectors[:, kept]
    balance = values.min().sqrt() * vectors @ torch.diag(values.rsqrt()) @ vectors.t()
    return (balance.sum(0).unsqueeze(0) @ flat).squeeze(0)


def _imtl_g(rows: Rows) -> Tensor:
    """Solves the closed form with differences of gradients and of unit gradients."""
    flat = flattened(rows)
    unit = flat / flat.norm(dim=1, keepdim=True)
    d, u = flat[0:1] - flat[1:], unit[0:1] - unit[1:]
    rest = flat[0:1] @ u.t() @ torch.linalg.inv(d @ u.t())
    weights = torch.cat([1 - rest.sum(1, keepdim=True), rest], dim=1).squeeze(0)
    return sum(weights[i] * flat[i] for i in range(len(flat)))


def _graddrop(rows: Rows) -> Tensor:
    """Computes the sign purity, then masks the gradients task by task."""
    flat = flattened(rows)
    purity = 0.5 * (1 + flat.sum(0) / (flat.abs().sum(0) + 1e-8))
    uniform = torch.rand_like(purity)
    merged = torch.zeros_like(flat[0])
    for g in flat:
        merged += ((purity > uniform) * (g > 0) + (purity < uniform) * (g < 0)) * g
    return merged


_TEXTBOOK: dict[str, Callable[[Rows], Tensor]] = {
    "PCGrad": _pcgrad,
    "CAGrad": _cagrad,
    "MGDA": _mgda,
    "AlignedMTL": _aligned_mtl,
    "IMTLG": _imtl_g,
    "GradDrop": _graddrop,
}


def textbook(name: str, rows: Rows) -> list[Tensor]:
    """The update of a textbook method, one tensor per parameter."""
    parts = _TEXTBOOK[name](rows).split([g.numel() for g in rows[0]])
    return [part.view_as(g).clone() for part, g in zip(parts, rows[0], strict=True)]


def aggregator(name: str, tasks: int) -> Any:
    """TorchJD's method, with the same options as our defaults."""
    from torchjd import aggregation

    options = {"CAGrad": (0.4,), "FairGrad": (1.0,), "NashMTL": (tasks,)}
    return getattr(aggregation, name)(*options.get(name, ()))


def torchjd_step(
    method: Any, parameters: list[nn.Parameter], jacobians: list[Tensor], **options: bool
) -> None:
    """TorchJD as its users call it: from the `.jac` of all parameters to their `.grad`."""
    import torchjd.autojac

    for parameter, jacobian in zip(parameters, jacobians, strict=True):
        parameter.jac = jacobian  # type: ignore[attr-defined]
        parameter.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchjd.autojac.jac_to_grad(parameters, method, **options)


def peers(
    name: str,
    parameters: list[nn.Parameter],
    rows: Rows,
    matrix: Tensor | None = None,
    *,
    prepared: bool = False,
) -> dict[str, Callable[[], object]]:
    """The steps of TorchJD and of the textbook loops for these gradients, where they exist.

    If `prepared`, TorchJD's step starts from existing `.jac` fields and uses its default options.
    Otherwise it starts from separate gradients and uses its faster option, which computes the
    Gramian without the whole matrix. "TorchJD matrix" is its method alone, on an existing K x N
    matrix.
    """
    found: dict[str, Callable[[], object]] = {}
    try:
        method = aggregator(name, len(rows))
        from torchjd.aggregation import GramianWeightedAggregator as Gramian
    except ImportError:  # TorchJD or a dependency of its method is missing.
        pass
    else:
        faster = {"optimize_gramian_computation": True} if isinstance(method, Gramian) else {}
        jacobians = stacked(rows) if prepared else None
        matrix = flattened(rows) if matrix is None else matrix

        def whole() -> None:
            of_step = jacobians or stacked(rows)
            torchjd_step(method, parameters, of_step, **({} if prepared else faster))

        def on_matrix() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                method(matrix)

        found = {"TorchJD step": whole, "TorchJD matrix": on_matrix}
    if name in _TEXTBOOK:
        found["textbook"] = lambda: textbook(name, rows)
    return found
