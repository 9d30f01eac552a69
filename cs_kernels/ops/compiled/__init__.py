"""What backends whose kernels take addresses share: checks, then operands, then launches."""
