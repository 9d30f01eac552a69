"""Task weights [..., K] from Gramians [..., K, K], in plain torch.

Most solvers work on the correlations C_ij = G_ij / (d_i d_j), where d_i = |g_i|, and scale the
unknowns by d, so gradients of very different lengths are no harder to solve for. Except in ConFIG
and IMTL-G, a ridge on the diagonal makes C regular. A non-finite Gramian gives NaN weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cs_kernels.ops.checks import check_solver
from cs_kernels.ops.operands import Option, checked_options
from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.ops.solvers import (
    EPSILON,
    FAIR_FULL,
    FAIR_LEAST,
    FAIR_MOST,
    FAIR_STOP,
    MOST_SIMILAR,
    NASH_FULL,
    NASH_RIDGE,
    NASH_STOP,
    NO_COSINE,
    RIDGE,
    SLOPE,
    SOLVERS,
    STATIONARY,
    VANISHED,
    ZERO_SUM,
)


def _each(gramian: Tensor, solve: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Calls solve(gramian, index) for each Gramian, in float64 on the CPU."""
    tasks = gramian.shape[-1]
    flat = gramian.detach().to("cpu", torch.float64).reshape(-1, tasks, tasks)
    weights = torch.empty(flat.shape[:-1], dtype=torch.float64)
    for n, g in enumerate(flat):
        weights[n] = solve(g, n) if g.isfinite().all() else torch.nan
    return weights.reshape(gramian.shape[:-1]).to(gramian.device)


