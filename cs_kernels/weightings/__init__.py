"""Weights of the tasks' losses, applied before their backward passes: one file a weighting."""

from cs_kernels.weightings.dynamic_weight_average import DynamicWeightAverage
from cs_kernels.weightings.equal import EqualWeights
from cs_kernels.weightings.fixed import FixedWeights
from cs_kernels.weightings.uncertainty import UncertaintyWeights
from cs_kernels.weightings.weighting import Weighting

__all__ = [
    "DynamicWeightAverage",
    "EqualWeights",
    "FixedWeights",
    "UncertaintyWeights",
    "Weighting",
]
