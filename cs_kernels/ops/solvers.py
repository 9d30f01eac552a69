"""The methods with a compiled solver, and the numbers that every backend's solvers share.

A line of `SOLVERS` makes an operator `<name>_weights`. The compiled module has the same tables
(`csrc/include/cs_kernels/solvers.h`, `solve.h`), which are compared when it is imported.
"""

from struct import pack, unpack

from cs_kernels.ops.random import random_key

SOLVERS = {
    "pcgrad": "int seed, int step",
    "cagrad": "float c",
    "mgda": "",
    "aligned_mtl": "str scale",
    "nash_mtl": "",
    "imtl_g": "",
    "upgrad": "",
}
"""By name: the options in the operator's schema, beside the Gramian."""

ALIGNED_SCALES = ("min", "median", "rmse")
"""The common lengths of Aligned-MTL, in the order of the kernels' numbers for them."""

RIDGE = 1e-12
"""On the diagonal of the correlations."""
NASH_RIDGE = 1e-10
"""Nash-MTL's: keeps the weights of opposed gradients finite."""
NASH_STOP = 1e-9
"""Its last Newton decrement."""
SLOPE = 1e-14
"""Part of the sum of absolute terms up to which a slope is zero."""
STATIONARY = 1e10
"""Above this inverse squared norm in the hull of the unit gradients, no direction descends."""
ZERO_SUM = 1e-12
"""Part of the sum of absolute weights up to which they cannot sum to one."""
EPSILON = 2.220446049250313e-16


def tolerances() -> dict[str, float]:
    """The numbers above, by name."""
    names = ("ridge", "nash_ridge", "nash_stop", "slope", "stationary", "zero_sum", "epsilon")
    return {name: globals()[name.upper()] for name in names}


def option_word(*options: int | float | str) -> int:
    """The options of a solver in the 64 bits that kernels take: a key, a number or a scale.

    Raises:
        ValueError: The scale is not one of `ALIGNED_SCALES`.
        TypeError: They are of another kind.

    """
    match options:
        case (str() as scale,):
            if scale not in ALIGNED_SCALES:
                raise ValueError(f"scale must be one of {ALIGNED_SCALES}, got {scale!r}")
            return ALIGNED_SCALES.index(scale)
        case (float() as number,):
            word: int = unpack("Q", pack("d", number))[0]
            return word
        case (int() as seed, int() as step):
            return random_key(seed, step)
        case ():
            return 0
    raise TypeError(f"options must be none, a scale, a number or a seed and a step, got {options}")
