"""The backend "cpu": the compiled kernels of `csrc/cpu`."""

from cs_kernels.ops.cpu.combine import combine_, drop_signs_, gramian
from cs_kernels.ops.cpu.phase2 import (
    channel_energies,
    connection_strength,
    energy_priority,
    phase2_apply_,
    phase2_products_,
    phase2_update_,
    project_conflicts_,
    task_priority,
)
from cs_kernels.ops.cpu.solvers import solve

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
