"""Networks with task-specific batch normalization: made, extended, taken apart, and recomputed."""

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from cs_kernels.nn.task_norm import (
    TaskBatchNorm,
    active_task,
    check_tasks,
    some_task_norms,
    uncompiled,
)


def _process_groups(module: nn.Module) -> dict[int, Any]:
    """The process groups of SyncBatchNorm, for `deepcopy` to keep them as they are."""
    groups = (getattr(child, "process_group", None) for child in module.modules())
    return {id(group): group for group in groups if group is not None}


def _copied(norm: nn.Module) -> nn.Module:
    return copy.deepcopy(norm, _process_groups(norm))


def convert_task_batchnorm(module: nn.Module, tasks: Iterable[str]) -> nn.Module:
    """Replaces every batch normalization by a copy for each task.

    Each copy starts with the weight, bias and statistics of the original (a pretrained one, say),
    and has its class, which may be a subclass of torch's: SyncBatchNorm can be made of batch
    normalization before or after. A module used several times stays one module. Convert before
    building the optimizer: the copies have new parameters. A checkpoint from
    before the conversion can still be loaded: every task gets its values.

    Args:
        module: A network, or a batch normalization itself.
        tasks: The names of the tasks, in order.

    Returns:
        The module, changed in place, or its replacement.

    Raises:
        ValueError: `tasks` does not fit, the module has no batch normalization or a lazy one that
            has not run, or it is already converted for other tasks.
        TypeError: `tasks` is not a sequence of strings.

    """
    names = check_tasks(tasks)
    _check_convertible(module, names)
    replaced: dict[nn.Module, nn.Module] = {}

    def convert(child: nn.Module) -> nn.Module:
        if child in replaced:
            return replaced[child]
        if isinstance(child, _BatchNorm):
            norm = TaskBatchNorm({task: _copied(child) for task in names})
            norm.training = child.training
            replaced[child] = norm
            return norm
        replaced[child] = child
        if not isinstance(child, TaskBatchNorm):
            for name, grandchild in list(child._modules.items()):
                if grandchild is not None:
                    child._modules[name] = convert(grandchild)
        return child

    return convert(module)


