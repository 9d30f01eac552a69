"""Nash-MTL."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import checked_integer, is_finite_number
from cs_kernels.step import Step


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class NashMTL(GramianMethod):
    """Multi-task learning as a bargaining game (Navon et al., 2022), solved to convergence.

    The task weights a > 0 solve G a = 1 / a: the update's product with each gradient is the inverse
    of its weight; up to a ridge of 1e-10 on the gradients' correlations, which keeps the weights of
    opposed gradients finite. The update's norm is sqrt(K) before `max_norm`. The weight of a task
    with a zero gradient is zero.

    Args:
        update_every: The number of steps for which task weights are kept.
        max_norm: A longer update is scaled to this norm; 0 for no limit.
        groups: "all" or "layer", with a norm of each layer's own.

    Raises:
        ValueError: `update_every` is below 1, or `max_norm` negative or not finite.

    """

    def __init__(
        self, update_every: int = 1, max_norm: float = 1.0, groups: Groups = "all"
    ) -> None:
        super().__init__(groups)
        if not (is_finite_number(max_norm) and max_norm >= 0):
            raise ValueError(f"max_norm must be finite and at least 0, got {max_norm!r}")
        self.update_every = checked_integer("update_every", update_every, 1)
        self.max_norm = max_norm
        self._kept: dict[str, Any] = {"number": 0, "tasks": (), "layers": (), "weights": None}
        """With `update_every` > 1, the weights before `max_norm`, their step, tasks and layers."""

    @property
    def layerwise(self) -> bool:
        """Unless weights are kept."""
        return super().layerwise and self.update_every == 1

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Positive; solved anew every `update_every` steps, and for other tasks or layers."""
        if step is None or self.update_every == 1:
            weights = self._solved(gramian)
        else:
            weights = self._keep(gramian, step)
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
        if kept is not None and 0 < step.number - self._kept["number"] < self.update_every:
            return kept.to(gramian, copy=True)
        weights = self._solved(gramian)
        # Weights that are not finite are not kept: the next steps would use them.
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
        """The kept weights, with their step, tasks and layers."""
        return {**self._kept, "weights": _copied(self._kept["weights"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the kept weights."""
        tuples = {key: tuple(state[key]) for key in ("tasks", "layers")}
        weights = _copied(state["weights"])
        self._kept = {"number": state["number"], **tuples, "weights": weights}

    def captured_state(self) -> list[Tensor]:
        """Empty: with `update_every` of 1, nothing is kept.

        Raises:
            ValueError: `update_every` is above 1: the steps differ.

        """
        if self.update_every > 1:
            raise ValueError(
                f"update_every must be 1 in a captured step, got {self.update_every} by {self!r}"
            )
        return []

    def __repr__(self) -> str:
        return self._repr(update_every=self.update_every, max_norm=self.max_norm)
