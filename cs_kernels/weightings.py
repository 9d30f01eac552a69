"""Weights of the tasks' losses, applied before their backward passes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import exp
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs_kernels.options import is_finite_number
from cs_kernels.stateful import Stateful
from cs_kernels.step import Step


class Weighting(Stateful, ABC):
    """Weighs the loss of each task, in every phase and with every method."""

    def check(self, tasks: Sequence[str]) -> None:
        """Raises ValueError if it does not fit the tasks."""
        del tasks

    @abstractmethod
    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The weighted loss of a task, for its backward pass; called once a micro-batch.

        Args:
            task: The task.
            loss: Its loss, with its graph.
            step: The tasks that take part, the number of the step. On many ranks, the losses here
                are this rank's, and `observe` gets their means.

        """

    def regularizer(self, task: str) -> Tensor | None:
        """A term to add to a task's weighted loss, once a step, or None."""
        del task
        return None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of learned weights, for the torch optimizer."""
        return []

    def start_epoch(self, epoch: int) -> None:
        """Called when an epoch begins."""
        del epoch

    def observe(self, step: Step) -> None:
        """Called after a step; `step.losses` are the unweighted losses of its tasks."""
        del step


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping by task, got {value!r}")


class EqualWeights(Weighting):
    """Every loss with weight 1."""

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss itself."""
        return loss

    def __repr__(self) -> str:
        return "EqualWeights()"


class FixedWeights(Weighting):
    """Every loss times a number, such as the manually tuned ones of the paper's tables.

    Args:
        weights: A number for every task.

    Raises:
        ValueError: One is not finite.

    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        _check_mapping("weights", weights)
        for task, weight in weights.items():
            if not is_finite_number(weight):
                raise ValueError(f"weights must be finite, got {weight!r} for {task!r}")
        self.weights = dict(weights)

    def check(self, tasks: Sequence[str]) -> None:
        """Every task must have a weight, and every weight a task."""
        if set(self.weights) != set(tasks):
            raise ValueError(
                f"weighting must have a weight for each of {list(tasks)}, got {list(self.weights)}"
            )

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight."""
        return loss * self.weights[task]

    def __repr__(self) -> str:
        return f"FixedWeights({self.weights})"


