"""IMTL-G."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.step import Step


class IMTLG(GramianMethod):
    """The gradient part of impartial multi-task learning (Liu et al., 2021).

    The update has the same component along every task's gradient. The task weights sum to one; some
    may be negative.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Task weights in closed form; all zero if they cannot sum to one."""
        weights: Tensor = torch.ops.cs_kernels.imtl_g_weights(gramian)
        return weights
