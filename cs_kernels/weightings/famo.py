"""FAMO."""

from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from cs_kernels.options import check_mapping, is_finite_number
from cs_kernels.stateful import check_entries
from cs_kernels.step import Step
from cs_kernels.weightings.adam import adam_step, start
from cs_kernels.weightings.last_losses import LastLosses, on_device

_TINY = 1e-8
"""Added to the difference of a loss and its minimum, as in the authors' code."""


class FAMO(LastLosses):
    """Makes all losses fall at the same rate, by fast adaptive optimization (Liu et al., 2023).

    Each task of a step has a logit; z is the softmax of the logits, and D_i = L_i - min_i + 1e-8.
    The weight of task i is `(z_i / D_i) / sum_j (z_j / D_j)`. The logits learn from the effect of a
    step: one Adam step decreases `sum_i z_i log(D_i before / D_i after)`, so a task whose log D_i
    has fallen by less than the z-weighted mean gets more weight.

    With `reevaluate=True`, as published, `MultiTaskOptimizer.step` computes the losses again after
    the step, with the same closures and without gradients. This takes one more forward pass per
    task. Buffers and torch's default generators are restored afterwards. Do not reevaluate with a
    closure that draws its own batches: the new losses would come from other batches. A closure that
    needs gradients, such as for a gradient penalty, would raise. If a closure raises in this
    evaluation, the step still counts, and the logits are unchanged. With `reevaluate=False`, a
    task's loss in its next step replaces its loss after this step. Calls of `backward` and
    `step_together`, training on several ranks and captured steps need `reevaluate=False`.

    In `backward` and `step_together`, on one process without micro-batches, the weights use the
    losses of this step, after the logits have learned from them. In `step`, the weight of a task
    uses the task's own loss in this step, and the other tasks' last losses. On several ranks or
    with micro-batches, the weights use all tasks' last losses. The loss being weighed replaces
    missing last losses.

    If a loss is below its minimum, all weights are NaN. A task with a non-finite loss is left out
    of the update of the logits.

    Args:
        lr: The learning rate of the logits.
        decay: The weight decay of the logits.
        reevaluate: Whether to compute the losses again after a step.
        minima: The smallest possible value of a task's loss, by task. Default: 0.

    Raises:
        ValueError: `lr` is not positive and finite, `decay` is negative or not finite, or a minimum
            is not finite.
        TypeError: `minima` is not a mapping.

    """

    def __init__(
        self,
        lr: float = 0.025,
        decay: float = 0.01,
        reevaluate: bool = True,
        minima: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if not (is_finite_number(lr) and lr > 0):
            raise ValueError(f"lr must be positive and finite, got {lr!r}")
        if not (is_finite_number(decay) and decay >= 0):
            raise ValueError(f"decay must be finite and at least 0, got {decay!r}")
        if minima is not None:
            check_mapping("minima", minima, "minimum")
            for task, minimum in minima.items():
                if not is_finite_number(minimum):
                    raise ValueError(f"minima must be finite, got {minimum!r} for {task!r}")
        self.lr = lr
        self.decay = decay
        self.reevaluates = bool(reevaluate)
        self.minima = dict(minima or {})
        self._logits: dict[str, Tensor] = {}
        """Float64 [4] by task: the task's logit with its Adam state."""

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that every minimum belongs to a task."""
        for task in self.minima:
            if task not in tasks:
                raise ValueError(
                    f"minima must have no tasks other than {list(tasks)}, got {task!r}"
                )

    def weights(self, losses: Tensor, step: Step) -> Tensor:
        """Float64 [K]: the weights (z / D) / sum(z / D)."""
        logits = self._states(step.tasks, losses)
        if not self.reevaluates and set(step.known) >= set(step.tasks):
            # `observe` will apply the same update to the state, unless the step fails.
            after = torch.stack([step.known[task].to(losses) for task in step.tasks])
            logits = self._learned(logits, step.tasks, self._lasts(step.tasks, losses), after)
        gaps = self._gaps(losses, step.tasks)
        shares = torch.softmax(logits[:, 0], 0) / torch.where(gaps > 0, gaps, nan)
        return shares / shares.sum()

    def _gaps(self, losses: Tensor, tasks: Sequence[str]) -> Tensor:
        """Returns [K]: the differences D of the losses and their minima."""
        if self.minima:
            pairs = zip(losses.unbind(), tasks, strict=True)
            losses = torch.stack([loss - self.minima.get(task, 0.0) for loss, task in pairs])
        return losses + _TINY

    def _states(self, tasks: Sequence[str], like: Tensor) -> Tensor:
        """[K, 4]: a copy of the logits with their Adam states; new tasks start with logit 0."""
        states = [on_device(self._logits, task, like.device) for task in tasks]
        return torch.stack([start(like, 0.0) if state is None else state for state in states])

    def _lasts(self, tasks: Sequence[str], like: Tensor) -> Tensor:
        """Returns [K]: the last losses, infinite for tasks without one."""
        lasts = [on_device(self._last, task, like.device) for task in tasks]
        return torch.stack([like.new_full((), inf) if last is None else last for last in lasts])

    def _learned(
        self, logits: Tensor, tasks: Sequence[str], before: Tensor, after: Tensor
    ) -> Tensor:
        """[K, 4]: the states after one update, unchanged for tasks without two finite losses."""
        delta = self._gaps(before, tasks).log() - self._gaps(after, tasks).log()
        valid = delta.isfinite()
        delta = torch.where(valid, delta, 0.0)
        z = torch.softmax(torch.where(valid, logits[:, 0], -inf), 0)
        updated = adam_step(logits, z * (delta - (z * delta).sum()), self.lr, self.decay)
        return torch.where(valid.unsqueeze(1), updated, logits)

    def observe(self, step: Step) -> None:
        """Updates the logits in place, and stores the losses."""
        tasks = [task for task in step.tasks if task in step.losses]
        has_losses = not self.reevaluates or set(step.losses_after) >= set(tasks)
        if tasks and has_losses:
            losses = torch.stack([step.losses[task].double() for task in tasks])
            logits = self._states(tasks, losses)
            if self.reevaluates:
                before = losses
                after = torch.stack([step.losses_after[task].to(losses) for task in tasks])
            else:
                before, after = self._lasts(tasks, losses), losses
            learned = self._learned(logits, tasks, before, after)
            for task, state in zip(tasks, learned, strict=True):
                self._logits.setdefault(task, torch.empty_like(state)).copy_(state)
        super().observe(step)

    def state_dict(self) -> dict[str, Any]:
        """The last losses, and the logits with their Adam states."""
        logits = {task: state.clone() for task, state in self._logits.items()}
        return {**super().state_dict(), "logits": logits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        super().load_state_dict(state)
        self._logits = {task: logit.clone() for task, logit in state["logits"].items()}

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the last losses and the logits, one of each per task."""
        check_entries(state, tasks, {"last": [], "logits": [4]})

    def captured_state(self) -> list[Tensor]:
        """The last losses, and the logits with their Adam states."""
        return [*super().captured_state(), *self._logits.values()]

    def __repr__(self) -> str:
        minima = f", minima={self.minima}" if self.minima else ""
        options = f"lr={self.lr}, decay={self.decay}, reevaluate={self.reevaluates}"
        return f"FAMO({options}{minima})"
