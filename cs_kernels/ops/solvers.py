"""The methods with a compiled solver, and the solvers' constants on all backends.

An entry of `SOLVERS` defines an operator `<name>_weights`. The compiled module has the same tables
(`csrc/include/cs_kernels/solvers.h`, `solve.h`); its import compares them.
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
"""By name: what follows the Gramian in the operator's schema."""

ALIGNED_SCALES = ("min", "median", "rmse")
"""Aligned-MTL's choices of a common length, in the kernels' order."""

RIDGE = 1e-12
"""Added to the diagonal of the correlation matrix."""
NASH_RIDGE = 1e-10
"""Nash-MTL's ridge; it keeps the weights of opposed gradients finite."""
NASH_STOP = 1e-9
"""Nash-MTL stops below this Newton decrement."""
NASH_FULL = 0.25
"""Nash-MTL's Newton steps are full below this decrement."""
SLOPE = 1e-14
"""A slope counts as zero up to this fraction of the sum of its absolute terms."""
STATIONARY = 1e10
"""If the smallest vector in the hull of the unit gradients has a larger inverse squared norm than
this, no direction descends for all tasks."""
ZERO_SUM = 1e-12
"""Weights cannot be scaled to sum to one if their sum is at most this fraction of the sum of their
absolute values."""
EPSILON = 2.220446049250313e-16
NO_COSINE = 1e-20
"""ConFIG has no direction if its squared length per task is at most this."""
FAIR_STOP = 1e-9
"""FairGrad stops below this relative Newton step, times the power in its equation."""
FAIR_FULL = 0.1
"""FairGrad's Newton steps are full below this relative step."""
FAIR_LEAST = 1e-290
"""FairGrad's smallest right-hand side, relative to the greatest."""
FAIR_MOST = 1e100
"""FairGrad's largest inverse curvature: as good as infinite beside correlations of at most 1."""
MOST_SIMILAR = 1 - 1e-6
"""GradVac's greatest target cosine."""
VANISHED = 1e-7
"""GradVac stops changing a gradient that has shrunk to this fraction of its length."""


def tolerances() -> dict[str, float]:
    """The constants above, by name."""
    nash = ("nash_ridge", "nash_stop", "nash_full")
    fair = ("fair_stop", "fair_full", "fair_least", "fair_most")
    gradvac = ("most_similar", "vanished")
    names = ("ridge", *nash, "slope", "stationary", "zero_sum", "epsilon", "no_cosine")
    return {name: globals()[name.upper()] for name in (*names, *fair, *gradvac)}
