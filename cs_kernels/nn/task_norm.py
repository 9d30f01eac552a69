"""Task-specific batch normalization: one plain torch BatchNorm a task, and which one is active."""

import contextlib
import copy
import sys
import threading
from collections.abc import Iterable, Iterator, KeysView, Set
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def check_tasks(tasks: Iterable[str]) -> tuple[str, ...]:
    """The tasks as a tuple, from any ordered iterable, such as the keys of a dictionary.

    Raises:
        TypeError: `tasks` is a string, has no order, or holds something that is not a string.
        ValueError: It is empty, names a task twice, or a name cannot be that of a module.

    """
    unordered = isinstance(tasks, Set) and not isinstance(tasks, KeysView)
    ordered = isinstance(tasks, Iterable) and not isinstance(tasks, str) and not unordered
    names = tuple(tasks) if ordered else ()
    if not ordered or not all(isinstance(name, str) for name in names):
        raise TypeError(f"tasks must be a sequence of names, got {tasks!r}")
    if not names:
        raise ValueError("tasks must name at least one task, got none")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tasks must be distinct, got {name!r} twice in {list(names)}")
        if not name or "." in name:
            raise ValueError(f"tasks must be non-empty names without a dot, got {name!r}")
    return names


class TaskBatchNorm(nn.Module):
    """One normalization a task, in a child module named by the task; only the active one runs.

    The children are ordinary torch modules, each with its own weight, bias and statistics: the
    state dict has `bn1.depth.weight`, and freezing or inspecting one task's is plain torch.

    Args:
        norms: The normalization of each task.

    Raises:
        ValueError: A task has the name of a module attribute.

    """

    _stack: ClassVar[Any] = None
    """During `step_together`, the `TrunkPass` that normalizes the parts of all tasks."""

    def __init__(self, norms: dict[str, nn.Module]) -> None:
        super().__init__()
        self.active: str | None = None
        """The task whose normalization runs; None before one is chosen."""
        for task in check_tasks(norms):
            self.check_new(task)
            self.add_module(task, norms[task])

    def check_new(self, task: str) -> None:
        """Raises ValueError for a task that cannot be the name of a child module."""
        if hasattr(self, task):
            raise ValueError(f"tasks must not be named as an attribute of a module: {task!r}")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks, in their order."""
        return tuple(self._modules)

    def of(self, task: str) -> nn.Module:
        """The normalization of one task.

        Raises:
            ValueError: There is none for it.

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
            _note_run(self, args, kwargs)
        if self._stack is not None:
            stacked: Tensor = self._stack.normalize(self, *args, **kwargs)
            return stacked
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if tracing or (args and isinstance(args[0], torch.fx.Proxy)):
            raise RuntimeError(
                "a trace would keep the task that is active now for good: trace the network of one"
                " task, extract_task(network, task)"
            )
        if self.active is None:
            raise RuntimeError(
                "no active task: call the network inside `with active_task(network, task)`"
                f" or after `set_task(network, task)`; the tasks are {list(self._modules)}"
            )
        result: Tensor = self._modules[self.active](*args, **kwargs)  # type: ignore[misc]
        return result

    def extra_repr(self) -> str:
        """The active task."""
        return f"active={self.active!r}"

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint from before the conversion has one tensor for all tasks.
        inner = {name for norm in self.children() for name in norm._modules}
        for key in [key for key in state_dict if key.startswith(prefix)]:
            name = key[len(prefix) :]
            child, dot, _ = name.partition(".")
            if not dot or (child in inner and child not in self._modules):
                value = state_dict.pop(key)
                for task in self._modules:
                    own = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
                    state_dict.setdefault(f"{prefix}{task}.{name}", own)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


Run = tuple[tuple[int, object], ...]
"""The normalizations that ran, in order: the id of each, and the kind of autograd's node that has
made its input, None if that is not known."""

_recorded = threading.local()


@contextlib.contextmanager
def recorded_norms() -> Iterator[list[tuple[int, object]]]:
    """The entries of a `Run`, of this thread and the `with` block; compiled code makes none."""
    before = getattr(_recorded, "ran", None)
    _recorded.ran = []
    try:
        yield _recorded.ran
    finally:
        _recorded.ran = before


