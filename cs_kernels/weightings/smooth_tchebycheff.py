"""Smooth Tchebycheff scalarization."""

from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from cs_kernels.options import checked_integer, is_finite_number
from cs_kernels.stateful import check_entries, check_epoch
from cs_kernels.step import Step
from cs_kernels.weightings.last_losses import LastLosses, add_losses, on_device

_TINY = 1e-20
"""Added to a loss before its logarithm, as in the authors' code."""


class SmoothTchebycheff(LastLosses):
    """Minimizes a smooth maximum of the losses, each relative to its nadir (Lin et al., 2024).

    Up to and including epoch `warmup`, the total loss is `sum_i log L_i`, so the weight of task i
    is `1 / L_i`. The mean loss of task i in epoch `warmup` is its nadir n_i. Afterwards, the total
    loss is `K mu log sum_i exp(log(L_i / n_i) / mu)` over the K tasks of a step, so the weight of
    task i is `K softmax_i(log(L_i / n_i) / mu) / L_i`.

    A task has no nadir if it had no loss in that epoch, or if its mean loss is not positive. Until
    a later epoch with a positive mean sets its nadir, the task counts as if L_i = n_i. Non-finite
    losses are left out of the means. A negative loss has no logarithm: its weight is NaN and, once
    its task has a nadir, so are all weights. During the warm-up, the weight of a zero loss is 1e20.

    In `backward` and `step_together`, on one process without micro-batches, the weights use the
    losses of this step. In `step`, the weight of a task uses the task's own loss in this step, and
    the other tasks' last losses. On several ranks or with micro-batches, the weights use all tasks'
    last losses. In the first step, these are missing, so each rank and micro-batch uses its own
    loss: if the losses of n micro-batches are divided by n, their weights are n times as large.

    Args:
        mu: The smoothness; near 0, almost all weight goes to the task with the largest L_i / n_i.
        warmup: The epoch whose mean losses are the nadirs, counted from 0.

    Raises:
        ValueError: `mu` is not positive and finite, or `warmup` is negative.
        TypeError: `warmup` is not an integer.

    """

    def __init__(self, mu: float = 1.0, warmup: int = 4) -> None:
        super().__init__()
        if not (is_finite_number(mu) and mu > 0):
            raise ValueError(f"mu must be positive and finite, got {mu!r}")
        self.mu = mu
        self.warmup = checked_integer("warmup", warmup, 0)
        self._epoch: int | None = None
        self._totals: dict[str, Tensor] = {}
        """Float64 [2] by task: the sum and the number of this epoch's losses, on their device."""
        self._nadirs: dict[str, Tensor] = {}
        """Float64 scalars; infinite for tasks without a nadir."""

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight.

        Raises:
            RuntimeError: `start_epoch` has not been called.

        """
        if self._epoch is None:
            raise RuntimeError(f"{self!r} depends on the epoch: call start_epoch(epoch) first")
        return super().weigh(task, loss, step)

    def weights(self, losses: Tensor, step: Step) -> Tensor:
        """Float64 [K]: the weights K softmax(log(L / n) / mu) / L, or 1 / L without nadirs."""
        scalars = [on_device(self._nadirs, task, losses.device) for task in step.tasks]
        nadirs = torch.stack([losses.new_full((), inf) if n is None else n for n in scalars])
        logarithms = (losses + _TINY).log() - (nadirs + _TINY).log()
        logarithms = torch.where(nadirs.isinf(), 0.0, logarithms)
        shares = len(losses) * torch.softmax(logarithms / self.mu, 0)
        return torch.where(losses < 0, nan, shares / (losses + _TINY))

    def start_epoch(self, epoch: int) -> None:
        """After the warm-up, sets missing nadirs from the epoch that has just ended.

        Does nothing if `epoch` is already the current one. Returning to an epoch of the warm-up
        discards the nadirs.
        """
        if epoch == self._epoch:
            return
        previous, self._epoch = self._epoch, epoch
        self._cached_weights = None
        for task, total in self._totals.items():
            nadir = on_device(self._nadirs, task, total.device)
            assert nadir is not None
            if epoch <= self.warmup:
                nadir.fill_(inf)
            elif previous is not None and previous >= self.warmup:
                mean = torch.where(total[0] > 0, total[0] / total[1], inf)
                nadir.copy_(torch.where(nadir.isinf(), mean, nadir))
            total.zero_()

    def observe(self, step: Step) -> None:
        """Stores the losses, and adds them to the means of this epoch."""
        super().observe(step)
        add_losses(self._totals, step.losses)
        for task in step.losses:
            if task not in self._nadirs:
                self._nadirs[task] = torch.full_like(self._last[task], inf)

    def state_dict(self) -> dict[str, Any]:
        """The last losses, the nadirs, and the losses of this epoch so far."""
        return {
            **super().state_dict(),
            "epoch": self._epoch,
            "totals": {task: total.clone() for task, total in self._totals.items()},
            "nadirs": {task: nadir.clone() for task, nadir in self._nadirs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, also in the middle of an epoch."""
        super().load_state_dict(state)
        self._epoch = state["epoch"]
        self._totals = {task: total.clone() for task, total in state["totals"].items()}
        self._nadirs = {task: nadir.clone() for task, nadir in state["nadirs"].items()}

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the losses, the nadirs and the epoch."""
        check_epoch(state["epoch"])
        check_entries(state, tasks, {"last": [], "totals": [2], "nadirs": []})

    def captured_state(self) -> list[Tensor]:
        """The last losses, the sums of this epoch's losses, and the nadirs."""
        return [*super().captured_state(), *self._totals.values(), *self._nadirs.values()]

    def __repr__(self) -> str:
        return f"SmoothTchebycheff(mu={self.mu}, warmup={self.warmup})"
