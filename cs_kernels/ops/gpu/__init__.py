"""The operators on a GPU, for kernels in CUDA and in Triton.

There is no host synchronization between the gradients and the update. A step can be captured in a
CUDA graph after an eager one.
"""

from cs_kernels.ops.gpu.combine import CombineOperators, GradientLaunch
from cs_kernels.ops.gpu.phase2 import Phase2Launch, Phase2Operators
from cs_kernels.ops.gpu.solvers import SolverOperators

__all__ = ["GpuOperators", "GradientLaunch", "Phase2Launch"]


class GpuOperators(Phase2Operators, CombineOperators, SolverOperators):
    """All operators; a subclass defines tilings and launches."""
