"""CAGrad."""

from typing import Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import is_finite_number
from cs_kernels.step import Step


class CAGrad(GramianMethod):
    """Conflict-averse gradient descent (Liu et al., 2021).

    Before rescaling, the update maximizes the smallest local improvement of any task, among all
    vectors within c |g_0| of the mean gradient g_0. The smallest improvement is at most zero if no
    direction improves all tasks.

    Args:
        c: The radius, relative to |g_0|; below 1, the fixed points are the stationary points of the
            mean loss.
        rescale: 0 leaves the update unscaled; 1 divides it by 1 + c^2, as the authors do; 2 divides
            it by 1 + c.
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: `c` is negative or not finite, or another option has an invalid value.

    """

    def __init__(
        self,
        c: float = 0.4,
        rescale: Literal[0, 1, 2] = 1,
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        if not (is_finite_number(c) and c >= 0):
            raise ValueError(f"c must be finite and at least 0, got {c!r}")
        if rescale not in (0, 1, 2):
            raise ValueError(f"rescale must be 0, 1 or 2, got {rescale!r}")
        self.c = c
        self.rescale = rescale

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights: 1 / K for the mean gradient, plus the weights of the correction."""
        weights: Tensor = torch.ops.cs_kernels.cagrad_weights(gramian, self.c)
        return weights / (1.0, 1 + self.c**2, 1 + self.c)[self.rescale]

    def __repr__(self) -> str:
        return self._repr(c=self.c, rescale=self.rescale)
