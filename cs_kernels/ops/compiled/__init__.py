"""Shared by all backends whose kernels take addresses: checks, then operands, then launches."""
