"""GradNorm."""

from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from cs_kernels.options import is_finite_number
from cs_kernels.stateful import check_entries
from cs_kernels.step import Step
from cs_kernels.weightings.adam import adam_step, start
from cs_kernels.weightings.last_losses import on_device
from cs_kernels.weightings.weighting import Weighting, weighed

_LEAST = 1e-3
"""The smallest weight after an Adam step; a negative one would make training increase the loss."""


class GradNorm(Weighting):
    """Makes the gradients' norms equal, or larger for tasks that train slowly (Chen et al., 2018).

    G_i is the norm of the gradient of w_i L_i over the shared parameters. r_i is L_i / L_i(0),
    divided by its mean over the tasks, where L_i(0) is the task's first positive loss. After a
    joint step, the weights w_i take one Adam step on `sum_i |G_i - mean_j(G_j) r_i^alpha|`, whose
    targets `mean_j(G_j) r_i^alpha` are constants. Then the weights are clamped to at least 0.001
    and rescaled to their previous sum, so the weights of all tasks sum to the number of tasks.

    The norms come from a Gramian method, such as `Sum(separate=True)` for the plain sum; after
    `backward` with features, they are the norms of the gradients with respect to the features. The
    weights are unchanged in Phase 1, where there is no Gramian, and after a step with a negative
    loss, a non-finite loss or gradient, or a task that has had no positive loss yet.

    Args:
        alpha: How much more weight slowly training tasks get; 0 for equal norms.
        lr: The learning rate of the weights.

    Raises:
        ValueError: `alpha` is negative or not finite, or `lr` is not positive and finite.

    """

    needs_gramian = True

    def __init__(self, alpha: float = 1.5, lr: float = 0.025) -> None:
        if not (is_finite_number(alpha) and alpha >= 0):
            raise ValueError(f"alpha must be finite and at least 0, got {alpha!r}")
        if not (is_finite_number(lr) and lr > 0):
            raise ValueError(f"lr must be positive and finite, got {lr!r}")
        self.alpha = alpha
        self.lr = lr
        self._weights: dict[str, Tensor] = {}
        """Float64 [4] by task: the task's weight with its Adam state."""
        self._first: dict[str, Tensor] = {}
        """Each task's first positive, finite loss, float64; infinite until there is one."""

    def _weight(self, task: str, like: Tensor) -> Tensor:
        state = on_device(self._weights, task, like.device)
        return start(like, 1.0) if state is None else state

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight, which is detached."""
        return weighed(loss, self._weight(task, loss)[0])

    def observe(self, step: Step) -> None:
        """Updates the weights from the Gramian of a joint step, in place."""
        for task, loss in step.losses.items():
            value = loss.double()
            first = on_device(self._first, task, value.device)
            if first is None:
                first = self._first[task] = torch.full_like(value, inf)
                self._weights[task] = start(value, 1.0)
            is_first = first.isinf() & value.isfinite() & (value > 0)
            first.copy_(torch.where(is_first, value, first))
        squares, tasks = step.surgery.energies, step.tasks
        if squares is None:
            return
        norms = squares[: len(tasks)].double().sqrt()
        states = torch.stack([self._weight(task, norms) for task in tasks])
        rates = torch.stack([(step.losses[t].double() / self._first[t]).to(norms) for t in tasks])
        has_first = torch.stack([self._first[t].to(norms) for t in tasks]).isfinite()
        rates = torch.where((rates < 0) | ~has_first, nan, rates)
        targets = norms.mean() * (rates / rates.mean()) ** self.alpha
        weights = states[:, 0]
        updated = adam_step(states, (norms - targets).sign() * norms / weights, self.lr)
        clamped = updated[:, 0].clamp(min=_LEAST)
        updated[:, 0] = clamped * (weights.sum() / clamped.sum())
        finite = targets.isfinite().all() & updated.isfinite().all()
        updated = torch.where(finite, updated, states)
        for task, state in zip(tasks, updated, strict=True):
            self._weights[task].copy_(state)

    def state_dict(self) -> dict[str, Any]:
        """The weights with their Adam states, and the first losses."""
        return {
            "weights": {task: state.clone() for task, state in self._weights.items()},
            "first": {task: loss.clone() for task, loss in self._first.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._weights = {task: weight.clone() for task, weight in state["weights"].items()}
        self._first = {task: loss.clone() for task, loss in state["first"].items()}

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the weights and the first losses, one of each per task."""
        check_entries(state, tasks, {"weights": [4], "first": []})

    def captured_state(self) -> list[Tensor]:
        """The weights with their Adam states, and the first losses."""
        return [*self._weights.values(), *self._first.values()]

    def __repr__(self) -> str:
        return f"GradNorm(alpha={self.alpha}, lr={self.lr})"
