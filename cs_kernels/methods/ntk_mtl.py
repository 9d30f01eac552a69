"""NTKMTL."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, nan_unless_finite
from cs_kernels.step import Step


class NTKMTL(GramianMethod):
    """Balances the tasks' convergence by their neural tangent kernels (Qin et al., 2025).

    The diagonal of the Gramian approximates the kernels. The weight of task i is sqrt(tr G / G_ii),
    so all gradients are scaled to the same length, sqrt(tr G), before they are added. The weight of
    a task with a zero gradient is zero.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive task weights in closed form; zero for a zero gradient."""
        squares = gramian.diagonal(dim1=-2, dim2=-1)
        weights = (squares.sum(-1, keepdim=True) / squares).sqrt()
        return nan_unless_finite(torch.where(squares > 0, weights, 0.0), gramian)
