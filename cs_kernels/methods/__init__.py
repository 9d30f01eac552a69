"""What becomes of K gradients: one file a method."""

from cs_kernels.methods.connection_strength import ConnectionStrength
from cs_kernels.methods.method import Method
from cs_kernels.methods.sum import Sum

__all__ = ["ConnectionStrength", "Method", "Sum"]
