"""ConFIG."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.step import Step


class ConFIG(GramianMethod):
    """Conflict-free inverse gradients (Liu et al., 2024).

    The update has the same cosine with every gradient, and its length is the sum of the gradients'
    components along it. If no such direction exists, the least-squares direction takes its place.
    If that is zero too, as for opposed gradients, the update is zero.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Task weights in closed form; some may be negative."""
        weights: Tensor = torch.ops.cs_kernels.config_weights(gramian)
        return weights