def _correlations(g: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """For tasks with a nonzero gradient: the correlations C, the lengths d and the indices."""
    nonzero = (g.diagonal() > 0).nonzero().flatten()
    length = g.diagonal()[nonzero].sqrt()
    c = g[nonzero][:, nonzero] / length.unsqueeze(1) / length
    c.clamp_(-1, 1)  # With 16-bit gradients, rounding errors of the products can exceed the ridge.
    c.fill_diagonal_(1 + ridge)
    return c, length, nonzero


def _eigen(g: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; rows are sorted by size to keep small eigenvalues accurate."""
    order = g.diagonal().argsort()
    values, vectors = torch.linalg.eigh(g[order][:, order], UPLO="U")
    return values, vectors[order.argsort()]


def _non_negative(c: Tensor, f: Tensor) -> Tensor:
    """The minimizer of 1/2 x'Cx - f'x over x >= 0, by Lawson and Hanson's active-set method."""
    x = torch.zeros_like(f)
    free = torch.zeros_like(f, dtype=torch.bool)
    tried = torch.zeros_like(free)  # freed and immediately blocked since x last changed
    for _ in range(8 * len(f) + 16):
        slope = f - c @ x
        rises = slope > SLOPE * (f.abs() + c.abs() @ x)
        candidates = torch.where(rises & ~free & ~tried, slope, -torch.inf)
        if len(f) == 0 or candidates.max() == -torch.inf:
            break
        entered = int(candidates.argmax())
        free[entered] = True
        moved = False
        for _ in range(len(f) + 1):
            z = torch.zeros_like(x)
            z[free] = torch.linalg.solve(c[free][:, free], f[free])
            reach = torch.where(free & (z <= 0), torch.where(x > 0, x / (x - z), 0.0), torch.inf)
            fraction, blocking = reach.min(0)
            moved = moved or bool(fraction > 0)
            if fraction == torch.inf:
                x = z
                break
            x = x + fraction * (z - x)
            x[blocking] = 0
            free[blocking] = False
        if moved:
            tried.zero_()
        else:
            tried[entered] = True
    return x


def random_order(key: int, tasks: int, i: int) -> list[int]:
    """The order in which the other tasks are compared with task i: a Fisher-Yates shuffle."""
    others = [j for j in range(tasks) if j != i]
    order = []
    while others:
        k = splitmix64((key + i * tasks + len(others)) % (1 << 64)) % len(others)
        order.append(others[k])
        others[k] = others[-1]
        others.pop()
    return order


def pcgrad_weights(gramian: Tensor, seed: int, step: int, counter: Tensor | None = None) -> Tensor:
    """PCGrad: projects each gradient off the conflicting original gradients, in random order."""
    key = random_key(seed, step, counter)

    def solve(g: Tensor, n: int) -> Tensor:
        gramian_key = splitmix64((key + n) % (1 << 64))
        weights = torch.zeros(len(g), dtype=torch.float64)
        for i in range(len(g)):
            own = torch.zeros_like(weights)
            own[i] = 1
            for j in random_order(gramian_key, len(g), i):
                conflict = own @ g[j]
                if conflict < 0 and g[j, j] > 0:
                    own[j] -= conflict / g[j, j]
            weights += own
        return weights

    return _each(gramian, solve)


def gradvac_weights(
    gramian: Tensor,
    similarities: Tensor,
    rate: float,
    seed: int,
    step: int,
    counter: Tensor | None = None,
) -> Tensor:
    """GradVac: turns each gradient toward dissimilar original gradients, in random order.

    If the cosine of two gradients is below its target, enough of the other original gradient is
    added to reach the target. The targets, `similarities`, are moving averages of the cosines, in
    which the new cosine has weight `rate`.
    """
    key = random_key(seed, step, counter)
    targets = similarities.cpu().reshape(-1, *gramian.shape[-2:])

    def solve(g: Tensor, n: int) -> Tensor:
        gramian_key = splitmix64((key + n) % (1 << 64))
        lengths = g.diagonal().clamp(min=0).sqrt()
        weights = torch.zeros(len(g), dtype=torch.float64)
        for i in range(len(g)):
            own = torch.zeros_like(weights)
            own[i] = 1
            length = lengths[i]
            for j in random_order(gramian_key, len(g), i):
                if lengths[j] == 0 or length <= VANISHED * lengths[i]:
                    continue
                cosine = (own @ g[j] / length / lengths[j]).clamp(-1, 1)
                target = targets[n, i, j].clamp(max=MOST_SIMILAR)
                if cosine < target:
                    # Keeps the component orthogonal to g_j and adjusts the parallel one to reach
                    # the target angle.
                    across = ((1 - cosine) * (1 + cosine)).sqrt()
                    sine = ((1 - target) * (1 + target)).sqrt()
                    own[j] += length / lengths[j] * (target * across / sine - cosine)
                    length = length * across / sine
                targets[n, i, j] += rate * (cosine - targets[n, i, j])
            weights += own
        return weights

    weights = _each(gramian, solve)
    similarities.copy_(targets.reshape(similarities.shape))
    return weights


def mgda_weights(gramian: Tensor) -> Tensor:
    """MGDA: the weights are x / sum x, where x >= 0 minimizes 1/2 x'Gx - 1'x."""

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, RIDGE)
        if len(nonzero) < len(g):
            return (g.diagonal() <= 0) / (len(g) - len(nonzero))
        relative = length.min() / length
        x = _non_negative(c, relative) * relative
        return x / x.sum()

    return _each(gramian, solve)


def upgrad_weights(gramian: Tensor) -> Tensor:
    """UPGrad: the mean of the gradients, each projected onto the dual cone of all."""

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, RIDGE)
        weights = torch.full((len(g),), 1 / len(g), dtype=torch.float64)
        for i in range(len(nonzero)):
            weights[nonzero] += _non_negative(c, -c[i]) * length[i] / length / len(g)
        return weights

    return _each(gramian, solve)


def cagrad_weights(gramian: Tensor, c: float) -> Tensor:
    """CAGrad: the largest mu such that all g_i.d >= mu for some d with |d - g_0| <= c |g_0|.

    If no direction descends for all tasks, mu is at most zero.
    """

    def solve(g: Tensor, n: int) -> Tensor:
        weights = torch.full((len(g),), 1 / len(g), dtype=torch.float64)
        along = g.mean(1)
        radius = c * along.mean().clamp(min=0).sqrt()
        correlations, length, nonzero = _correlations(g, RIDGE)
        if radius <= 0 or len(nonzero) == 0:
            return weights
        inverse = _non_negative(correlations, torch.ones_like(length)).sum()
        stationary = len(nonzero) < len(g) or inverse > STATIONARY
        along = along[nonzero]
        low, high = along.min(), (along + radius * length).min()
        if stationary:
            high = high.clamp(max=0)

        def correction(mu: Tensor) -> tuple[Tensor, Tensor]:
            f = (mu - along) / length
            x = _non_negative(correlations, f)
            return x, (f @ x).clamp(min=0).sqrt()

        x, size = correction(high)
        if size > radius:
            for _ in range(100):
                middle = (low + high) / 2
                x, size = correction(middle)
                low, high = (low, middle) if size > radius else (middle, high)
        weights[nonzero] += x / length
        return weights

    return _each(gramian, solve)


