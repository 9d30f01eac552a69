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

    A parameter that only one task has ever reached is that task's own: it gets that task's
    gradient as it is, and methods do not see it.

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
        self._collected: set[str] = set()
        """The tasks with a row."""
        self._unreached: dict[str, list[int]] = {}
        """By task: the parameters without a gradient in its last pass."""
        self._reached_by = [0] * len(self.parameters)
        """By parameter: the tasks that have ever reached it, a bit each."""
        self._tasks_seen = 0
        self._owners: dict[int, str] | None = {}
        self.clear()

    def clear(self) -> None:
        """Forgets the gradients; the buffers of the update stay."""
        self.rows = [[None] * len(self.parameters) for _ in self.tasks]
        self._collected.clear()

    def collect(self, task: str) -> bool:
        """Moves every shared `.grad` into a task's row, and adds to what is there.

        Returns:
            Whether there was any.

        Raises:
            ValueError: A gradient is sparse.

        """
        row, unreached, strided = self.rows[self.tasks.index(task)], [], torch.strided
        adds = task in self._collected
        self._collected.add(task)
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                unreached.append(i)
                continue
            if grad.layout is not strided:
                raise ValueError(
                    f"trunk must have dense gradients, got a {grad.layout} one for {self.names[i]}"
                )
            # Somebody's memory, overwritten by the next pass: a bucket of DistributedDataParallel.
            if grad._base is not None:
                grad = grad.clone()
            present = row[i] if adds else None
            row[i] = grad if present is None else present.add_(grad)
            parameter.grad = None
        self._note(task, unreached)
        return len(unreached) < len(self.parameters)

    def note_reach(self, task: str) -> bool:
        """As `collect`, but the gradients stay in `.grad`: only which ones there are is noted."""
        unreached = [i for i, p in enumerate(self.parameters) if p.grad is None]
        self._note(task, unreached)
        return len(unreached) < len(self.parameters)

    def note_reached(self, task: str, parameters: Iterable[nn.Parameter]) -> bool:
        """Notes a task's parameters without a backward pass."""
        reached = {id(parameter) for parameter in parameters}
        unreached = [i for i, p in enumerate(self.parameters) if id(p) not in reached]
        self._note(task, unreached)
        return len(unreached) < len(self.parameters)

    def _note(self, task: str, unreached: list[int]) -> None:
        if self._unreached.get(task) == unreached:
            return
        self._unreached[task] = unreached
        bit, missing = 1 << self.tasks.index(task), set(unreached)
        self._tasks_seen |= bit
        for i in range(len(self.parameters)):
            if i not in missing:
                self._reached_by[i] |= bit
        self._owners = None

    def reached_by(self, task: str) -> list[nn.Parameter]:
        """The parameters that a task has ever reached."""
        bit = 1 << self.tasks.index(task)
        return [
            p for p, tasks in zip(self.parameters, self._reached_by, strict=True) if tasks & bit
        ]

    def owners(self) -> dict[int, str]:
        """The parameters that only one task has ever reached, and that task.

        As long as one task alone has been seen, there are none: all that it reaches may be shared.
        """
        if self._owners is None:
            several = self._tasks_seen & (self._tasks_seen - 1)
            self._owners = {
                i: self.tasks[tasks.bit_length() - 1]
                for i, tasks in enumerate(self._reached_by)
                if several and tasks and not tasks & (tasks - 1)
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

    def of(
        self, parameters: Sequence[int], tasks: Sequence[str] | None = None
    ) -> list[Tensor | None]:
        """The gradients of some parameters, each one's tasks together; all tasks by default."""
        rows = self.rows
        if tasks is not None:
            rows = [rows[self.tasks.index(task)] for task in tasks]
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

    def state_dict(self) -> dict[str, list[str]]:
        """By task that has been seen: the parameters that it has never reached."""
        return {
            task: [
                name
                for name, tasks in zip(self.names, self._reached_by, strict=True)
                if not tasks >> i & 1
            ]
            for i, task in enumerate(self.tasks)
            if self._tasks_seen >> i & 1
        }

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Goes on from a `state_dict`.

        Raises:
            ValueError: It names other tasks or another trunk's parameters.

        """
        known = set(self.names)
        for task, unreached in state.items():
            if task not in self.tasks:
                raise ValueError(f"state must name tasks among {list(self.tasks)}, got {task!r}")
            for name in unreached:
                if name not in known:
                    raise ValueError(f"state must name shared parameters of trunk, got {name!r}")
        places = {name: i for i, name in enumerate(self.names)}
        self._unreached, self._tasks_seen = {}, 0
        self._reached_by = [0] * len(self.names)
        for task, unreached in state.items():
            self._note(task, [places[name] for name in unreached])
        self._owners = None
