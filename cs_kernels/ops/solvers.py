"""The methods with a compiled solver, and the constants of the solvers of all backends.

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
"""By name: the options in the operator's schema, after the Gramian."""

ALIGNED_SCALES = ("min", "median", "rmse")
"""The common lengths of Aligned-MTL, in the order of the kernels."""

RIDGE = 1e-12
"""Added to the diagonal of the correlations."""
NASH_RIDGE = 1e-10
"""Nash-MTL's ridge; it keeps the weights of opposed gradients finite."""
NASH_STOP = 1e-9
"""Nash-MTL's last Newton decrement."""
NASH_FULL = 0.25
"""Nash-MTL's Newton steps are full below this decrement."""
SLOPE = 1e-14
"""A slope up to this part of the sum of its absolute terms counts as zero."""
STATIONARY = 1e10
"""Above this inverse squared norm in the hull of the unit gradients, no direction descends."""
ZERO_SUM = 1e-12
"""Weights whose sum is up to this part of their absolute sum cannot sum to one."""
EPSILON = 2.220446049250313e-16
NO_COSINE = 1e-20
"""A squared length up to this one, a task, counts as zero: ConFIG has no direction."""
FAIR_STOP = 1e-9
"""FairGrad's last Newton step, relative, times the power of its equation."""
FAIR_FULL = 0.1
"""FairGrad's Newton steps are full below this one."""
FAIR_LEAST = 1e-290
"""FairGrad's least right-hand side, relative to the greatest."""
FAIR_MOST = 1e100
"""FairGrad's largest inverse curvature; beside correlations, which are at most 1, infinite."""
MOST_SIMILAR = 1 - 1e-6
"""GradVac's greatest target."""
VANISHED = 1e-7
"""GradVac changes a gradient no more that has kept only this part of its length."""


def tolerances() -> dict[str, float]:
    """The constants above, by name."""
    nash = ("nash_ridge", "nash_stop", "nash_full")
    fair = ("fair_stop", "fair_full", "fair_least", "fair_most")
    gradvac = ("most_similar", "vanished")
    names = ("ridge", *nash, "slope", "stationary", "zero_sum", "epsilon", "no_cosine")
    return {name: globals()[name.upper()] for name in (*names, *fair, *gradvac)}