def _nash_length(shares: Tensor, decrement: Tensor) -> Tensor:
    """The length of a Newton step, `shares * v`, that roughly minimizes Nash-MTL's objective.

    Uses a damped Newton method in one dimension, which keeps every 1 - length * shares positive.
    """
    # step'C v and step'C step, because (C + diag(v^-2)) step = slope = C v - 1 / v.
    linear = decrement**2 + shares.sum()
    quadratic = (decrement**2 - shares.square().sum()).clamp(min=0)
    length = 1 / (1 + decrement)
    for _ in range(8):
        terms = shares / (1 - length * shares)
        slope = terms.sum() + length * quadratic - linear
        curvature = terms.square().sum() + quadratic
        remainder = slope.abs() / curvature.sqrt()
        length = length - slope / curvature * (1 if remainder < NASH_FULL else 1 / (1 + remainder))
        if remainder < NASH_FULL:
            break
    return length


def _bargain(c: Tensor) -> Tensor:
    """Solves C v = 1 / v, i.e. minimizes 1/2 v'Cv - sum log v_i, by a damped Newton method."""
    v = torch.ones(len(c), dtype=torch.float64)
    before = torch.tensor(1.0)
    for _ in range(100):
        slope = c @ v - 1 / v
        step = torch.linalg.solve(c + torch.diag(v**-2), slope)
        decrement = (slope @ step).clamp(min=0).sqrt()
        v = v - step * (1 if decrement < NASH_FULL else _nash_length(step / v, decrement))
        # Full Newton steps roughly square the decrement. When it no longer halves, only rounding
        # error is left: stop.
        if decrement < NASH_STOP or (before < NASH_FULL and not decrement < before / 2):
            break
        before = decrement
    return v


def nash_mtl_weights(gramian: Tensor) -> Tensor:
    """NashMTL: the a > 0 with G a = 1 / a."""

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, NASH_RIDGE)
        weights = torch.zeros(len(g), dtype=torch.float64)
        weights[nonzero] = _bargain(c) / length
        return weights

    return _each(gramian, solve)


def _fair_length(
    shares: Tensor, products: Tensor, power: float, linear: Tensor, quadratic: Tensor
) -> Tensor:
    """The length of a Newton step that roughly minimizes FairGrad's objective along the step.

    At the minimum, 0 = -linear + length * quadratic + sum products * shares * left^-power, where
    left = 1 - length * shares.
    """
    greatest = shares.max()
    low, high = torch.zeros(()), 1 / greatest if greatest > 0 else torch.tensor(torch.inf)
    length = (0.9 * high).clamp(max=1.0)
    for _ in range(30):
        left = 1 - length * shares
        terms = products * shares * left**-power
        slope = terms.sum() + length * quadratic - linear
        if slope.abs() <= 0.1 * linear:
            break
        low, high = (low, length) if slope > 0 else (length, high)
        length = length - slope / (power * (terms * shares / left).sum() + quadratic)
        if not low < length < high:
            length = (low + high) / 2 if high < torch.inf else 2 * low
    return length


