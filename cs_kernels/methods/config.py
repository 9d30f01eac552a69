"""ConFIG."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.step import Step


class ConFIG(GramianMethod):
    """Conflict-free inverse gradients (Liu et al., 2024).

    The update has the same cosine with every nonzero gradient. The update's length is the sum of
    the gradients' components along it. If equal cosines are impossible, the least-squares direction
    is used. If the least-squares solution is zero, as for opposed gradients, the update is zero.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Task weights in closed form, possibly negative."""
        weights: Tensor = torch.ops.cs_kernels.config_weights(gramian)
        return weights
