"""Nash-MTL."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.step import Step


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
        self._kept: dict[str, Any] = {"number": 0, "tasks": (), "weights": None}
        """The step in which the weights were found, its tasks, the weights before `max_norm`."""

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive; new every `update_every` steps, and whenever other tasks take part."""
        weights = self._keep(gramian, step) if step is not None else self._solved(gramian)
        if self.max_norm == 0:
            return weights
        norm = (weights.unsqueeze(-2) @ gramian @ weights.unsqueeze(-1)).squeeze(-1)
        norm = norm.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return weights * (self.max_norm / norm).clamp(max=1.0)

    def _keep(self, gramian: Tensor, step: Step) -> Tensor:
        kept: Tensor | None = self._kept["weights"]
        if kept is not None and (
            kept.shape != gramian.shape[:-1] or self._kept["tasks"] != step.tasks
        ):
            kept = None
        if kept is not None and 0 <= step.number - self._kept["number"] < self.update_every:
            return kept.to(gramian)
        weights = self._solved(gramian)
        # A step that overflowed is not to spoil those after it.
        before = torch.ones_like(weights) if kept is None else kept.to(weights)
        self._kept = {
            "number": step.number,
            "tasks": step.tasks,
            "weights": torch.where(weights.isfinite().all(), weights, before),
        }
        return weights

    @staticmethod
    def _solved(gramian: Tensor) -> Tensor:
        weights: Tensor = torch.ops.cs_kernels.nash_mtl_weights(gramian)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """The kept weights, and the step and tasks that they are of."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the kept weights."""
        number, tasks, weights = state["number"], tuple(state["tasks"]), state["weights"]
        self._kept = {"number": number, "tasks": tasks, "weights": weights}

    def __repr__(self) -> str:
        return self._repr(update_every=self.update_every, max_norm=self.max_norm)
