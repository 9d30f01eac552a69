"""MGDA."""

from typing import Literal

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout
from cs_kernels.methods.gramian import GramianMethod, Groups

Normalization = Literal["l2", "loss", "loss+"]


class MGDA(GramianMethod):
    """The min-norm point of the gradients' convex hull (Sener and Koltun, 2018), exactly.

    A direction along which every loss falls, or zero where there is none: also where one gradient
    is zero.

    Args:
        normalize: What the gradients are divided by while the weights are found: None, their norms
            ("l2"), the losses ("loss") or both ("loss+"). The weights are then those of the
            gradients as they are.
        groups: "all" or "layer".

    Raises:
        ValueError: An option is none of these.

    """

    def __init__(self, normalize: Normalization | None = None, groups: Groups = "all") -> None:
        super().__init__(groups)
        if normalize not in (None, "l2", "loss", "loss+"):
            raise ValueError(f"normalize must be None, 'l2', 'loss' or 'loss+', got {normalize!r}")
        self.normalize = normalize
        self._losses: Tensor | None = None

    def combine(self, gradients: TaskGradients, layout: Layout) -> None:
        """Keeps the losses for `weights`."""
        losses = [loss for loss in gradients.losses if loss is not None]
        self._losses = torch.stack(losses).double() if losses else None
        super().combine(gradients, layout)

    def weights(self, gramian: Tensor) -> Tensor:
        """Non-negative, with a sum of one."""
        divisor = torch.ones_like(gramian[..., 0])
        if self.normalize in ("l2", "loss+"):
            divisor = divisor * gramian.diagonal(dim1=-2, dim2=-1).sqrt()
        if self.normalize in ("loss", "loss+"):
            if self._losses is None:
                raise RuntimeError(f"normalize={self.normalize!r} needs losses: there was no step")
            divisor = divisor * self._losses.flatten().to(gramian.device)
        divisor = torch.where(divisor == 0, 1.0, divisor)
        weights: Tensor = torch.ops.cs_kernels.mgda_weights(
            gramian / (divisor.unsqueeze(-1) * divisor.unsqueeze(-2))
        )
        return weights

    def __repr__(self) -> str:
        return self._repr(**({} if self.normalize is None else {"normalize": self.normalize}))