def _check_convertible(module: nn.Module, tasks: tuple[str, ...]) -> None:
    """There is a batch normalization to convert, or it is converted for these tasks already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
    found = False
    others: Counter[str] = Counter()
    for name, child in module.named_modules():
        inner = any(isinstance(own, _BatchNorm) for own in child._modules.values())
        if inner and isinstance(child, _ConvNd | nn.Linear):
            raise ValueError(
                f"module must not be fused for quantization when it is converted, got"
                f" {type(child).__name__} at {name or 'module'!r}, which computes with its"
                " normalization itself: convert before, and fuse what extract_task returns"
            )
        found = found or isinstance(child, _BatchNorm)  # Also those inside a TaskBatchNorm.
        if isinstance(child, LazyModuleMixin) and child.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(
                f"module must have run once before it is converted, got {name or 'module'},"
                f" a {type(child).__name__} that does not know its size"
            )
        if isinstance(child, TaskBatchNorm) and child.tasks != tasks:
            raise ValueError(
                f"tasks must be those of {name or 'module'}, which is already converted,"
                f" {list(child.tasks)}; got {list(tasks)}"
            )
        if "norm" in type(child).__name__.lower():
            others[type(child).__name__] += 1
    if not found:
        seen = ", ".join(f"{count} {name}" for name, count in others.items()) or "none"
        raise ValueError(
            f"module must have batch normalization to convert, got {type(module).__name__} with"
            f" these normalizations: {seen}"
        )


def add_task(module: nn.Module, task: str, *, like: str) -> list[nn.Parameter]:
    """Adds a task to every task-specific normalization, as a copy of another task's.

    For a trained trunk that learns one more task: hand the new parameters to the torch optimizer,
    and build a `MultiTaskOptimizer` of all tasks.

    Args:
        module: A network with task-specific normalization.
        task: The name of the new task.
        like: The task to copy, with its weights, statistics and frozen parameters.

    Returns:
        The new parameters, for `optimizer.add_param_group({"params": ...})`.

    Raises:
        ValueError: The module has no task-specific normalization, `like` is unknown to one of them,
            or the task is known already or cannot be a name; nothing has been changed.
        TypeError: The task is not a string.

    Examples:
        >>> trunk = cs.nn.convert_task_batchnorm(torch.nn.BatchNorm1d(3), ["depth", "edges"])
        >>> len(cs.nn.add_task(trunk, "normals", like="depth"))
        2

    """
    (task,) = check_tasks([task])
    norms = some_task_norms(module)
    for norm in norms:
        norm.of(like)
        if task in norm.tasks:
            raise ValueError(
                f"task must be a new one, got {task!r}; the tasks are {list(norm.tasks)}"
            )
        norm.check_new(task)
    for norm in norms:
        norm.add_module(task, _copied(norm.of(like)))
    return [parameter for norm in norms for parameter in norm.of(task).parameters()]


def extract_task(module: nn.Module, task: str) -> nn.Module:
    """A copy of a network for one task, with its normalizations instead of the task-specific ones.

    The copy is a plain torch network, as before `convert_task_batchnorm`: for predictions of one
    task, checkpoints and export. The module itself does not change.

    Args:
        module: A network with task-specific normalization.
        task: The task to keep.

    Raises:
        ValueError: The module has no task-specific normalization, or one that does not know the
            task.

    Examples:
        >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> trunk = cs.nn.convert_task_batchnorm(trunk, ["depth", "edges"])
        >>> cs.nn.extract_task(trunk, "depth")[1]
        BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)

    """
    norms = some_task_norms(module)
    # The memo stands for copies of each TaskBatchNorm, so every reference to one is replaced.
    memo = _process_groups(module)
    for norm in norms:
        memo[id(norm)] = copy.deepcopy(norm.of(task), memo)
    plain: nn.Module = copy.deepcopy(uncompiled(module), memo)
    return plain


@torch.no_grad()
def update_bn(loader: Iterable[Any], trunk: nn.Module, task: str) -> None:
    """Recomputes the running statistics of one task over a data set.

    Use it for averaged weights, or after training with too small batches. It works as
    `torch.optim.swa_utils.update_bn`, which resets the statistics of all tasks. Batch normalization
    in `eval()` is frozen, and keeps its statistics; but in a trunk that is in `eval()` as a whole,
    those of the task are recomputed.

    Args:
        loader: Yields inputs of the trunk, or lists and tuples that begin with one, on the trunk's
            device.
        trunk: A network with task-specific normalization.
        task: The task, which is active meanwhile; the statistics of the others do not change.

    Raises:
        ValueError: The trunk has no task-specific normalization, one does not know the task, all
            are frozen, or the loader yields nothing.

            After any exception, the statistics are as they were before.

    """
    norms = [
        child
        for norm in some_task_norms(trunk)
        for child in norm.of(task).modules()
        if isinstance(child, _BatchNorm)
    ]
    if any(module.training for module in trunk.modules()):
        norms = [norm for norm in norms if norm.training]
    if not norms:
        raise ValueError(
            f"trunk must have a normalization of {task!r} in training, got all of them in eval()"
        )
    frozen = [
        module
        for module in trunk.modules()
        if isinstance(module, _BatchNorm) and not module.training and module not in norms
    ]
    modes = [(module, module.training) for module in trunk.modules()]
    before = [(norm, norm.momentum, copy.deepcopy(norm._buffers)) for norm in norms]
    batches = 0
    try:
        trunk.train()
        for norm in frozen:
            norm.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # The mean over all batches.
        with active_task(trunk, task):
            for batch in loader:
                trunk(batch[0] if isinstance(batch, list | tuple) else batch)
                batches += 1
        if not batches:
            raise ValueError(f"loader must yield at least one batch, got none from {loader!r}")
    except BaseException:
        for norm, _, buffers in before:
            for name, value in buffers.items():
                now = norm._buffers[name]
                if now is not None and value is not None:
                    now.copy_(value)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
