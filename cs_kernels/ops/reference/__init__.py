"""The operators in plain torch, on any device: the definition for the other backends.

Everything is computed in float64 and rounded once.
"""
