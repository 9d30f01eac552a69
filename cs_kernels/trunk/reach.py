"""Records which tasks reach which shared parameters, from gradients and the losses' graphs."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn


class Reach:
    """The tasks that have ever reached each shared parameter.

    A parameter is one task's own if several tasks had a pass, but only that one reached it. A
    parameter that is frozen during a task's pass, such as a switched-off adapter, is not reached.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._tasks = tuple(tasks)
        self.has_new = False
        """Whether a parameter was reached for the first time by any task; the reader resets it."""
        self._unreached: dict[str, list[int]] = {}
        """By task: the parameters without a gradient in its last pass."""
        self._reached_by = [0] * len(self._parameters)
        """By parameter: a bit for each task that has ever reached it."""
        self._tried_by = [0] * len(self._parameters)
        """By parameter: a bit for each task that had a pass; if none has reached the parameter,
        only passes since `forget_passes` count."""
        self._owners: dict[int, str] | None = {}

    def note(self, task: str, unreached: list[int]) -> None:
        """Records a task's pass from the indices of parameters without a gradient."""
        if self._unreached.get(task) == unreached:
            return
        self._unreached[task] = unreached
        bit, missing = 1 << self._tasks.index(task), set(unreached)
        for i in range(len(self._parameters)):
            if i not in missing:
                self.has_new |= not self._reached_by[i]
                self._reached_by[i] |= bit
            self._tried_by[i] |= bit
        self._owners = None

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Wraps a step: a failed step leaves the record unchanged."""
        before = dict(self._unreached), [*self._reached_by], [*self._tried_by]
        try:
            yield
        except BaseException:
            self._unreached, self._reached_by, self._tried_by = before
            self._owners = None
            raise

    def note_gradients(self, task: str) -> bool:
        """Records that a task reaches all parameters with a `.grad`; returns whether any has."""
        unreached = [i for i, p in enumerate(self._parameters) if p.grad is None]
        self.note(task, unreached)
        return len(unreached) < len(self._parameters)

    def note_graph(self, task: str, parameters: Iterable[nn.Parameter]) -> None:
        """Records which parameters a task's pass reaches, from the graph of its loss."""
        in_graph = {id(parameter) for parameter in parameters}
        self.note(task, [i for i, p in enumerate(self._parameters) if id(p) not in in_graph])

    def last_unreached(self, task: str) -> list[int]:
        """The indices of parameters without a gradient in the last pass of a task."""
        return self._unreached.get(task, [])

    def forget_passes(self) -> None:
        """Makes the next pass of every task count anew: different parameters may train now.

        A parameter that no task has reached may have been frozen, so past passes prove nothing.
        """
        self._unreached.clear()
        pairs = zip(self._tried_by, self._reached_by, strict=True)
        self._tried_by = [tried if by else 0 for tried, by in pairs]
        self._owners = None

    def has_unknown_gradient(self) -> bool:
        """Whether a parameter has a `.grad` though no task is known to reach it."""
        pairs = zip(self._parameters, self._reached_by, strict=True)
        return any(p.grad is not None for p, by in pairs if not by)

    @property
    def tasks_seen(self) -> bool:
        return any(self._tried_by)

    def reached_by_any(self, tasks: Iterable[str]) -> set[int]:
        """The indices of the parameters that any of these tasks has ever reached."""
        bits = sum(1 << self._tasks.index(task) for task in tasks)
        return {i for i, by in enumerate(self._reached_by) if by & bits}

    def reached_by(self, task: str) -> list[nn.Parameter]:
        """The parameters that a task has ever reached."""
        bit = 1 << self._tasks.index(task)
        reached_by = zip(self._parameters, self._reached_by, strict=True)
        return [parameter for parameter, tasks in reached_by if tasks & bit]

    def owners(self) -> dict[int, str]:
        """By index of the parameter: the only task that has ever reached it.

        A parameter has an owner only after another task has had a pass.
        """
        if self._owners is None:
            tasks = enumerate(zip(self._reached_by, self._tried_by, strict=True))
            self._owners = {
                i: self._tasks[reached.bit_length() - 1]
                for i, (reached, tried) in tasks
                if reached.bit_count() == 1 < tried.bit_count()
            }
        return self._owners

    def state_dict(self) -> dict[str, dict[str, list[str]]]:
        """By parameter that not all tasks reach: the tasks that do, and the tasks with a pass."""
        every = (1 << len(self._tasks)) - 1
        parameters = zip(self._names, self._reached_by, self._tried(), strict=True)
        return {
            name: {"reached": self._names_of(reached), "tried": self._names_of(tried)}
            for name, reached, tried in parameters
            if reached != every
        }

    def _tried(self) -> list[int]:
        """`_tried_by`, but no tasks for a parameter that is frozen and was never reached."""
        entries = zip(self._parameters, self._reached_by, self._tried_by, strict=True)
        return [tried if by or p.requires_grad else 0 for p, by, tried in entries]

    def _names_of(self, tasks: int) -> list[str]:
        return [task for i, task in enumerate(self._tasks) if tasks >> i & 1]

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Continues from a `state_dict`.

        Raises:
            ValueError: The state names unknown tasks, or parameters of another trunk.

        """
        every = (1 << len(self._tasks)) - 1
        index = {name: i for i, name in enumerate(self._names)}
        reached, tried = [every] * len(index), [every] * len(index)
        for name, by in state.items():
            if name not in index:
                raise ValueError(f"state must name shared parameters of trunk, got {name!r}")
            for tasks, key in ((reached, "reached"), (tried, "tried")):
                tasks[index[name]] = sum(1 << self._tasks.index(task) for task in by[key])
        self._reached_by, self._tried_by = reached, tried
        self._unreached, self._owners = {}, None
