"""Aligned-MTL."""

from typing import Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.step import Step


class AlignedMTL(GramianMethod):
    """Independent component alignment (Senushkin et al., 2023).

    The gradients' principal components are rescaled to equal length, which removes conflict and
    dominance. Then the gradients are added.

    Args:
        scale: The common length: the "min", "median" or root mean square ("rmse") of the lengths.
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: An option has an invalid value.

    """

    def __init__(
        self,
        scale: Literal["min", "median", "rmse"] = "min",
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        if scale not in ("min", "median", "rmse"):
            raise ValueError(f"scale must be 'min', 'median' or 'rmse', got {scale!r}")
        self.scale = scale

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Task weights for the sum of the aligned gradients; divided by K, they give the mean."""
        weights: Tensor = torch.ops.cs_kernels.aligned_mtl_weights(gramian, self.scale)
        return weights

    def __repr__(self) -> str:
        return self._repr(scale=self.scale)
