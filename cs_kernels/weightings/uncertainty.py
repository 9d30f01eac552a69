"""Uncertainty weights."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs_kernels.options import check_mapping
from cs_kernels.stateful import check_same_tasks, check_tensors
from cs_kernels.step import Step
from cs_kernels.weightings.weighting import Weighting


class UncertaintyWeights(Weighting):
    """Learns to weigh each loss by the task's homoscedastic uncertainty (Kendall et al., 2018).

    The weighted loss is `L / (2 sigma^2) + log sigma` for regression and `L / sigma^2 + log sigma`
    for classification. The learned parameters are the tasks' log sigma; pass `parameters()` to the
    torch optimizer. In the gradient with respect to log sigma, a NaN loss, such as a mean over no
    labels, counts as zero.

    Args:
        tasks: For each task, "regression" or "classification".
        device: The device of the parameters.

    Raises:
        ValueError: A task's kind is neither "regression" nor "classification".

    """

    def __init__(
        self,
        tasks: Mapping[str, Literal["regression", "classification"]],
        device: torch.device | str | None = None,
    ) -> None:
        check_mapping("tasks", tasks, "'regression' or 'classification'")
        for task, kind in tasks.items():
            if kind not in ("regression", "classification"):
                raise ValueError(
                    f"tasks must be 'regression' or 'classification', got {kind!r} for {task!r}"
                )
        self.tasks = dict(tasks)
        self.log_sigma = {task: nn.Parameter(torch.zeros((), device=device)) for task in tasks}

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that there is a kind for every task, and for no other name."""
        if set(self.tasks) != set(tasks):
            raise ValueError(
                f"weighting must have exactly the tasks {list(tasks)}, got {list(self.tasks)}"
            )

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss divided by 2 sigma^2 or by sigma^2, as in the paper's appendix."""
        half = 0.5 if self.tasks[task] == "regression" else 1.0
        weight = half * torch.exp(-2 * self.log_sigma[task])
        value = torch.where(loss.isnan(), 0.0, loss).detach()  # Only for log sigma.
        return weight.detach() * loss + (weight - weight.detach()) * value

    def regularizer(self, task: str) -> Tensor:
        """The term log sigma of the weighted loss."""
        return self.log_sigma[task]

    def parameters(self) -> list[nn.Parameter]:
        """Each task's log sigma."""
        return list(self.log_sigma.values())

    def state_dict(self) -> dict[str, Any]:
        """Each task's log sigma."""
        return {task: value.detach().clone() for task, value in self.log_sigma.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies the state into the existing parameters."""
        with torch.no_grad():
            for task, value in self.log_sigma.items():
                value.copy_(state[task])

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks that the state has a log sigma for every task."""
        names = check_tensors({"log_sigma": state}, "log_sigma", tasks)
        check_same_tasks({"log_sigma": names, "tasks": set(self.tasks)})

    def captured_state(self) -> list[Tensor]:
        """Empty, because the torch optimizer updates the parameters in place."""
        return []

    def __repr__(self) -> str:
        return f"UncertaintyWeights({self.tasks})"
