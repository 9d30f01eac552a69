"""FairGrad."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import is_finite_number
from cs_kernels.step import Step

_LEAST, _GREATEST = 1 / 16, 16
"""Limits on alpha; beyond them, powers of gradient lengths can exceed the range of float64."""


class FairGrad(GramianMethod):
    """Fair resource allocation (Ban and Ji, 2024): each task's gain is a resource to share.

    The gain of task i is (G w)_i, the dot product of its gradient and the update. The task weights
    w > 0 solve (G w)_i = w_i^(-1 / alpha), up to a ridge of 1e-10 on the gradients' correlations.
    The update's direction thus maximizes the sum of the tasks' alpha-fair utilities. The weight of
    a task with a zero gradient is zero.

    Args:
        alpha: The fairness, in [1/16, 16]. Near 0, the update is the plain sum; 1 is proportional
            fairness, as in Nash-MTL without `max_norm`; larger values favor the task with the
            smallest gain.
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: `alpha` is out of range, or another option has an invalid value.

    """

    def __init__(self, alpha: float = 1.0, groups: Groups = "all", update_every: int = 1) -> None:
        super().__init__(groups, update_every)
        if not (is_finite_number(alpha) and _LEAST <= alpha <= _GREATEST):
            raise ValueError(f"alpha must lie in [1/16, 16], got {alpha!r}")
        self.alpha = alpha

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive task weights; zero for a zero gradient."""
        weights: Tensor = torch.ops.cs_kernels.fair_grad_weights(gramian, float(self.alpha))
        return weights

    def __repr__(self) -> str:
        return self._repr(alpha=self.alpha)
