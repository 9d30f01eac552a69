"""The base class of weightings that need the losses of all tasks."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from cs_kernels.stateful import check_tensors
from cs_kernels.step import Step
from cs_kernels.weightings.weighting import Weighting, weighed


def on_device(states: dict[str, Tensor], task: str, device: torch.device) -> Tensor | None:
    """A task's state, moved to `device` if a checkpoint was loaded onto another device."""
    state = states.get(task)
    if state is not None and state.device != device:
        state = states[task] = state.to(device)
    return state


def add_losses(totals: dict[str, Tensor], losses: Mapping[str, Tensor]) -> None:
    """Adds finite losses to `totals`, float64 [2] per task: the sum and the number of losses."""
    for task, loss in losses.items():
        value = loss.double()
        finite = value.isfinite()
        pair = torch.stack([torch.where(finite, value, 0.0), finite.double()])
        total = on_device(totals, task, pair.device)
        if total is None:
            total = totals[task] = torch.zeros_like(pair)
        total += pair


class LastLosses(Weighting):
    """Weighs each loss by the losses of all tasks of the step.

    A loss that is unknown before a backward pass is replaced by the task's last loss. In `step`,
    the other tasks' losses are unknown; on several ranks or with micro-batches, all losses are
    unknown. The loss being weighed replaces missing last losses. A non-finite loss is replaced by
    the task's last loss or, if there is none, by the mean of the finite losses.
    """

    def __init__(self) -> None:
        self._last: dict[str, Tensor] = {}
        """Each task's last finite loss, float64 on its device; infinite until there is one."""
        self._cached_weights: tuple[dict[str, Tensor], Tensor] | None = None
        """`step.known`, if it has all tasks of the step, and the weights computed from it."""

    @abstractmethod
    def weights(self, losses: Tensor, step: Step) -> Tensor:
        """Returns float64 [K]: the weights of a step's tasks, from their losses, float64 [K]."""

    def losses_of(self, loss: Tensor, step: Step) -> Tensor:
        """Float64 [K], all finite: each task's loss in this step, or its last one, or `loss`.

        The mean of the finite losses replaces a non-finite one; without a finite loss, all are 1.
        """
        own = loss.detach().double()
        last = [self._last_of(other, own) for other in step.tasks]
        pairs = zip(step.tasks, last, strict=True)
        known = torch.stack([step.known.get(other, x).to(own) for other, x in pairs])
        fallback = torch.stack(last)
        fallback = torch.where(fallback.isfinite(), fallback, own)
        losses = torch.where(known.isfinite(), known, fallback)
        finite = losses.isfinite()
        mean = torch.where(finite, losses, 0.0).sum() / finite.sum()  # NaN if none is finite.
        return torch.where(finite, losses, mean.nan_to_num(nan=1.0))

    def _last_of(self, task: str, own: Tensor) -> Tensor:
        last = on_device(self._last, task, own.device)
        return own if last is None else last

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight, which is detached."""
        number = step.tasks.index(task)
        if self._cached_weights is not None and self._cached_weights[0] is step.known:
            return weighed(loss, self._cached_weights[1][number].to(loss.device))
        with torch.no_grad():
            weights = self.weights(self.losses_of(loss, step), step)
        if set(step.known) >= set(step.tasks):  # The weights do not depend on `loss`.
            self._cached_weights = step.known, weights
        return weighed(loss, weights[number])

    def observe(self, step: Step) -> None:
        """Stores the losses in place."""
        self._cached_weights = None
        for task, loss in step.losses.items():
            value = loss.double()
            last = on_device(self._last, task, value.device)
            if last is None:
                last = self._last[task] = torch.full_like(value, inf)
            last.copy_(torch.where(value.isfinite(), value, last))

    def state_dict(self) -> dict[str, Any]:
        """Each task's last loss."""
        return {"last": {task: last.clone() for task, last in self._last.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._last = {task: last.clone() for task, last in state["last"].items()}
        self._cached_weights = None

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the last losses."""
        check_tensors(state, "last", tasks)

    def captured_state(self) -> list[Tensor]:
        """The last losses, which `observe` updates in place."""
        return [*self._last.values()]
