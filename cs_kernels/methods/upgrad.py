"""UPGrad."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod
from cs_kernels.step import Step


class UPGrad(GramianMethod):
    """Unconflicting projection of gradients (Quinton and Rey, "Jacobian Descent", 2024).

    Each gradient is projected onto the dual cone, the set of vectors that conflict with no
    gradient. The update is the mean of the projections, so it also lies in the dual cone.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Non-negative task weights, from one quadratic program per task."""
        weights: Tensor = torch.ops.cs_kernels.upgrad_weights(gramian)
        return weights
