"""The operators of all backends whose kernels take addresses: checks, operands, launches."""
