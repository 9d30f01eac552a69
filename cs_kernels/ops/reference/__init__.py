"""The operators in plain torch, on any device: the definition for the other backends.

Everything is computed in float64 and rounded once.
"""

from torch import Tensor

from cs_kernels.ops.reference import solvers
from cs_kernels.ops.reference.combine import combine_, drop_signs_, gramian
from cs_kernels.ops.reference.phase2 import (
    channel_energies,
    connection_strength,
    energy_priority,
    phase2_apply_,
    phase2_products_,
    phase2_update_,
    project_conflicts_,
    task_priority,
)

__all__ = [
    "channel_energies",
    "combine_",
    "connection_strength",
    "drop_signs_",
    "energy_priority",
    "gramian",
    "phase2_apply_",
    "phase2_products_",
    "phase2_update_",
    "project_conflicts_",
    "solve",
    "task_priority",
]


def solve(name: str, gramian: Tensor, *options: object) -> Tensor:
    """The operator `<name>_weights`."""
    weights: Tensor = getattr(solvers, f"{name}_weights")(gramian, *options)
    return weights
