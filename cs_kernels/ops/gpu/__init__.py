"""The operators on a GPU, for kernels in CUDA and in Triton.

There is no host synchronization between the gradients and the update. A step can be captured in a
CUDA graph after an eager one.
"""

from cs_kernels.ops.gpu.combine import GpuCombine, GradientLaunch
from cs_kernels.ops.gpu.phase2 import GpuPhase2, Phase2Launch, StrengthLaunch
from cs_kernels.ops.gpu.solvers import SolverOperators

__all__ = ["GpuOperators", "GradientLaunch", "Phase2Launch", "StrengthLaunch"]


class GpuOperators(GpuPhase2, GpuCombine, SolverOperators):
    """All operators; a subclass defines tilings and launches."""
