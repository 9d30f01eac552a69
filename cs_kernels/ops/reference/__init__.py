"""The operators in plain torch, on any device: the definition for the other backends.

Everything but sketches is computed in float64 and rounded once.
"""

from types import SimpleNamespace

from cs_kernels.ops.reference import combine, phase2, sketch, solvers

operators = SimpleNamespace(**vars(phase2) | vars(combine) | vars(sketch) | vars(solvers))
