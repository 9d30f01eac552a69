"""The operators of every backend whose kernels take addresses: checks first, then its launches."""
