"""The operators in plain torch, on any device: the definition that the other backends are held to.

Everything is computed in float64 and rounded once.
"""
