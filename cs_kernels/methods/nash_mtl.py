"""Nash-MTL."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import is_finite_number
from cs_kernels.step import Step


class NashMTL(GramianMethod):
    """Multi-task learning as a bargaining game (Navon et al., 2022), solved to convergence.

    The task weights a > 0 solve G a = 1 / a: the dot product of the update and each gradient is the
    inverse of that gradient's weight. A ridge of 1e-10 on the gradients' correlations keeps the
    weights of opposed gradients finite. Without `max_norm`, the update's norm is sqrt(K). The
    weight of a task with a zero gradient is zero.

    Args:
        update_every: As in `GramianMethod`.
        max_norm: The norm to which longer updates are scaled; 0 for no limit. With `update_every`,
            reused task weights keep the factor of the step that solved for them.
        groups: "all" or "layer"; with "layer", `max_norm` limits each layer's update.

    Raises:
        ValueError: `max_norm` is negative or not finite, or another option has an invalid value.

    """

    def __init__(
        self, update_every: int = 1, max_norm: float = 1.0, groups: Groups = "all"
    ) -> None:
        super().__init__(groups, update_every)
        if not (is_finite_number(max_norm) and max_norm >= 0):
            raise ValueError(f"max_norm must be finite and at least 0, got {max_norm!r}")
        self.max_norm = max_norm

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive task weights; zero for a zero gradient."""
        weights: Tensor = torch.ops.cs_kernels.nash_mtl_weights(gramian)
        if self.max_norm == 0:
            return weights
        norm = (weights.unsqueeze(-2) @ gramian.double() @ weights.unsqueeze(-1)).squeeze(-1)
        norm = norm.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return weights * (self.max_norm / norm).clamp(max=1.0)

    def __repr__(self) -> str:
        return self._repr(max_norm=self.max_norm)
