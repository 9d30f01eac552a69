"""PCGrad."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups


class PCGrad(GramianMethod):
    """Projects conflicting gradients (Yu et al., "Gradient Surgery for Multi-Task Learning", 2020).

    Each task's gradient meets the other tasks' original ones in a random order, and where the two
    are in conflict loses its component along the other; then all are added.

    The orders are a function of the seed and the number of steps made: equal on all ranks.

    Args:
        reduction: "sum" of the projected gradients, or their "mean".
        seed: Of the orders.
        groups: "all", or "layer" for projections layer by layer.

    Raises:
        ValueError: An option is none of these.

    """

    def __init__(
        self, reduction: Literal["sum", "mean"] = "sum", seed: int = 0, groups: Groups = "all"
    ) -> None:
        super().__init__(groups)
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
        self.reduction = reduction
        self.seed = seed
        self._steps = 0

    def weights(self, gramian: Tensor) -> Tensor:
        """Those of the sum of the projected gradients; every call draws new orders."""
        weights: Tensor = torch.ops.cs_kernels.pcgrad_weights(gramian, self.seed, self._steps)
        self._steps += 1
        return weights / gramian.shape[-1] if self.reduction == "mean" else weights

    def state_dict(self) -> dict[str, Any]:
        """The number of steps made, which the orders follow from."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the orders of the next step."""
        self._steps = state["steps"]

    def __repr__(self) -> str:
        return self._repr(reduction=self.reduction, seed=self.seed)
