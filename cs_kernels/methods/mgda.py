"""MGDA."""

from typing import Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.step import Step

Normalization = Literal["l2", "loss", "loss+"]


class MGDA(GramianMethod):
    """The exact min-norm point of the gradients' convex hull (Sener and Koltun, 2018).

    Without `normalize`, a small step along the update decreases every loss. If no direction does,
    or if one gradient is zero, the update is zero.

    Args:
        normalize: What the solver divides the gradients by: nothing (None), their norms ("l2"), the
            absolute values of the weighted losses ("loss") or both ("loss+"). The resulting weights
            apply to the original gradients.
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: An option has an invalid value.

    """

    def __init__(
        self, normalize: Normalization | None = None, groups: Groups = "all", update_every: int = 1
    ) -> None:
        super().__init__(groups, update_every)
        if normalize not in (None, "l2", "loss", "loss+"):
            raise ValueError(f"normalize must be None, 'l2', 'loss' or 'loss+', got {normalize!r}")
        self.normalize = normalize

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Non-negative task weights that sum to one.

        Raises:
            ValueError: `normalize` needs losses, and `step` is None.

        """
        divisor = torch.ones_like(gramian[..., 0])
        if self.normalize in ("l2", "loss+"):
            divisor = divisor * gramian.diagonal(dim1=-2, dim2=-1).sqrt()
        if self.normalize in ("loss", "loss+"):
            if step is None:
                raise ValueError(
                    f"step must be a Step with losses for normalize={self.normalize!r}, got None"
                )
            losses = torch.stack([step.weighted_losses[task] for task in step.tasks])
            # A negative divisor would reverse a gradient, and with it the update.
            divisor = divisor * torch.where(losses.isfinite(), losses, 0.0).to(divisor).abs()
        divisor = torch.where(divisor == 0, 1.0, divisor)
        weights: Tensor = torch.ops.cs_kernels.mgda_weights(
            gramian / (divisor.unsqueeze(-1) * divisor.unsqueeze(-2))
        )
        return weights

    def __repr__(self) -> str:
        return self._repr(**({} if self.normalize is None else {"normalize": self.normalize}))
