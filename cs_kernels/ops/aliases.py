"""Types of the operators' arguments."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Grads = Sequence[Tensor | None]
Ints = Sequence[int]
Floats = Sequence[float]


class Weighting(NamedTuple):
    """Where and how `run_sketch` writes its tensor times a weight."""

    update: Tensor
    """Contiguous; it may be the tensor itself."""
    weight: Tensor | float
    """A float64 scalar on the tensor's device; on the CPU, also a Python float."""
    add: bool
    """Whether to add to the update rather than overwrite it."""

    def weight_in_memory(self) -> Tensor:
        """The weight as a tensor."""
        if isinstance(self.weight, Tensor):
            return self.weight
        return torch.tensor(self.weight, dtype=torch.float64, device=self.update.device)
