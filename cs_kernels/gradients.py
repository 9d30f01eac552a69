"""The gradients of the shared parameters, K x N, and how autograd's results get there.

Autograd gives its own buffer away when `.grad` is None, so a task's row is made of the tensors that
its backward pass left in `.grad`: nothing is copied or added. The update has a buffer of its own,
kept from step to step, which becomes `.grad`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class TaskGradients:
    """K rows of gradients, a tensor or None for every shared parameter.

    Args:
        parameters: The shared parameters, by name.
        tasks: K.

    """

    def __init__(self, parameters: dict[str, nn.Parameter], tasks: int) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.rows: list[list[Tensor | None]] = [[] for _ in range(tasks)]
        self._updates: list[Tensor | None] = [None] * len(self.parameters)
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the update stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.rows]

    def collect(self, task: int) -> None:
        """Moves every shared `.grad` into a task's row.

        Raises:
            ValueError: A gradient is sparse.

        """
        row = self.rows[task]
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is not None:
                if grad.layout is not torch.strided:
                    raise ValueError(
                        f"trunk must have dense gradients, got a {grad.layout} one for"
                        f" {self.names[i]}"
                    )
                row[i] = grad
                parameter.grad = None

    def reached(self) -> list[int]:
        """The parameters that at least one task has a gradient for."""
        return [
            i for i in range(len(self.parameters)) if any(row[i] is not None for row in self.rows)
        ]

    def of(self, parameters: Sequence[int]) -> list[Tensor | None]:
        """The gradients of some parameters, each one's tasks together."""
        return [row[i] for i in parameters for row in self.rows]

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """Where the updates of some parameters are written."""
        return [self._update(i) for i in parameters]

    def _update(self, i: int) -> Tensor:
        parameter, update = self.parameters[i], self._updates[i]
        if (
            update is None
            or update.dtype is not parameter.dtype
            or update.device != parameter.device
            or update.shape != parameter.shape
            or update.stride() != parameter.stride()
        ):
            update = torch.empty_like(parameter, requires_grad=False)
            self._updates[i] = update
        return update

    def assign(self, parameters: Sequence[int]) -> None:
        """Makes the updates of some parameters their `.grad`, and forgets the rows."""
        for i in parameters:
            self.parameters[i].grad = self._update(i)
        self.clear()