def _note_run(norm: TaskBatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ran = getattr(_recorded, "ran", None)
    if ran is not None:
        x = args[0] if args else kwargs.get("input")
        ran.append((id(norm), None if norm._stack is not None else type(getattr(x, "grad_fn", 0))))


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
    ) -> None:
        super().__init__(
            {
                task: self._norm(num_features, eps, momentum, affine, track_running_stats)
                for task in check_tasks(tasks)
            }
        )


class TaskBatchNorm1d(_FromFeatures):
    """`torch.nn.BatchNorm1d` a task, with its arguments and `tasks` after the first."""

    _norm = nn.BatchNorm1d


class TaskBatchNorm2d(_FromFeatures):
    """`torch.nn.BatchNorm2d` a task, with its arguments and `tasks` after the first."""

    _norm = nn.BatchNorm2d


class TaskBatchNorm3d(_FromFeatures):
    """`torch.nn.BatchNorm3d` a task, with its arguments and `tasks` after the first."""

    _norm = nn.BatchNorm3d


def task_norms(module: nn.Module) -> list[TaskBatchNorm]:
    """The task-specific normalizations in a module.

    Raises:
        TypeError: It is not a module.

    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
    return [child for child in module.modules() if isinstance(child, TaskBatchNorm)]


def some_task_norms(module: nn.Module) -> list[TaskBatchNorm]:
    """As `task_norms`, of which there must be some."""
    norms = task_norms(module)
    if not norms:
        raise ValueError(
            f"module must have task-specific normalization, got {type(module).__name__} with none"
        )
    return norms


def modules_outside_norms(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are no task-specific normalization and in none, with names, each once."""
    seen: set[nn.Module] = set()
    found = [("", module)]
    while found:
        prefix, parent = found.pop()
        if parent in seen or isinstance(parent, TaskBatchNorm):
            continue
        seen.add(parent)
        yield prefix, parent
        dot = prefix and f"{prefix}."
        children = reversed(parent._modules.items())
        found += [(dot + name, child) for name, child in children if child is not None]


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def set_task(module: nn.Module, task: str) -> None:
    """Makes a task active in every task-specific normalization of a module.

    For a network that is compiled for more than eight tasks, use `active_task`: it raises
    torch.compile's recompilation limit meanwhile.

    Raises:
        ValueError: One of them does not know the task; none has been changed.

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
        with _a_graph_a_task(len(before[0][0].tasks) if before else 1):
            yield
    finally:
        for norm, previous in before:
            object.__setattr__(norm, "active", previous)


def _a_graph_a_task(tasks: int) -> contextlib.AbstractContextManager[Any]:
    """Multiplies torch.compile's recompilation limit (8 by default) by the number of tasks."""
    compiles = "torch._dynamo" in sys.modules and not torch.compiler.is_compiling()
    if tasks == 1 or not compiles:
        return contextlib.nullcontext()
    config = torch._dynamo.config
    return _limits(tasks * config.recompile_limit, tasks * config.accumulated_recompile_limit)


@lru_cache(maxsize=64)
def _limits(recompile: int, accumulated: int) -> contextlib.AbstractContextManager[Any]:
    """Sets torch.compile's limits meanwhile. Kept, since torch never frees a patch: 200 bytes."""
    patch: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=recompile, accumulated_recompile_limit=accumulated
    )
    return patch


def active_task(module: nn.Module, task: str) -> contextlib.AbstractContextManager[None]:
    """Makes a task active in a module inside the `with`; afterwards the previous one is.

    Raises:
        ValueError: A task-specific normalization in it does not know the task.

    Examples:
        >>> trunk = cs.nn.convert_task_batchnorm(torch.nn.BatchNorm1d(3), ["depth", "edges"])
        >>> with cs.nn.active_task(trunk, "edges"):
        ...     y = trunk(torch.randn(8, 3))

    """
    return active(task_norms(module), task)
