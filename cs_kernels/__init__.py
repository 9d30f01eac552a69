"""Gradient surgery for PyTorch: combines the gradients of several losses.

Start at `MultiTaskOptimizer`, or at `GradientBalancer` to keep your own training loop. The name
stands for connection strength. This is an independent implementation of the paper "Quantifying Task
Priority for Multi-Task Optimization" (CVPR 2024).
"""

from cs_kernels import functional, nn
from cs_kernels.balancer import GradientBalancer
from cs_kernels.engine.captured import CapturedStep
from cs_kernels.gradients import TaskGradients
from cs_kernels.methods import (
    DBMTL,
    IMTLG,
    MGDA,
    NTKMTL,
    SAGO,
    AlignedMTL,
    CAGrad,
    Clipped,
    ConFIG,
    ConnectionStrength,
    FairGrad,
    GradDrop,
    GradVac,
    GramianMethod,
    Method,
    NashMTL,
    PCGrad,
    Protect,
    Sum,
    UPGrad,
)
from cs_kernels.monitor.balance import BalanceReport
from cs_kernels.monitor.conflicts import Conflicts
from cs_kernels.monitor.report import Report
from cs_kernels.ops import available_backends, use_backend
from cs_kernels.optimizer import MultiTaskOptimizer
from cs_kernels.schedules import Joint, Mixed, Schedule, Sequential, Switch
from cs_kernels.step import Step
from cs_kernels.trunk.layers import Coverage, Layer, Layout
from cs_kernels.weightings import (
    FAMO,
    DynamicWeightAverage,
    EqualWeights,
    FixedWeights,
    GradNorm,
    RandomWeights,
    SmoothTchebycheff,
    UncertaintyWeights,
    Weighting,
)

__version__ = "0.1.0"

__all__ = [
    "DBMTL",
    "FAMO",
    "IMTLG",
    "MGDA",
    "NTKMTL",
    "SAGO",
    "AlignedMTL",
    "BalanceReport",
    "CAGrad",
    "CapturedStep",
    "Clipped",
    "ConFIG",
    "Conflicts",
    "ConnectionStrength",
    "Coverage",
    "DynamicWeightAverage",
    "EqualWeights",
    "FairGrad",
    "FixedWeights",
    "GradDrop",
    "GradNorm",
    "GradVac",
    "GradientBalancer",
    "GramianMethod",
    "Joint",
    "Layer",
    "Layout",
    "Method",
    "Mixed",
    "MultiTaskOptimizer",
    "NashMTL",
    "PCGrad",
    "Protect",
    "RandomWeights",
    "Report",
    "Schedule",
    "Sequential",
    "SmoothTchebycheff",
    "Step",
    "Sum",
    "Switch",
    "TaskGradients",
    "UPGrad",
    "UncertaintyWeights",
    "Weighting",
    "available_backends",
    "functional",
    "nn",
    "use_backend",
]
