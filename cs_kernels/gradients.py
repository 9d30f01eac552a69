"""The gradients of the shared parameters, K x N, and how autograd's results get there.

Autograd gives its own buffer away when `.grad` is None, so a task's row is made of the tensors that
its backward pass left in `.grad`: nothing is copied or added. The update has a buffer of its own,
kept from step to step, which becomes `.grad`.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.ops.operands import misfits


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
        self.losses: list[Tensor | None] = [None] * tasks
        self.loss_scale: Tensor | None = None
        """What the losses were multiplied by before their backward passes, if by anything."""
        self._updates: list[Tensor | None] = [None] * len(self.parameters)
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the update stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.rows]
        self.losses = [None] * len(self.rows)
        self.loss_scale = None

    def collect(self, task: int, loss: Tensor) -> None:
        """Moves every shared `.grad` into a task's row, with the weighted loss that it is of.

        Raises:
            ValueError: A gradient is sparse.

        """
        self.losses[task] = loss.detach()
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
            i
            for i, of_tasks in enumerate(zip(*self.rows, strict=True))
            if of_tasks[0] is not None or any(grad is not None for grad in of_tasks)
        ]

    def taking_part(self) -> list[int]:
        """The tasks of this step: a batch may have labels for some only."""
        return [task for task, loss in enumerate(self.losses) if loss is not None]

    def of(
        self, parameters: Sequence[int], tasks: Sequence[int] | None = None
    ) -> list[Tensor | None]:
        """The gradients of some parameters, each one's tasks together; all tasks by default."""
        rows = self.rows if tasks is None else [self.rows[task] for task in tasks]
        return [row[i] for i in parameters for row in rows]

    def layers(self, parameters: Sequence[int]) -> list[int]:
        """Numbers some parameters by the module that they belong to, from 0."""
        modules = [self.names[i].rpartition(".")[0] for i in parameters]
        numbers = {module: n for n, module in enumerate(dict.fromkeys(modules))}
        return [numbers[module] for module in modules]

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """Where the updates of some parameters are written."""
        likes = [self.parameters[i] for i in parameters]
        # There are none yet; or a parameter was moved or cast, or the update, which is its `.grad`.
        for place in misfits([self._updates[i] for i in parameters], likes):
            self._updates[parameters[place]] = torch.empty_like(likes[place], requires_grad=False)
        return [cast("Tensor", self._updates[i]) for i in parameters]

    def assign(self, parameters: Sequence[int]) -> None:
        """Makes the updates of some parameters their `.grad`, and forgets the rows."""
        for i in parameters:
            self.parameters[i].grad = self._updates[i]
        self.clear()
