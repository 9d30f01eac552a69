"""The dot products of the tasks' gradients, merged over the steps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cs_kernels.stateful import check_names


class Products:
    """The dot products of the tasks' gradients, merged over the steps without synchronization.

    Args:
        modules: The number of modules, each with its own Gramian.
        tasks: K.
        device: The device of the gradients.

    """

    def __init__(self, modules: int, tasks: int, device: torch.device) -> None:
        shape = modules, tasks, tasks
        self.gramian = torch.zeros(shape, dtype=torch.float64, device=device)
        self.together = torch.zeros(shape, dtype=torch.bool, device=device)
        self.losses = torch.full((tasks,), torch.nan, dtype=torch.float32, device=device)
        self.finite = torch.ones(tasks, dtype=torch.bool, device=device)
        """Whether each task's gradient in the last step was finite."""
        self.usable = self.finite.all()
        """Whether task weights can be computed from the last step's products."""
        self.counts = torch.zeros(shape[1:], dtype=torch.int64, device=device)
        self.steps = torch.zeros_like(self.counts)
        self.all_known = False
        """Whether every task is known to have had a gradient."""

    def add(self, products: Tensor, losses: Tensor) -> Tensor:
        """Merges a step's products, [modules, K, K], into the earlier ones, and returns the result.

        After a step with a non-finite gradient or without any gradient, the result is NaN, so that
        the task weights stay unchanged. A task whose gradient is missing or zero keeps its last
        norm and loss, and its pairs keep their last cosines.
        """
        energies = products.diagonal(dim1=-2, dim2=-1)
        present = ~(energies == 0)
        now = present.unsqueeze(-1) & present.unsqueeze(-2)
        self.finite = energies.isfinite().all(0)
        finite = self.finite.all()
        before = self.gramian.diagonal(dim1=-2, dim2=-1)
        scale = torch.where(present & (before > 0), (energies / before).sqrt(), 1.0)
        rescaled = self.gramian * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        merged = torch.where(now, products, rescaled)
        self.together = self.together | (now & finite)
        self.gramian = torch.where(finite, merged, self.gramian)
        given = finite & present.any(0) & ~losses.isnan()
        self.losses = torch.where(given, losses, self.losses)
        pairs = now.any(0) & finite
        self.steps = self.steps + pairs
        self.counts = self.counts + (pairs & (products.sum(0) < 0))
        self.usable = finite & present.any()
        return torch.where(self.usable, merged, torch.nan)

    def known(self) -> list[int]:
        """The indices of the tasks that have had a gradient; synchronizes until each has."""
        tasks = self.gramian.shape[-1]
        if not self.all_known:
            seen = self.together.diagonal(dim1=-2, dim2=-1).any(0).tolist()
            self.all_known = all(seen)
            return [task for task in range(tasks) if seen[task]]
        return [*range(tasks)]

    _SAVED = "gramian", "together", "losses", "finite", "counts", "steps"

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all tensors."""
        return {name: getattr(self, name).clone() for name in self._SAVED}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for missing or misshapen tensors, and for non-finite products."""
        check_names(state, self._SAVED)
        for name in self._SAVED:
            own, found = getattr(self, name), state[name]
            if not isinstance(found, Tensor) or found.shape != own.shape:
                got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"state must have a tensor of shape {tuple(own.shape)} in {name!r}, got {got}"
                )
            if found.dtype is not own.dtype:
                raise ValueError(f"state must have {own.dtype} in {name!r}, got {found.dtype}")
        if not state["gramian"].isfinite().all():
            raise ValueError(f"state must have finite products, got {state['gramian']}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        for name in self._SAVED:
            setattr(self, name, state[name].clone().to(self.gramian.device))
        self.all_known = False
        self.known()
