"""What the CUDA and the Triton backend share: plans, address tables, launches.

No operator synchronizes with the host, so a step can be captured in a CUDA graph, after an eager
one that makes the plans.
"""

from cs_kernels.ops.compiled.sketch import SketchOperators
from cs_kernels.ops.gpu.combine import GpuCombine, GradientLaunch
from cs_kernels.ops.gpu.phase2 import GpuPhase2, Phase2Launch, StrengthLaunch
from cs_kernels.ops.gpu.solvers import SolverOperators

__all__ = ["GpuOperators", "GradientLaunch", "Phase2Launch", "StrengthLaunch"]


class GpuOperators(GpuPhase2, GpuCombine, SketchOperators, SolverOperators):
    """All operators; a subclass defines the tilings and the launches."""
