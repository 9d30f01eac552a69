"""DB-MTL."""

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, nan_unless_finite
from cs_kernels.step import Step

_LEAST_LOSS = 1e-8


class DBMTL(GramianMethod):
    """Dual-balancing (Lin et al., 2023), without its moving average.

    The update is the sum of the gradients of the losses' logarithms, all scaled to the length of
    the longest one. Here, a loss means the weighted loss plus 1e-8. A negative loss has no
    logarithm and makes all task weights NaN. Tasks with non-finite losses are ignored in the search
    for the longest gradient. The weight of a task with a zero gradient is zero.

    Parameters outside the trunk, such as a head's, get the gradients of the losses themselves.

    Args:
        groups: "all" or "layer".
        update_every: As in `GramianMethod`.

    """

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Non-negative task weights in closed form.

        Raises:
            ValueError: `step` is None.

        """
        if step is None:
            raise ValueError(f"step must be a Step with losses for {self!r}, got None")
        losses = torch.stack([step.weighted_losses[task] for task in step.tasks]).to(gramian)
        lengths = gramian.diagonal(dim1=-2, dim2=-1).sqrt()
        logarithmic = torch.where(losses.isfinite(), lengths / (losses + _LEAST_LOSS), 0.0)
        longest = logarithmic.amax(-1, keepdim=True)
        longest = torch.where((losses + _LEAST_LOSS < 0).any(), torch.nan, longest)
        weights = torch.where(lengths > 0, longest / lengths, 0.0)
        return nan_unless_finite(weights + 0 * longest, gramian)
