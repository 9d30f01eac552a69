"""Nash-MTL."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups


class NashMTL(GramianMethod):
    """Multi-task learning as a bargaining game (Navon et al., 2022), solved to convergence.

    The weights a > 0 with G a = 1 / a: the update's gain along each gradient is in inverse
    proportion to its weight, whatever the gradients' lengths. Its norm is sqrt(K) before
    `max_norm`. A task without a gradient has no weight.

    Args:
        update_every: The number of steps for which weights are kept.
        max_norm: A longer update is shortened to this norm; 0 for none.
        groups: "all" or "layer", where the norm is each layer's own.

    Raises:
        ValueError: `update_every` is below 1, or `max_norm` negative or not finite.

    """

    def __init__(
        self, update_every: int = 1, max_norm: float = 1.0, groups: Groups = "all"
    ) -> None:
        super().__init__(groups)
        if update_every < 1:
            raise ValueError(f"update_every must be at least 1, got {update_every}")
        if not (isfinite(max_norm) and max_norm >= 0):
            raise ValueError(f"max_norm must be finite and at least 0, got {max_norm}")
        self.update_every = update_every
        self.max_norm = max_norm
        self._steps = 0
        self._kept: Tensor | None = None

    def weights(self, gramian: Tensor) -> Tensor:
        """Positive; new every `update_every` calls, or when the number of gradients changes."""
        shape = gramian.shape[:-1]
        kept = self._kept
        if kept is None or kept.shape != shape or self._steps % self.update_every == 0:
            weights: Tensor = torch.ops.cs_kernels.nash_mtl_weights(gramian)
            # A step that overflowed is not to spoil those after it.
            before = torch.ones_like(weights) if kept is None or kept.shape != shape else kept
            self._kept = torch.where(weights.isfinite().all(), weights, before.to(weights))
        else:
            weights = kept.to(gramian)
        self._steps += 1
        if self.max_norm == 0:
            return weights
        norm = (weights.unsqueeze(-2) @ gramian @ weights.unsqueeze(-1)).squeeze(-1)
        norm = norm.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return weights * (self.max_norm / norm).clamp(max=1.0)

    def state_dict(self) -> dict[str, Any]:
        """The kept weights and the number of steps."""
        return {"steps": self._steps, "weights": self._kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the kept weights."""
        self._steps = state["steps"]
        self._kept = state["weights"]

    def __repr__(self) -> str:
        return self._repr(update_every=self.update_every, max_norm=self.max_norm)
