"""The gradients of the shared parameters, K x N, and how autograd's results get there.

Autograd gives its own buffer away when `.grad` is None, so a task's row is made of the tensors that
its backward pass left in `.grad`: nothing is copied or added. The update has a buffer of its own,
kept from step to step, which becomes `.grad`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.ops.operands import misfits


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
        self.rows: list[list[Tensor | None]] = []
        """By task, in their order: a gradient or None for every parameter."""
        self._updates: list[Tensor | None] = [None] * len(self.parameters)
        self.collected: set[str] = set()
        """The tasks whose gradients are in the rows."""
        self._in_buckets: set[int] = set()
        """The parameters whose gradients are parts of larger memory."""
        self._seen_memory: set[str] = set()
        """The tasks whose gradients were asked for that."""
        self._marked: tuple[int, Tensor, int] | None = None
        self._unreached: dict[str, list[int]] = {}
        """By task: the parameters without a gradient in its last pass."""
        self._reached_by = [0] * len(self.parameters)
        """By parameter: the tasks that have ever reached it, a bit each."""
        self.first_reached = False
        """Whether a parameter was reached that no task had reached before; reset by who asks."""
        self._tried_by = [0] * len(self.parameters)
        """By parameter: the tasks with a pass while it required a gradient, a bit each."""
        self._owners: dict[int, str] | None = {}
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the update stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.tasks]
        self.collected.clear()
        self._marked = None

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
        self._note(task, unreached)
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

    def mark(self) -> None:
        """Puts one gradient back into `.grad`, to see whether it is set to zero meanwhile."""
        first = self.first()
        if first is not None:
            i, grad = first
            self.parameters[i].grad = grad
            self._marked = i, grad, grad._version

    def is_marked(self) -> bool:
        """Whether it is still there, as it was; also if there was none to put back.

        Raises:
            RuntimeError: It was changed, but not set to zero.

        """
        if self._marked is None:
            return True
        i, grad, version = self._marked
        if self.parameters[i].grad is not grad:
            return False
        if grad._version != version and grad.any():
            raise RuntimeError(
                "the gradients of backward(..., update=False) must stay as they are until their"
                f" update, got a changed one for {self.names[i]}: clip or unscale after the update"
            )
        return grad._version == version

    def unmark(self) -> None:
        """Takes it out again."""
        if self._marked is not None:
            self.parameters[self._marked[0]].grad = None
            self._marked = None

    def note_reach(self, task: str) -> bool:
        """As `collect`, but the gradients stay in `.grad`: only which ones there are is noted."""
        unreached = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self._note(task, unreached)
        return len(unreached) < len(self.parameters)

    def note_reached(self, task: str, parameters: Iterable[nn.Parameter]) -> None:
        """Notes the parameters in the graph of a task's loss."""
        reached = {id(parameter) for parameter in parameters}
        self._note(task, [i for i, p in enumerate(self.parameters) if id(p) not in reached])

    def _note(self, task: str, unreached: list[int]) -> None:
        if self._unreached.get(task) == unreached:
            return
        self._unreached[task] = unreached
        bit, missing = 1 << self.tasks.index(task), set(unreached)
        for i, parameter in enumerate(self.parameters):
            if i not in missing:
                self.first_reached |= not self._reached_by[i]
                self._reached_by[i] |= bit
            if i not in missing or parameter.requires_grad:
                self._tried_by[i] |= bit
        self._owners = None

    @property
    def tasks_seen(self) -> bool:
        """Whether a pass of any task has been noted."""
        return any(self._tried_by)

    def note_again(self) -> None:
        """Tells that other parameters require a gradient now."""
        self._unreached.clear()
        self._seen_memory.clear()

    def reached_by(self, task: str) -> list[nn.Parameter]:
        """The parameters that a task has ever reached."""
        bit = 1 << self.tasks.index(task)
        return [
            p for p, tasks in zip(self.parameters, self._reached_by, strict=True) if tasks & bit
        ]

    def owners(self) -> dict[int, str]:
        """The parameters that only one task has ever reached, and that task.

        A second task must have had a pass while the parameter required a gradient: one task alone
        says nothing about the others.
        """
        if self._owners is None:
            self._owners = {
                i: self.tasks[reached.bit_length() - 1]
                for i, (reached, tried) in enumerate(
                    zip(self._reached_by, self._tried_by, strict=True)
                )
                if reached.bit_count() == 1 < tried.bit_count()
            }
        return self._owners

    def release_own(self) -> None:
        """Gives every task's own parameters their gradients, and takes these out of the rows."""
        for i, task in self.owners().items():
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

    def state_dict(self) -> dict[str, dict[str, list[str]]]:
        """By parameter that not every task has reached: the tasks that have, or have only tried."""
        every = (1 << len(self.tasks)) - 1
        return {
            name: {"reached": self._names_of(reached), "tried": self._names_of(tried)}
            for name, reached, tried in zip(
                self.names, self._reached_by, self._tried_by, strict=True
            )
            if reached != every
        }

    def _names_of(self, tasks: int) -> list[str]:
        return [task for i, task in enumerate(self.tasks) if tasks >> i & 1]

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Goes on from a `state_dict`.

        Raises:
            ValueError: It names other tasks or another trunk's parameters.

        """
        every = (1 << len(self.tasks)) - 1
        index = {name: i for i, name in enumerate(self.names)}
        reached, tried = [every] * len(index), [every] * len(index)
        for name, by in state.items():
            if name not in index:
                raise ValueError(f"state must name shared parameters of trunk, got {name!r}")
            for tasks, key in ((reached, "reached"), (tried, "tried")):
                tasks[index[name]] = sum(1 << self.tasks.index(task) for task in by[key])
        self._reached_by, self._tried_by = reached, tried
        self._unreached, self._owners = {}, None
