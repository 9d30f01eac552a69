"""Methods, which turn K gradients into one update: one file per method."""

from cs_kernels.methods.aligned_mtl import AlignedMTL
from cs_kernels.methods.cagrad import CAGrad
from cs_kernels.methods.clipped import Clipped
from cs_kernels.methods.config import ConFIG
from cs_kernels.methods.connection_strength import ConnectionStrength
from cs_kernels.methods.db_mtl import DBMTL
from cs_kernels.methods.fair_grad import FairGrad
from cs_kernels.methods.graddrop import GradDrop
from cs_kernels.methods.gradvac import GradVac
from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.methods.imtl_g import IMTLG
from cs_kernels.methods.method import Method
from cs_kernels.methods.mgda import MGDA
from cs_kernels.methods.nash_mtl import NashMTL
from cs_kernels.methods.ntk_mtl import NTKMTL
from cs_kernels.methods.pcgrad import PCGrad
from cs_kernels.methods.protect import Protect
from cs_kernels.methods.sago import SAGO
from cs_kernels.methods.sum import Sum
from cs_kernels.methods.upgrad import UPGrad

__all__ = [
    "DBMTL",
    "IMTLG",
    "MGDA",
    "NTKMTL",
    "SAGO",
    "AlignedMTL",
    "CAGrad",
    "Clipped",
    "ConFIG",
    "ConnectionStrength",
    "FairGrad",
    "GradDrop",
    "GradVac",
    "GramianMethod",
    "Method",
    "NashMTL",
    "PCGrad",
    "Protect",
    "Sum",
    "UPGrad",
]
