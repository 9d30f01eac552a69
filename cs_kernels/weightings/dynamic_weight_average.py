"""Dynamic weight average."""

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

import torch
from torch import Tensor

from cs_kernels.options import is_finite_number
from cs_kernels.stateful import check_epoch, check_tensors
from cs_kernels.step import Step
from cs_kernels.weightings.last_losses import add_losses
from cs_kernels.weightings.weighting import Weighting, weighed


class DynamicWeightAverage(Weighting):
    """Gives more weight to losses that fall more slowly (Liu et al., 2019).

    r_i is the mean loss of task i in the last epoch, divided by its mean loss in the epoch before.
    The weight of task i is `K exp(r_i / T) / sum_j exp(r_j / T)`, and 1 in the first two epochs.
    Non-finite losses are ignored.

    Args:
        temperature: T.

    Raises:
        ValueError: The temperature is not positive and finite.

    """

    def __init__(self, temperature: float = 2.0) -> None:
        if not (is_finite_number(temperature) and temperature > 0):
            raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
        self.temperature = temperature
        self._epoch: int | None = None
        self._totals: dict[str, Tensor] = {}
        """Float64 [2] by task: the sum and the number of this epoch's losses, on their device."""
        self._means: dict[str, list[float]] = {}
        """The mean losses of the last two epochs in which the task had a loss."""
        self._weights: dict[str, float] = {}
        self._factors: dict[str, Tensor] = {}
        """The weights on the losses' devices, where a CUDA graph reads them."""

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight in this epoch.

        Raises:
            RuntimeError: `start_epoch` has not been called.

        """
        if self._epoch is None:
            raise RuntimeError(f"{self!r} depends on the epoch: call start_epoch(epoch) first")
        factor = self._factors.get(task)
        if factor is None or factor.device != loss.device:
            weight = self._weights.get(task, 1.0)
            factor = torch.full((), weight, dtype=torch.float64, device=loss.device)
            self._factors[task] = factor
        return weighed(loss, factor)

    def start_epoch(self, epoch: int) -> None:
        """Updates the weights from the epoch that has just ended.

        Does nothing if `epoch` is already the current one.
        """
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
            # The largest rate is subtracted, so that no exponential overflows.
            top = max(rates.values())
            shares = {task: exp((rate - top) / self.temperature) for task, rate in rates.items()}
            norm = sum(shares.values())
            self._weights = {task: len(shares) * x / norm for task, x in shares.items()}
        for task, factor in self._factors.items():
            factor.fill_(self._weights.get(task, 1.0))

    def observe(self, step: Step) -> None:
        """Adds the losses to the means of this epoch."""
        add_losses(self._totals, step.losses)

    def state_dict(self) -> dict[str, Any]:
        """The means of past epochs, and the losses of this one so far."""
        return {
            "epoch": self._epoch,
            "totals": {task: total.clone() for task, total in self._totals.items()},
            "means": {task: list(means) for task, means in self._means.items()},
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, also in the middle of an epoch."""
        self._epoch = state["epoch"]
        self._totals = {task: total.clone() for task, total in state["totals"].items()}
        self._means = {task: list(means) for task, means in state["means"].items()}
        self._weights = dict(state["weights"])
        self._factors = {}

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the losses, the means and weights of past epochs, and the epoch."""
        check_epoch(state["epoch"])
        check_tensors(state, "totals", tasks, [2])
        means, weights = state["means"], state["weights"]
        numbers = [*weights.values(), *(mean for epochs in means.values() for mean in epochs)]
        valid = {*means, *weights} <= set(tasks) and all(map(is_finite_number, numbers))
        if not valid or any(len(epochs) not in (1, 2) for epochs in means.values()):
            raise ValueError(
                "state must have one or two finite means and a finite weight per task, and no tasks"
                f" other than {list(tasks)}, got means {means!r} and weights {weights!r}"
            )

    def captured_state(self) -> list[Tensor]:
        """The sums of this epoch's losses and the weights, which `start_epoch` updates in place."""
        return [*self._totals.values(), *self._factors.values()]

    def __repr__(self) -> str:
        return f"DynamicWeightAverage(temperature={self.temperature})"
