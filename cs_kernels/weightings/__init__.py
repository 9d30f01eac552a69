"""Weights of the tasks' losses, applied before their backward passes: one file per weighting."""

from cs_kernels.weightings.dynamic_weight_average import DynamicWeightAverage
from cs_kernels.weightings.equal import EqualWeights
from cs_kernels.weightings.famo import FAMO
from cs_kernels.weightings.fixed import FixedWeights
from cs_kernels.weightings.gradnorm import GradNorm
from cs_kernels.weightings.random_weights import RandomWeights
from cs_kernels.weightings.smooth_tchebycheff import SmoothTchebycheff
from cs_kernels.weightings.uncertainty import UncertaintyWeights
from cs_kernels.weightings.weighting import Weighting

__all__ = [
    "FAMO",
    "DynamicWeightAverage",
    "EqualWeights",
    "FixedWeights",
    "GradNorm",
    "RandomWeights",
    "SmoothTchebycheff",
    "UncertaintyWeights",
    "Weighting",
]
