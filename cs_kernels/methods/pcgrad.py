"""PCGrad."""

from typing import Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import checked_seed
from cs_kernels.step import Step


class PCGrad(GramianMethod):
    """Projects conflicting gradients (Yu et al., "Gradient Surgery for Multi-Task Learning", 2020).

    Each task's gradient is compared with the original gradients of the other tasks in a random
    order, and loses its component along each one that it conflicts with. Then the projected
    gradients are added.

    The orders depend only on the seed and the step number, so they are the same on all ranks.

    Args:
        reduction: "sum" of the projected gradients, or their "mean".
        seed: The seed of the random orders.
        groups: "all", or "layer" for separate projections in each layer.
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: The seed is outside [0, 2^63), or another option has an invalid value.

    """

    def __init__(
        self,
        reduction: Literal["sum", "mean"] = "sum",
        seed: int = 0,
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
        self.reduction = reduction
        self.seed = checked_seed(seed)

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights of the update; every step draws new orders."""
        number, counter = (0, None) if step is None else step.draw
        weights: Tensor = torch.ops.cs_kernels.pcgrad_weights(gramian, self.seed, number, counter)
        return weights / gramian.shape[-1] if self.reduction == "mean" else weights

    def __repr__(self) -> str:
        return self._repr(reduction=self.reduction, seed=self.seed)
