"""Task-specific batch normalization: one torch BatchNorm per task, one of which is active."""

import contextlib
import copy
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cs_kernels.options import checked_tasks
from cs_kernels.torch_internals.compile import one_graph_per_task


class TaskBatchNorm(nn.Module):
    """One normalization per task, in a child module with the task's name; the active one runs.

    The children are ordinary torch modules, each with its own weight, bias and statistics, so the
    state dict has `bn1.depth.weight`, and one task's normalization can be frozen or inspected as in
    plain torch.

    Args:
        norms: The normalization of each task.

    Raises:
        ValueError: There is no task, or a name is empty, has a dot, or is a module attribute.

    """

    _stack: ClassVar[Any] = None
    """During `step_together`, the `TrunkPass` that normalizes all tasks' parts of the batch."""

    def __init__(self, norms: dict[str, nn.Module]) -> None:
        super().__init__()
        self.active: str | None = None
        """The task whose normalization runs; None before one is chosen."""
        for task in checked_tasks(norms):
            self.check_new(task)
            self.add_module(task, norms[task])

    def check_new(self, task: str) -> None:
        """Checks that a task can be the name of a child module.

        Raises:
            ValueError: The module has an attribute of this name.

        """
        if hasattr(self, task):
            raise ValueError(f"a task must not have the name of a module attribute, got {task!r}")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in order."""
        return tuple(self._modules)

    def of(self, task: str) -> nn.Module:
        """The normalization of one task.

        Raises:
            ValueError: There is no such task.

        """
        norm = self._modules.get(task)
        if norm is None:
            raise ValueError(f"task must be one of {list(self._modules)}, got {task!r}")
        return norm

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Normalizes with the active task's module.

        Raises:
            RuntimeError: No task is active, or torch.fx or torch.jit traces the network.

        """
        if not torch.compiler.is_compiling():
            _record_run(self, args, kwargs)
        if self._stack is not None:
            stacked: Tensor = self._stack.normalize(self, *args, **kwargs)
            return stacked
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if tracing or (args and isinstance(args[0], torch.fx.Proxy)):
            raise RuntimeError(
                "tracing would hard-code the active task: trace the network of one task,"
                " extract_task(network, task)"
            )
        if self.active is None:
            raise RuntimeError(
                "no active task: call the network inside `with active_task(network, task)`"
                f" or after `set_task(network, task)`; the tasks are {list(self._modules)}"
            )
        result: Tensor = self._modules[self.active](*args, **kwargs)  # type: ignore[misc]
        return result

    def extra_repr(self) -> str:
        """The active task, for the module's repr."""
        return f"active={self.active!r}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint from before the conversion has one value for all tasks.
        grandchildren = {name for norm in self.children() for name in norm._modules}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key[len(prefix) :]
            child, dot, _ = name.partition(".")
            if not dot or (child in grandchildren and child not in self._modules):
                value = state_dict.pop(key)
                for task in self._modules:
                    own = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
                    state_dict.setdefault(f"{prefix}{task}.{name}", own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


Run = tuple[tuple[int, object], ...]
"""The normalizations that ran, in order: the id of each, and the type of the autograd node that
produced its input, or None if the type is unknown."""

_recording = threading.local()


@contextlib.contextmanager
def recorded_norms() -> Iterator[list[tuple[int, object]]]:
    """Records a `Run` of this thread within the `with` block; compiled code is not recorded."""
    outer = getattr(_recording, "entries", None)
    _recording.entries = []
    try:
        yield _recording.entries
    finally:
        _recording.entries = outer


def _record_run(norm: TaskBatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    entries = getattr(_recording, "entries", None)
    if entries is not None:
        x = args[0] if args else kwargs.get("input")
        node_type = None if norm._stack is not None else type(getattr(x, "grad_fn", 0))
        entries.append((id(norm), node_type))


class _FromFeatures(TaskBatchNorm):
    _norm: ClassVar[type[_BatchNorm]]

    def __init__(
        self,
        num_features: int,
        tasks: Iterable[str],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = eps, momentum, affine, track_running_stats, device, dtype
        super().__init__(
            {task: self._norm(num_features, *options) for task in checked_tasks(tasks)}
        )


class TaskBatchNorm1d(_FromFeatures):
    """One `torch.nn.BatchNorm1d` per task; `tasks` is the second argument."""

    _norm = nn.BatchNorm1d


class TaskBatchNorm2d(_FromFeatures):
    """One `torch.nn.BatchNorm2d` per task; `tasks` is the second argument."""

    _norm = nn.BatchNorm2d


class TaskBatchNorm3d(_FromFeatures):
    """One `torch.nn.BatchNorm3d` per task; `tasks` is the second argument."""

    _norm = nn.BatchNorm3d


def task_norms(module: nn.Module) -> list[TaskBatchNorm]:
    """The task-specific normalizations in a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
    return [child for child in module.modules() if isinstance(child, TaskBatchNorm)]


def some_task_norms(module: nn.Module) -> list[TaskBatchNorm]:
    """`task_norms`; raises ValueError if there are none."""
    norms = task_norms(module)
    if not norms:
        raise ValueError(
            f"module must have task-specific normalization, but {type(module).__name__} has none"
        )
    return norms


def modules_outside_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules` without task-specific normalizations and their children."""
    visited: set[nn.Module] = set()
    stack = [("", module)]
    while stack:
        prefix, parent = stack.pop()
        if parent in visited or isinstance(parent, TaskBatchNorm):
            continue
        visited.add(parent)
        yield prefix, parent
        dot = prefix and f"{prefix}."
        children = reversed(parent._modules.items())
        stack += [(dot + name, child) for name, child in children if child is not None]


def set_task(module: nn.Module, task: str) -> None:
    """Makes a task active in every task-specific normalization of a module.

    For a network that is compiled for more than eight tasks, use `active_task`, which increases
    torch.compile's recompilation limit inside its `with` block.

    Raises:
        ValueError: A normalization lacks the task; no active task has changed.

    """
    norms = task_norms(module)
    for norm in norms:
        norm.of(task)
    for norm in norms:
        norm.active = task


@contextlib.contextmanager
def active(norms: Iterable[TaskBatchNorm], task: str) -> Iterator[None]:
    """`active_task` for a list of normalizations."""
    before = [(norm, norm.active) for norm in norms]
    for norm, _ in before:
        norm.of(task)
    try:
        for norm, _ in before:
            object.__setattr__(norm, "active", task)  # Faster than Module.__setattr__.
        with one_graph_per_task(len(before[0][0].tasks) if before else 1):
            yield
    finally:
        for norm, previous in before:
            object.__setattr__(norm, "active", previous)


def active_task(module: nn.Module, task: str) -> contextlib.AbstractContextManager[None]:
    """Makes a task active in a module within the `with` block, then restores the previous task.

    Raises:
        ValueError: A task-specific normalization in the module lacks the task.

    Examples:
        >>> trunk = cs.nn.convert_task_batchnorm(torch.nn.BatchNorm1d(3), ["depth", "edges"])
        >>> with cs.nn.active_task(trunk, "edges"):
        ...     y = trunk(torch.randn(8, 3))

    """
    return active(task_norms(module), task)