class UncertaintyWeights(Weighting):
    """Learns to weigh each loss by the task's homoscedastic uncertainty (Kendall et al., 2018).

    `L / (2 sigma^2) + log sigma` for a regression, `L / sigma^2 + log sigma` for a classification.
    The learned parameters are log sigma; give `parameters()` to the torch optimizer.

    Args:
        tasks: For each task, "regression" or "classification".
        device: The device of the parameters.

    Raises:
        ValueError: A task is neither.

    """

    def __init__(
        self,
        tasks: Mapping[str, Literal["regression", "classification"]],
        device: torch.device | str | None = None,
    ) -> None:
        _check_mapping("tasks", tasks)
        for task, kind in tasks.items():
            if kind not in ("regression", "classification"):
                raise ValueError(
                    f"tasks must be 'regression' or 'classification', got {kind!r} for {task!r}"
                )
        self.tasks = dict(tasks)
        self.log_sigma = {task: nn.Parameter(torch.zeros((), device=device)) for task in tasks}

    def check(self, tasks: Sequence[str]) -> None:
        """Every task must have a kind, and every kind a task."""
        if set(self.tasks) != set(tasks):
            raise ValueError(
                f"weighting must have a kind for each of {list(tasks)}, got {list(self.tasks)}"
            )

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss divided by 2 sigma^2 or sigma^2, as in the paper's appendix."""
        half = 0.5 if self.tasks[task] == "regression" else 1.0
        return half * torch.exp(-2 * self.log_sigma[task]) * loss

    def regularizer(self, task: str) -> Tensor:
        """Log sigma."""
        return self.log_sigma[task]

    def parameters(self) -> list[nn.Parameter]:
        """Log sigma of each task."""
        return list(self.log_sigma.values())

    def state_dict(self) -> dict[str, Any]:
        """Log sigma of each task."""
        return {task: value.detach().clone() for task, value in self.log_sigma.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies the state into the same parameters."""
        with torch.no_grad():
            for task, value in self.log_sigma.items():
                value.copy_(state[task])

    def captured_state(self) -> list[Tensor]:
        """None but the parameters, which the torch optimizer updates in place."""
        return []

    def __repr__(self) -> str:
        return f"UncertaintyWeights({self.tasks})"


class DynamicWeightAverage(Weighting):
    """Gives more weight to losses that fall more slowly (Liu et al., 2019).

    r_i is the mean loss of task i in the last epoch divided by that in the epoch before. Task i has
    the weight `K exp(r_i / T) / sum_j exp(r_j / T)`, and 1 in the first two epochs. Losses that are
    not finite do not count.

    Args:
        temperature: T.

    Raises:
        ValueError: It is not positive and finite.

    """

    def __init__(self, temperature: float = 2.0) -> None:
        if not (is_finite_number(temperature) and temperature > 0):
            raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
        self.temperature = temperature
        self._epoch: int | None = None
        self._totals: dict[str, Tensor] = {}
        """Sum and number of this epoch's losses, on their device: no host synchronization."""
        self._means: dict[str, list[float]] = {}
        """The mean losses of the last two epochs in which the task had a loss."""
        self._weights: dict[str, float] = {}
        self._factors: dict[str, Tensor] = {}
        """The weights on the losses' devices, where a CUDA graph reads them."""

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight in this epoch.

        Raises:
            RuntimeError: No epoch has begun.

        """
        if self._epoch is None:
            raise RuntimeError(f"{self!r} depends on the epoch: call start_epoch(epoch) first")
        factor = self._factors.get(task)
        if factor is None or factor.device != loss.device:
            weight = self._weights.get(task, 1.0)
            factor = torch.full((), weight, dtype=torch.float64, device=loss.device)
            self._factors[task] = factor
        # As `loss * weight` with a Python number: half precision is multiplied in float32.
        wide = torch.promote_types(loss.dtype, torch.float32)
        return (loss.to(wide) * factor.to(wide)).to(loss.dtype)

    def start_epoch(self, epoch: int) -> None:
        """Updates the weights from the epoch that ends; starting one again changes nothing."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for task, total in self._totals.items():
            loss, count = total.tolist()
            if count > 0:
                self._means[task] = [*self._means.get(task, []), loss / count][-2:]
            total.zero_()
        if self._means and all(len(means) == 2 and means[0] > 0 for means in self._means.values()):
            rates = {task: last / before for task, (before, last) in self._means.items()}
            # Relative to the greatest, so that no exponential overflows.
            top = max(rates.values())
            shares = {task: exp((rate - top) / self.temperature) for task, rate in rates.items()}
            total_share = sum(shares.values())
            self._weights = {t: len(shares) * share / total_share for t, share in shares.items()}
        for task, factor in self._factors.items():
            factor.fill_(self._weights.get(task, 1.0))

    def observe(self, step: Step) -> None:
        """Adds the losses to the means of this epoch."""
        for task, loss in step.losses.items():
            value = loss.double()
            finite = value.isfinite()
            pair = torch.stack([torch.where(finite, value, 0.0), finite.double()])
            total = self._totals.get(task)
            # A checkpoint may have been loaded to another device.
            if total is None or total.device != pair.device:
                total = torch.zeros_like(pair) if total is None else total.to(pair.device)
                self._totals[task] = total
            total += pair

    def state_dict(self) -> dict[str, Any]:
        """The means of past epochs, and the losses of this one so far."""
        return {
            "epoch": self._epoch,
            "totals": {task: total.clone() for task, total in self._totals.items()},
            "means": {task: list(means) for task, means in self._means.items()},
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`, also in the middle of an epoch."""
        self._epoch = state["epoch"]
        self._totals = {task: total.clone() for task, total in state["totals"].items()}
        self._means = {task: list(means) for task, means in state["means"].items()}
        self._weights = dict(state["weights"])
        self._factors = {}

    def captured_state(self) -> list[Tensor]:
        """The sums of this epoch's losses, and the weights, which `start_epoch` writes in place."""
        return [*self._totals.values(), *self._factors.values()]

    def __repr__(self) -> str:
        return f"DynamicWeightAverage(temperature={self.temperature})"
