"""Plans, address tables and launches, shared by the CUDA and Triton backends.

No operator synchronizes with the host, so a step can be captured in a CUDA graph once an eager step
has made the plans.
"""

from cs_kernels.ops.gpu.combine import GpuCombine, GradientLaunch
from cs_kernels.ops.gpu.phase2 import GpuPhase2, Phase2Launch, StrengthLaunch
from cs_kernels.ops.gpu.sketch import GpuSketch
from cs_kernels.ops.gpu.solvers import SolverOperators

__all__ = ["GpuOperators", "GradientLaunch", "Phase2Launch", "StrengthLaunch"]


class GpuOperators(GpuPhase2, GpuCombine, GpuSketch, SolverOperators):
    """All operators; subclasses define the tilings and the launches."""
