"""The backend "cpu": the compiled kernels of `csrc/cpu`."""
