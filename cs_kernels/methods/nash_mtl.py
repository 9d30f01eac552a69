"""Nash-MTL."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import checked_integer, is_finite_number
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
        if not (is_finite_number(max_norm) and max_norm >= 0):
            raise ValueError(f"max_norm must be finite and at least 0, got {max_norm}")
        self.update_every = checked_integer("update_every", update_every, 1)
        self.max_norm = max_norm
        self._kept: dict[str, Any] = {"number": 0, "tasks": (), "layers": (), "weights": None}
        """The step in which the weights were found, what they are of; before `max_norm`."""

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive; new every `update_every` steps, and for other tasks or layers."""
        weights = self._keep(gramian, step) if step is not None else self._solved(gramian)
        if self.max_norm == 0:
            return weights
        norm = (weights.unsqueeze(-2) @ gramian @ weights.unsqueeze(-1)).squeeze(-1)
        norm = norm.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
        return weights * (self.max_norm / norm).clamp(max=1.0)

    def _keep(self, gramian: Tensor, step: Step) -> Tensor:
        kept: Tensor | None = self._kept["weights"]
        same = (self._kept["tasks"], self._kept["layers"]) == (step.tasks, step.layers)
        if kept is not None and (not same or kept.shape != gramian.shape[:-1]):
            kept = None
        if kept is not None and 0 <= step.number - self._kept["number"] < self.update_every:
            return kept.to(gramian)
        weights = self._solved(gramian)
        # A step that overflowed is not to spoil those after it.
        before = torch.ones_like(weights) if kept is None else kept.to(weights)
        self._kept = {
            "number": step.number,
            "tasks": step.tasks,
            "layers": step.layers,
            "weights": torch.where(weights.isfinite().all(), weights, before),
        }
        return weights

    @staticmethod
    def _solved(gramian: Tensor) -> Tensor:
        weights: Tensor = torch.ops.cs_kernels.nash_mtl_weights(gramian)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """The kept weights, and the step, tasks and layers that they are of."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the kept weights."""
        tuples = {key: tuple(state[key]) for key in ("tasks", "layers")}
        self._kept = {"number": state["number"], **tuples, "weights": state["weights"]}

    def __repr__(self) -> str:
        return self._repr(update_every=self.update_every, max_norm=self.max_norm)
