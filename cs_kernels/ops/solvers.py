"""The methods with a compiled solver, and the constants of the solvers on all backends.

Each entry of `SOLVERS` defines an operator `<name>_weights`. The compiled module has its own copies
of the names and constants (`csrc/include/cs_kernels/solvers.h`, `solve.h`); `operands.py` checks on
import that they are equal.
"""

SOLVERS = {
    "pcgrad": "int seed, int step, Tensor? counter=None",
    "cagrad": "float c",
    "mgda": "",
    "aligned_mtl": "str scale",
    "nash_mtl": "",
    "imtl_g": "",
    "upgrad": "",
    "fair_grad": "float alpha",
    "config": "",
    "gradvac": "Tensor(a!) similarities, float rate, int seed, int step, Tensor? counter=None",
}
"""The arguments after the Gramian in the operator's schema, by method."""

ALIGNED_SCALES = ("min", "median", "rmse")
"""Aligned-MTL's choices of a common length, in the kernels' order."""

RIDGE = 1e-12
"""Added to the diagonal of the correlation matrix."""
NASH_RIDGE = 1e-10
"""The ridge of Nash-MTL and FairGrad; it keeps the weights of opposed gradients finite."""
NASH_STOP = 1e-9
"""Nash-MTL stops below this Newton decrement."""
NASH_FULL = 0.25
"""Nash-MTL takes full Newton steps below this decrement."""
SLOPE = 1e-14
"""A slope counts as zero up to this fraction of the sum of its terms' absolute values."""
STATIONARY = 1e10
"""If the shortest vector in the convex hull of the unit gradients has an inverse squared norm above
this, no direction descends for all tasks."""
ZERO_SUM = 1e-12
"""Weights cannot be scaled to sum to one if their sum is at most this fraction of the sum of their
absolute values."""
EPSILON = 2.220446049250313e-16
NO_COSINE = 1e-20
"""ConFIG's cosines count as zero if their mean square is at most this."""
FAIR_STOP = 1e-9
"""FairGrad stops once its largest relative Newton step, times the power in its equation, is below
this."""
FAIR_FULL = 0.1
"""FairGrad takes full Newton steps below this size, measured as for `FAIR_STOP`."""
FAIR_LEAST = 1e-290
"""Lower bound on FairGrad's right-hand sides, relative to the largest."""
FAIR_MOST = 1e100
"""The cap on FairGrad's inverse curvature: practically infinite for correlations of at most 1."""
MOST_SIMILAR = 1 - 1e-6
"""GradVac's largest target cosine."""
VANISHED = 1e-7
"""GradVac stops changing a gradient that has shrunk to this fraction of its length."""


def tolerances() -> dict[str, float]:
    """The constants above, by name."""
    nash = ("nash_ridge", "nash_stop", "nash_full")
    fair = ("fair_stop", "fair_full", "fair_least", "fair_most")
    gradvac = ("most_similar", "vanished")
    names = ("ridge", *nash, "slope", "stationary", "zero_sum", "epsilon", "no_cosine")
    return {name: globals()[name.upper()] for name in (*names, *fair, *gradvac)}
