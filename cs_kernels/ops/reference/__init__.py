"""The operators in plain torch, on any device; they define the results of the other backends.

Everything except sketches is computed in float64 and rounded once.
"""

from types import SimpleNamespace

from cs_kernels.ops.reference import combine, phase2, sketch, solvers

operators = SimpleNamespace(**vars(phase2) | vars(combine) | vars(sketch) | vars(solvers))
