"""The gradients of the shared parameters, K x N, and how autograd's results get there.

Autograd gives its own buffer away when `.grad` is None, so a task's row is made of the tensors that
its backward pass left in `.grad`: nothing is copied or added. The update has a buffer of its own,
kept from step to step, which becomes `.grad`.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.ops.operands import misfits
from cs_kernels.reach import Reach


class TaskGradients:
    """K rows of gradients, a tensor or None for every shared parameter.

    A parameter that only one task has ever reached, of several that might have, is that task's own:
    it gets that task's gradient as it is, and methods do not see it.

    Args:
        parameters: The shared parameters, by name.
        tasks: The names of all tasks.

    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.tasks = tuple(tasks)
        self.reach = Reach(parameters, tasks)
        self.rows: list[list[Tensor | None]] = []
        """By task, in their order: a gradient or None for every parameter."""
        self._updates: list[Tensor | None] = [None] * len(self.parameters)
        self.collected: set[str] = set()
        """The tasks whose gradients are in the rows."""
        self._in_buckets: set[int] = set()
        """The parameters whose gradients are parts of larger memory."""
        self._seen_memory: set[str] = set()
        """The tasks whose gradients were asked for that."""
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the update stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.tasks]
        self.collected.clear()

    def collect(self, task: str) -> bool:
        """Moves every shared `.grad` into a task's row, and adds to what is there.

        Returns:
            Whether there was any.

        Raises:
            ValueError: A gradient is sparse.

        """
        if task not in self._seen_memory:
            self._find_buckets(task)
        row: list[Tensor | None] = [None] * len(self.parameters)
        unreached, strided = [], torch.strided
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                unreached.append(i)
                continue
            if grad.layout is not strided:
                raise ValueError(
                    f"trunk must have dense gradients, got a {grad.layout} one for {self.names[i]}"
                )
            # The next pass overwrites a bucket, such as DistributedDataParallel's.
            row[i] = grad if grad._base is None else grad.clone()
            parameter.grad = None
        for i in self._in_buckets:
            grad = row[i]
            row[i] = None if grad is None else grad.clone()
        n = self.tasks.index(task)
        for i, before in enumerate(self.rows[n] if task in self.collected else ()):
            grad = row[i]
            if before is not None:
                row[i] = before if grad is None else before.add_(grad)
        self.rows[n] = row
        self.collected.add(task)
        self.reach.note(task, unreached)
        return len(unreached) < len(self.parameters)

    def _find_buckets(self, task: str) -> None:
        """Finds the gradients in larger memory that are no views: once a task, for its cost."""
        self._seen_memory.add(task)
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided:
                continue
            if grad.untyped_storage().nbytes() > grad.numel() * grad.element_size():
                self._in_buckets.add(i)

    def forget_passes(self) -> None:
        """Looks at the next gradients of every task anew: others may require one now."""
        self.reach.forget_passes()
        self._seen_memory.clear()

    def release_own(self) -> None:
        """Gives every task's own parameters their gradients, and takes these out of the rows."""
        for i, task in self.reach.owners().items():
            row = self.rows[self.tasks.index(task)]
            if row[i] is not None:
                self.parameters[i].grad, row[i] = row[i], None

    def reached(self) -> list[int]:
        """The parameters that at least one task has a gradient for."""
        return [
            i
            for i, of_tasks in enumerate(zip(*self.rows, strict=True))
            if of_tasks[0] is not None or any(grad is not None for grad in of_tasks)
        ]

    def first(self) -> tuple[int, Tensor] | None:
        """The first parameter that a task has a gradient for, and that gradient, if any."""
        of_parameters = enumerate(zip(*self.rows, strict=True))
        return next(((i, g) for i, grads in of_parameters for g in grads if g is not None), None)

    def of(
        self, parameters: Sequence[int], tasks: Sequence[str] | None = None
    ) -> list[Tensor | None]:
        """The gradients of some parameters, each one's tasks together; all tasks by default."""
        rows = self.rows
        if tasks is not None:
            rows = [rows[self.tasks.index(task)] for task in tasks]
        return [row[i] for i in parameters for row in rows]

    def layers(self, parameters: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
        """Numbers some parameters by the module that they belong to, from 0; and its names."""
        modules = [self.names[i].rpartition(".")[0] for i in parameters]
        numbers = {module: n for n, module in enumerate(dict.fromkeys(modules))}
        return [numbers[module] for module in modules], tuple(numbers)

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """Where the updates of some parameters are written."""
        likes = [self.parameters[i] for i in parameters]
        # There are none yet; or a parameter was moved or cast, or the update, which is its `.grad`.
        for n in misfits([self._updates[i] for i in parameters], likes):
            self._updates[parameters[n]] = torch.empty_like(likes[n], requires_grad=False)
        return [cast("Tensor", self._updates[i]) for i in parameters]

    def assign(self, parameters: Sequence[int]) -> None:
        """Makes the updates of some parameters their `.grad`, and forgets the rows."""
        for i in parameters:
            self.parameters[i].grad = self._updates[i]
        self.clear()
