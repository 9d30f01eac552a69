"""Task-specific batch normalization: one plain torch BatchNorm a task, and which one is active."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = [
    "TaskBatchNorm",
    "TaskBatchNorm1d",
    "TaskBatchNorm2d",
    "TaskBatchNorm3d",
    "active_task",
    "convert_task_batchnorm",
    "set_task",
]


def check_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    """The tasks as a tuple.

    Raises:
        TypeError: `tasks` is a string, or holds something that is not one.
        ValueError: It is empty, names a task twice, or a name cannot be that of a module.

    """
    if isinstance(tasks, str) or not all(isinstance(task, str) for task in tasks):
        raise TypeError(f"tasks must be a sequence of names, got {tasks!r}")
    if len(tasks) == 0:
        raise ValueError("tasks must name at least one task, got none")
    for i, task in enumerate(tasks):
        if task in tasks[:i]:
            raise ValueError(f"tasks must be distinct, got {task!r} twice in {list(tasks)}")
        if not task or "." in task:
            raise ValueError(f"tasks must be non-empty names without a dot, got {task!r}")
    return tuple(tasks)


class TaskBatchNorm(nn.Module):
    """One normalization a task, in a child module named by the task; only the active one runs.

    The children are ordinary torch modules, each with its own weight, bias and statistics, so the
    state dict reads `bn1.depth.weight`, and freezing or inspecting one task's is plain torch.

    Args:
        norms: The normalization of each task.

    Raises:
        ValueError: A task's name is that of an attribute of every module.

    """

    def __init__(self, norms: dict[str, nn.Module]) -> None:
        super().__init__()
        self.active: str | None = None
        for task in check_tasks(list(norms)):
            if hasattr(self, task):
                raise ValueError(f"tasks must not be named as an attribute of a module: {task!r}")
            self.add_module(task, norms[task])

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
            RuntimeError: No task is active.

        """
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


class _FromFeatures(TaskBatchNorm):
    _norm: ClassVar[type[_BatchNorm]]

    def __init__(
        self,
        num_features: int,
        tasks: Sequence[str],
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


def convert_task_batchnorm(module: nn.Module, tasks: Sequence[str]) -> nn.Module:
    """Replaces every batch normalization by a copy for each task.

    Each copy starts with the weight, bias and statistics of the original (a pretrained one, say),
    and is of its class, which may be a subclass of torch's. A module used in several places stays
    one module. Convert before building the optimizer: the copies are new parameters.

    Args:
        module: A network, or a batch normalization itself.
        tasks: The names of the tasks.

    Returns:
        The module, changed in place, or its replacement.

    Raises:
        ValueError: `tasks` does not fit, or the module is already converted for other tasks.
        TypeError: `tasks` is not a sequence of names.

    """
    names = check_tasks(tasks)
    for name, child in module.named_modules():
        if isinstance(child, TaskBatchNorm) and child.tasks != names:
            raise ValueError(
                f"tasks must be those of {name or 'module'}, which is already converted,"
                f" {list(child.tasks)}; got {list(names)}"
            )
    replaced: dict[nn.Module, TaskBatchNorm] = {}

    def convert(child: nn.Module) -> nn.Module:
        if isinstance(child, TaskBatchNorm):
            return child
        if isinstance(child, _BatchNorm):
            if child not in replaced:
                replaced[child] = TaskBatchNorm({task: copy.deepcopy(child) for task in names})
                replaced[child].training = child.training
            return replaced[child]
        for name, grandchild in list(child._modules.items()):
            if grandchild is not None:
                child._modules[name] = convert(grandchild)
        return child

    return convert(module)


def task_norms(module: nn.Module) -> list[TaskBatchNorm]:
    """The task-specific normalizations in a module."""
    return [child for child in module.modules() if isinstance(child, TaskBatchNorm)]


def set_task(module: nn.Module, task: str) -> None:
    """Makes a task active in every task-specific normalization of a module.

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
    """`active_task` for normalizations that are already at hand."""
    before = [(norm, norm.active) for norm in norms]
    for norm, _ in before:
        norm.of(task)
    try:
        for norm, _ in before:
            norm.active = task
        yield
    finally:
        for norm, previous in before:
            norm.active = previous


def active_task(module: nn.Module, task: str) -> contextlib.AbstractContextManager[None]:
    """Makes a task active in a module inside the `with`; afterwards it is as it was before.

    Raises:
        ValueError: A task-specific normalization in it does not know the task.

    Example:
        >>> trunk = cs.nn.convert_task_batchnorm(torch.nn.BatchNorm1d(3), ["depth", "edges"])
        >>> with cs.nn.active_task(trunk, "edges"):
        ...     y = trunk(torch.randn(8, 3))

    """
    return active(task_norms(module), task)
