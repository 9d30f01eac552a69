"""The running statistics of a trunk, and how a step that fails leaves them as they were."""

import contextlib
from collections.abc import Iterator, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from cs_kernels.nn import task_norms
from cs_kernels.ops.operands import misfits


class _Snapshot:
    """Copies of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        # Lists of one type on one device take few kernels, mixed ones a kernel a tensor.
        alike: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensors_alike, copies_alike = alike.setdefault((tensor.dtype, tensor.device), ([], []))
            tensors_alike.append(tensor)
            copies_alike.append(copy)
        self._lists = list(alike.values())

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the very tensors, with the memory that they had."""
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        return same and not misfits(self._tensors, self._copies)

    def take(self) -> None:
        for tensors, copies in self._lists:
            torch._foreach_copy_(copies, tensors)

    def put_back(self) -> None:
        for tensors, copies in self._lists:
            torch._foreach_copy_(tensors, copies)


class RunningStatistics:
    """The buffers of a trunk: those that a task's forward pass may change, and a copy of them."""

    def __init__(self, trunk: nn.Module) -> None:
        self._of_task: dict[str, list[nn.Module]] = {}
        own: set[nn.Module] = set()
        for norm in task_norms(trunk):
            for task in norm.tasks:
                self._of_task.setdefault(task, []).extend(norm.of(task).modules())
            own.update(norm.modules())
        self._common = [module for module in trunk.modules() if module not in own]
        self._snapshots: dict[tuple[str, ...], _Snapshot] = {}

    def _buffers(self, tasks: Sequence[str]) -> list[Tensor]:
        modules = [*self._common, *(m for task in tasks for m in self._of_task.get(task, []))]
        return [b for module in modules for b in module._buffers.values() if b is not None]

    @contextlib.contextmanager
    def restored_on_error(self, tasks: Sequence[str]) -> Iterator[None]:
        """Puts them back if anything is raised inside the `with`."""
        # Kept from step to step, so that a step costs one copy and no allocation.
        buffers, key = self._buffers(tasks), tuple(tasks)
        snapshot = self._snapshots.get(key)
        if snapshot is None or not snapshot.is_of(buffers):
            snapshot = self._snapshots[key] = _Snapshot(buffers)
        snapshot.take()
        try:
            yield
        except BaseException:
            snapshot.put_back()
            raise

    @contextlib.contextmanager
    def restored(self, tasks: Sequence[str]) -> Iterator[None]:
        """Puts them back in any case."""
        saved = [(buffer, buffer.clone()) for buffer in self._buffers(tasks)]
        try:
            yield
        finally:
            for buffer, before in saved:
                buffer.copy_(before)
