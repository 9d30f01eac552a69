"""Converts networks to task-specific batch normalization; adds and extracts tasks."""

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
    some_task_norms,
)
from cs_kernels.options import checked_tasks
from cs_kernels.torch_internals.compile import uncompiled


def _process_groups(module: nn.Module) -> dict[int, Any]:
    """A memo for `deepcopy`, so that copies of SyncBatchNorm share its process group."""
    groups = (getattr(child, "process_group", None) for child in module.modules())
    return {id(group): group for group in groups if group is not None}


def _copied(norm: nn.Module) -> nn.Module:
    return copy.deepcopy(norm, _process_groups(norm))


def convert_task_batchnorm(module: nn.Module, tasks: Iterable[str]) -> nn.Module:
    """Replaces every batch normalization with one copy per task.

    Each copy has the class of the original, which may be a subclass of torch's, and starts with the
    original's weight, bias and statistics, for example pretrained ones. Batch normalization can be
    turned into SyncBatchNorm before or after the conversion. A module that is used several times
    stays shared. Convert before building the optimizer, because the copies have new parameters.
    A checkpoint from before the conversion can still be loaded: every task gets its values.

    Args:
        module: A network, or a batch normalization itself.
        tasks: The names of the tasks, in order.

    Returns:
        The module, changed in place, or its replacement.

    Raises:
        ValueError: `tasks` is invalid, or the module has no batch normalization, contains a lazy
            module that has not run, or is already converted for other tasks.
        TypeError: `module` is not a torch module, or `tasks` is not a sequence of strings.

    """
    names = checked_tasks(tasks)
    _check_convertible(module, names)
    replacements: dict[nn.Module, nn.Module] = {}

    def convert(child: nn.Module) -> nn.Module:
        if child in replacements:
            return replacements[child]
        if isinstance(child, _BatchNorm):
            norm = TaskBatchNorm({task: _copied(child) for task in names})
            norm.training = child.training
            replacements[child] = norm
            return norm
        replacements[child] = child
        if not isinstance(child, TaskBatchNorm):
            for name, grandchild in list(child._modules.items()):
                if grandchild is not None:
                    child._modules[name] = convert(grandchild)
        return child

    return convert(module)


def _check_convertible(module: nn.Module, tasks: tuple[str, ...]) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
    has_batch_norm = False
    norm_counts: Counter[str] = Counter()
    for name, child in module.named_modules():
        contains_norm = any(isinstance(own, _BatchNorm) for own in child._modules.values())
        if contains_norm and isinstance(child, _ConvNd | nn.Linear):
            raise ValueError(
                f"module must not be fused for quantization before the conversion, got the fused"
                f" {type(child).__name__} {name or 'module'!r}: convert first, then fuse the"
                " network that extract_task returns"
            )
        # BatchNorms inside a TaskBatchNorm count too: the module may already be converted.
        has_batch_norm = has_batch_norm or isinstance(child, _BatchNorm)
        if isinstance(child, LazyModuleMixin) and child.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(
                f"module must have run once before the conversion, got {name or 'module'}, an"
                f" uninitialized {type(child).__name__}"
            )
        if isinstance(child, TaskBatchNorm) and child.tasks != tasks:
            raise ValueError(
                f"{name or 'module'} is already converted for the tasks {list(child.tasks)}, got"
                f" {list(tasks)}"
            )
        if "norm" in type(child).__name__.lower():
            norm_counts[type(child).__name__] += 1
    if not has_batch_norm:
        counts = ", ".join(f"{count} {name}" for name, count in norm_counts.items()) or "none"
        raise ValueError(
            f"module must have batch normalization to convert, got {type(module).__name__} with"
            f" these normalizations: {counts}"
        )


def add_task(module: nn.Module, task: str, *, like: str) -> list[nn.Parameter]:
    """Adds a task to every task-specific normalization, with a copy of another task's module.

    This is for a trained trunk that has to learn one more task. Pass the new parameters to the
    torch optimizer, and build a new `MultiTaskOptimizer` with all tasks.

    Args:
        module: A network with task-specific normalization.
        task: The name of the new task.
        like: The task to copy, including its weights, statistics and frozen parameters.

    Returns:
        The new parameters, for `optimizer.add_param_group({"params": ...})`.

    Raises:
        ValueError: The module has no task-specific normalization, a normalization lacks the task
            `like`, or the new task already exists or has an invalid name; the module is unchanged.
        TypeError: The task is not a string.

    Examples:
        >>> trunk = cs.nn.convert_task_batchnorm(torch.nn.BatchNorm1d(3), ["depth", "edges"])
        >>> len(cs.nn.add_task(trunk, "normals", like="depth"))
        2

    """
    (task,) = checked_tasks([task])
    norms = some_task_norms(module)
    for norm in norms:
        norm.of(like)
        if task in norm.tasks:
            raise ValueError(f"task must be new, got {task!r}; the tasks are {list(norm.tasks)}")
        norm.check_new(task)
    for norm in norms:
        norm.add_module(task, _copied(norm.of(like)))
    return [parameter for norm in norms for parameter in norm.of(task).parameters()]


def extract_task(module: nn.Module, task: str) -> nn.Module:
    """Copies a network for one task, with that task's plain normalizations.

    The copy is a plain torch network, as before `convert_task_batchnorm`, for one task's
    predictions, checkpoints and export. The module itself is unchanged.

    Args:
        module: A network with task-specific normalization.
        task: The task to keep.

    Raises:
        ValueError: The module has no task-specific normalization, or a normalization lacks the
            task.

    Examples:
        >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        >>> trunk = cs.nn.convert_task_batchnorm(trunk, ["depth", "edges"])
        >>> cs.nn.extract_task(trunk, "depth")[1]
        BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)

    """
    norms = some_task_norms(module)
    # deepcopy replaces each TaskBatchNorm with its entry in the memo, wherever it is referenced.
    memo = _process_groups(module)
    for norm in norms:
        memo[id(norm)] = copy.deepcopy(norm.of(task), memo)
    plain: nn.Module = copy.deepcopy(uncompiled(module), memo)
    return plain


@torch.no_grad()
def update_bn(loader: Iterable[Any], trunk: nn.Module, task: str) -> None:
    """Recomputes the running statistics of one task over a data set.

    Use it for averaged weights, or after training with batches that were too small. It replaces
    `torch.optim.swa_utils.update_bn`, which would reset all tasks' statistics.
    Batch normalization in `eval()` mode is frozen and keeps its statistics. If the whole trunk is
    in `eval()` mode, all statistics of the task are recomputed.

    Args:
        loader: Yields inputs of the trunk on its device, or lists or tuples that begin with one.
        trunk: A network with task-specific normalization.
        task: The task, which is active during the call; other tasks' statistics are unchanged.

    Raises:
        ValueError: The trunk has no task-specific normalization, a normalization lacks the task,
            all of the task's normalizations are frozen, or the loader yields nothing.

            After any exception, the statistics are unchanged.

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
            f"trunk must have a batch normalization for task {task!r} that is not frozen, but it"
            " has none, or all of them are in eval mode"
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
            norm.momentum = None  # Makes the statistics means over all batches.
        with active_task(trunk, task):
            for batch in loader:
                trunk(batch[0] if isinstance(batch, list | tuple) else batch)
                batches += 1
        if not batches:
            raise ValueError(f"loader must yield at least one batch, got none from {loader!r}")
    except BaseException:
        for norm, _, buffers in before:
            for name, value in buffers.items():
                buffer = norm._buffers[name]
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
