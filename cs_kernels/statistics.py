"""Snapshots of a network's running statistics, restored when a step fails."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from operator import is_

import torch
from torch import Tensor, nn

from cs_kernels.nn import task_norms
from cs_kernels.ops.operands import misfits

Buffers = dict[str, Tensor | None]


def _writable(buffer: Tensor) -> bool:
    """Whether a buffer can be written in place: it is neither expanded nor sparse."""
    if buffer.layout is not torch.strided:
        return False
    return all(
        stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


class _Snapshot:
    """The buffers of some modules, and copies of them."""

    def __init__(self, modules: Sequence[Buffers]) -> None:
        self._slots = [(buffers, name) for buffers in modules for name in buffers]
        self._values = [buffers[name] for buffers, name in self._slots]
        self._tensors = [b for b in self._values if b is not None and _writable(b)]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        # torch copies a list of one dtype and device in few kernels, a mixed one tensor by tensor.
        alike: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensors_alike, copies_alike = alike.setdefault((tensor.dtype, tensor.device), ([], []))
            tensors_alike.append(tensor)
            copies_alike.append(copy)
        self._lists = list(alike.values())

    def is_of(self, values: Sequence[Tensor | None]) -> bool:
        """Whether these are the same tensors, with the memory layout of their copies."""
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and not misfits(self._tensors, self._copies)

    @torch.no_grad()
    def take(self) -> None:
        for tensors, copies in self._lists:
            torch._foreach_copy_(copies, tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        for (buffers, name), value in zip(self._slots, self._values, strict=True):
            buffers[name] = value
        for tensors, copies in self._lists:
            torch._foreach_copy_(tensors, copies)


class RunningStatistics:
    """The buffers that a task's forward pass may change, and a copy of them.

    They belong to the trunk, and to modules outside it that a task uses (`first_use`).
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._of_task: dict[str | None, list[Buffers]] = {}
        """For each task, the buffers of its normalizations; for None, those of other modules."""
        own: set[nn.Module] = set()
        for norm in task_norms(trunk):
            for task in norm.tasks:
                modules = norm.of(task).modules()
                self._of_task.setdefault(task, []).extend(m._buffers for m in modules)
            own.update(norm.modules())
        self._of_task[None] = [m._buffers for m in trunk.modules() if m not in own]
        self._outside: dict[str, list[weakref.ref[nn.Module]]] = {}
        self._snapshots: dict[str | None, _Snapshot] = {}
        self._taken: list[_Snapshot] | None = None
        """The snapshots of the current step, in order."""

    def _modules(self, task: str | None) -> list[Buffers]:
        modules = self._of_task.get(task, [])
        outside = self._outside.get(task, []) if task is not None else []
        return modules + [m._buffers for m in (ref() for ref in outside) if m is not None]

    def _take(self, task: str | None) -> _Snapshot:
        # Reused from step to step: a step costs one copy and no allocation.
        modules = self._modules(task)
        snapshot = self._snapshots.get(task)
        if snapshot is None or not snapshot.is_of([b for m in modules for b in m.values()]):
            snapshot = self._snapshots[task] = _Snapshot(modules)
        snapshot.take()
        return snapshot

    def first_use(self, module: nn.Module, task: str) -> None:
        """To be called before a module outside the trunk runs for a task for the first time."""
        if module._buffers:
            self._outside.setdefault(task, []).append(weakref.ref(module))
            if self._taken is not None:
                self._taken.append(_Snapshot([module._buffers]))
                self._taken[-1].take()

    @contextlib.contextmanager
    def restored_on_error(self, tasks: Sequence[str], always: bool = False) -> Iterator[None]:
        """Restores the buffers if the `with` block raises, or always."""
        self._taken = [self._take(task) for task in (None, *tasks)]
        raised = True
        try:
            yield
            raised = False
        finally:
            if raised or always:
                # A module of several tasks has several copies; the first has the values before.
                for snapshot in reversed(self._taken):
                    snapshot.put_back()
            self._taken = None