def fair_grad_weights(gramian: Tensor, alpha: float) -> Tensor:
    """FairGrad: the w > 0 with G w = w^-p, where p = 1 / alpha.

    Let d be the gradients' lengths and C their cosines. With w = v / d, this becomes C v = b v^-p,
    where b = d^(p-1). For p >= 1, the unknown is v, which minimizes
    1/2 v'Cv + sum b v^(1-p) / (p-1). For p < 1, the unknown is s = C v, which minimizes
    1/2 s'C^-1 s + sum k s^(1-alpha) / (alpha-1), where k = b^alpha; its Newton steps need no
    inverse. Both objectives are barriers, which grow without bound as an unknown approaches zero,
    and suit Newton's method. NashMTL's solution is a feasible start for both.
    """
    solves_s = alpha > 1  # whether the unknown is s; otherwise, it is v
    power = alpha if solves_s else 1 / alpha

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, NASH_RIDGE)
        weights = torch.zeros(len(g), dtype=torch.float64)
        if len(nonzero) == 0:
            return weights
        v = _bargain(c)
        s = 1 / v
        # Lengths are relative to the length with the greatest b.
        unit = length.min() if solves_s else length.max()
        b = (length / unit) ** (1 - alpha if solves_s else power - 1)
        b = b.clamp(min=FAIR_LEAST)
        # Starts at the best multiple of NashMTL's solution.
        scale = ((b * (s if solves_s else v) ** (1 - power)).mean()) ** (1 / (1 + power))
        v, s = v * scale, s * scale
        before = torch.inf
        for _ in range(100):
            x, y = (s, v) if solves_s else (v, s)
            target = b * x**-power  # the value that y should have
            inverse = (x / (power * target)).clamp(max=FAIR_MOST)
            diagonal = inverse if solves_s else power * target / x
            slope = (target - y) * (diagonal if solves_s else 1)
            step = torch.linalg.solve(c + torch.diag(diagonal), slope)
            image = c @ step
            shares = -(image if solves_s else step) / x
            largest = power * float(shares.abs().max())
            stride: Tensor | float = 1.0
            if largest >= FAIR_FULL:
                stride = _fair_length(shares, target * x, power, -(s @ step), image @ step)
            v, s = v + stride * step, s + stride * image
            if not largest >= FAIR_STOP or (before < FAIR_FULL and not largest < before / 2):
                break
            before = largest
        v = b * s**-power if solves_s else v
        weights[nonzero] = unit ** ((1 / alpha - 1) / (1 / alpha + 1)) * v / length
        return weights

    return _each(gramian, solve)


def _equal_cosines(c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns y = C^+ 1, and C y, which is all ones if C is regular."""
    values, vectors = _eigen(c)
    significant = values > 8 * values.max() * len(c) * EPSILON
    values, vectors = values[significant], vectors[:, significant]
    return vectors @ (vectors.sum(0) / values), vectors @ vectors.sum(0)


def config_weights(gramian: Tensor) -> Tensor:
    """ConFIG: the update has the same cosine to every gradient.

    The update's length is the sum of the gradients' components along it. If no direction has equal
    cosines, the least-squares direction is used; if it is zero, the weights are zero.
    """

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, 0.0)
        weights = torch.zeros(len(g), dtype=torch.float64)
        if len(nonzero) == 0:
            return weights
        y, cosines = _equal_cosines(c)
        if cosines.square().sum() > NO_COSINE * len(nonzero):
            weights[nonzero] = (length @ cosines) / (y @ cosines) * y / length
        return weights

    return _each(gramian, solve)


def imtl_g_weights(gramian: Tensor) -> Tensor:
    """IMTL-G: the update has equal components along all gradients; the weights sum to one."""

    def solve(g: Tensor, n: int) -> Tensor:
        c, length, nonzero = _correlations(g, 0.0)
        weights = torch.zeros(len(g), dtype=torch.float64)
        if len(nonzero) == 0:
            return weights
        y = _equal_cosines(c)[0] * length[0] / length
        if y.sum().abs() > ZERO_SUM * y.abs().sum():
            weights[nonzero] = y / y.sum()
        return weights

    return _each(gramian, solve)


def aligned_mtl_weights(gramian: Tensor, scale: str) -> Tensor:
    """Aligned-MTL: the sum of the gradients after their principal components get equal lengths."""
    lengths: dict[str, Callable[[Tensor], Tensor]] = {
        "min": Tensor.min,
        "median": Tensor.median,
        "rmse": Tensor.mean,
    }
    length = lengths[scale]

    def solve(g: Tensor, n: int) -> Tensor:
        values, vectors = _eigen(g)
        significant = values > values.max() * len(g) * EPSILON
        if not significant.any():
            return torch.ones(len(g), dtype=torch.float64)
        values, vectors = values[significant], vectors[:, significant]
        weights: Tensor = vectors @ (vectors.sum(0) * (length(values) / values).sqrt())
        return weights

    return _each(gramian, solve)


_WEIGHTS: dict[str, Callable[..., Tensor]] = {
    name: globals()[f"{name}_weights"] for name in SOLVERS
}


def solve(name: str, gramian: Tensor, *options: Option) -> Tensor:
    """Computes the operator `<name>_weights`."""
    check_solver(name, gramian, *options)
    checked_options(gramian, *options)
    return _WEIGHTS[name](gramian, *options)
