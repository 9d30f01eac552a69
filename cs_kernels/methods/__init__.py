"""Methods, which make one update from K gradients: one file a method."""

from cs_kernels.methods.aligned_mtl import AlignedMTL
from cs_kernels.methods.cagrad import CAGrad
from cs_kernels.methods.connection_strength import ConnectionStrength
from cs_kernels.methods.graddrop import GradDrop
from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.methods.imtl_g import IMTLG
from cs_kernels.methods.method import Method
from cs_kernels.methods.mgda import MGDA
from cs_kernels.methods.nash_mtl import NashMTL
from cs_kernels.methods.pcgrad import PCGrad
from cs_kernels.methods.sum import Sum
from cs_kernels.methods.upgrad import UPGrad

__all__ = [
    "IMTLG",
    "MGDA",
    "AlignedMTL",
    "CAGrad",
    "ConnectionStrength",
    "GradDrop",
    "GramianMethod",
    "Method",
    "NashMTL",
    "PCGrad",
    "Sum",
    "UPGrad",
]
