"""The gradients of the shared parameters, K x N, collected from `.grad`.

Autograd hands over its own buffer when `.grad` is None, so a task's row holds the tensors that its
backward pass left in `.grad`: nothing is copied or added. The updates have buffers that are kept
from step to step and become `.grad`. Methods see a complex gradient as pairs of real numbers, whose
products are the real inner product.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.ops.operands import misfits
from cs_kernels.reach import Reach


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, of shape [..., 2]; a view. Others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class TaskGradients:
    """K rows of gradients, a tensor or None for every shared parameter.

    A parameter is one task's own if several tasks might have reached it, but only that one ever
    has: it gets that task's gradient unchanged, and methods do not see it.

    Args:
        parameters: The shared parameters, by name.
        tasks: The names of all tasks.

    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.tasks = tuple(tasks)
        self.reach = Reach(parameters, tasks)
        self._has_complex = any(p.is_complex() for p in self.parameters)
        self.rows: list[list[Tensor | None]] = []
        """For each task, in order: a gradient or None for every parameter."""
        self._updates: list[Tensor | None] = [None] * len(self.parameters)
        self.modules: tuple[str, ...] = ()
        """The modules of a step whose gradients come a few modules at a time."""
        self.ahead: Sequence[str] = ()
        """The task of the next passes of this step, in Phase 1."""
        self.collected: set[str] = set()
        """The tasks whose gradients are in the rows."""
        self._in_buckets: set[int] = set()
        """The parameters whose gradients are parts of a larger allocation."""
        self._buckets_found: set[str] = set()
        """The tasks whose gradients were searched for such parts."""
        self.clear()

    # Parts of gradients (cs_kernels.distributed) have other ones of these.

    def expect(self, tasks: Sequence[str], *, separate: bool, adds_up: bool = False) -> None:
        """To be called before passes.

        Args:
            tasks: Those of the passes.
            separate: Whether the tasks' gradients are kept one by one; else they add up in `.grad`.
            adds_up: Whether the gradients of later passes will be added.

        """

    def arm(self, task: str) -> None:
        """To be called before the last backward pass of a task."""

    def before_backward(self, *, retains: bool) -> None:
        """To be called before a backward pass, which retains its graph or not."""

    def skip(self, task: str) -> None:
        """To be called in place of the passes of a task that only other ranks have labels for."""

    def note(self, task: str) -> bool:
        """Notes the gradients in `.grad` as a task's; returns whether there is any."""
        return self.reach.note_gradients(task)

    def recover(self, held: Sequence[nn.Parameter]) -> None:
        """To be called after a failed step, with the torch optimizer's parameters."""

    def drain(self) -> None:
        """Takes part in collectives of passes that have failed on this rank."""

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the parts of gradients."""
        return tensor

    def offsets(self, parameters: Sequence[int]) -> list[int] | None:
        """The index of each part's first element among those of all whole parameters."""
        return None

    def publish(self) -> None:
        """To be called when the updates are written."""

    def lend(self) -> tuple[int, Tensor] | None:
        """The index of a parameter with a gradient, and a tensor for its `.grad` meanwhile."""
        return self.first()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the updates stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.tasks]
        self.collected.clear()

    def collect(self, task: str) -> bool:
        """Moves every shared `.grad` into a task's row, or adds it to the gradient there.

        Returns:
            Whether there was any gradient.

        Raises:
            ValueError: A gradient is sparse.

        """
        if task not in self._buckets_found:
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
        return self._put(task, row, unreached)

    def put_one(self, task: str, index: int, grad: Tensor) -> None:
        """Puts the gradient of one parameter into a task's row."""
        self.rows[self.tasks.index(task)][index] = grad

    def _put(self, task: str, row: list[Tensor | None], unreached: list[int]) -> bool:
        """Makes gradients a task's row, or adds them to it; returns whether there is any."""
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
        """Finds gradients in larger allocations that are no views; it is slow, so once a task."""
        self._buckets_found.add(task)
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided or grad._base is not None:
                continue
            if grad.untyped_storage().nbytes() > grad.numel() * grad.element_size():
                self._in_buckets.add(i)

    def forget_passes(self) -> None:
        """Looks at the next gradients of every task anew: others may require one now."""
        self.reach.forget_passes()
        self._buckets_found.clear()

    def release_own(self) -> None:
        """Moves the gradients of every task's own parameters from the rows to `.grad`."""
        for i, task in self.reach.owners().items():
            row = self.rows[self.tasks.index(task)]
            if row[i] is not None:
                self.parameters[i].grad, row[i] = row[i], None

    def reached(self) -> list[int]:
        """The indices of the parameters that at least one task has a gradient for."""
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
        """The gradients of some parameters: for each of them, those of `tasks`, or of all."""
        rows = self.rows
        if tasks is not None:
            rows = [rows[self.tasks.index(task)] for task in tasks]
        grads = [row[i] for i in parameters for row in rows]
        return [g if g is None else as_real(g) for g in grads] if self._has_complex else grads

    def layers(self, parameters: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
        """The index of each parameter's module, and the names of the modules.

        These are the modules of the given parameters, or of all of the step.
        """
        modules = [self.names[i].rpartition(".")[0] for i in parameters]
        numbers = {module: n for n, module in enumerate(self.modules or dict.fromkeys(modules))}
        return [numbers[module] for module in modules], tuple(numbers)

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """The buffers for the updates of some parameters, real as their gradients in `of`."""
        likes = [self.parameters[i] for i in parameters]
        # A buffer is missing; or the parameter, or its `.grad`, the last update, was moved or cast.
        for n in misfits([self._updates[i] for i in parameters], likes):
            self._updates[parameters[n]] = torch.empty_like(likes[n], requires_grad=False)
        return self._real_updates(parameters)

    def _real_updates(self, parameters: Sequence[int]) -> list[Tensor]:
        updates = [cast("Tensor", self._updates[i]) for i in parameters]
        return list(map(as_real, updates)) if self._has_complex else updates

    def assign(self, parameters: Sequence[int]) -> None:
        """Makes the updates of some parameters their `.grad`, and forgets the rows."""
        for i in parameters:
            self.parameters[i].grad = self._updates[i]
        self.clear()
