"""Snapshots of a network's running statistics, restored when a step fails."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn

from cs_kernels.nn.task_norm import task_norms
from cs_kernels.ops.backends import direct
from cs_kernels.ops.operands import unavailable

if unavailable is None:
    from cs_kernels import _C

Buffers = dict[str, Tensor | None]

Sizes = dict[str, list[tuple[int, torch.dtype]]]

_SMALL = 64 << 10
"""Bytes; torch copies larger tensors with several threads."""


def _writable(buffer: Tensor) -> bool:
    """Whether a buffer can be written in place: it is neither expanded nor sparse."""
    if buffer.layout is not torch.strided:
        return False
    return all(
        stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its memory has the conjugates or the negatives of its values."""
    return tensor.is_conj() or tensor.is_neg()


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies values, one tensor after the other where torch cannot copy all together."""
    if any(map(_is_lazy, targets + sources)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    else:
        torch._foreach_copy_(targets, sources)


def _put_back(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Writes the copies; a tensor that a step has given another size or type gets its own again."""
    same: tuple[list[Tensor], list[Tensor]] = [], []
    for tensor, copy in zip(tensors, copies, strict=True):
        if (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype):
            same[0].append(tensor)
            same[1].append(copy)
        else:
            tensor.data = copy.clone()
    if same[0]:
        _copy(*same)


def _is_packed(tensor: Tensor) -> bool:
    """Whether its copy is one of many that are made together."""
    if type(tensor) is not Tensor or not tensor.is_contiguous() or _is_lazy(tensor):
        return False
    return tensor.device.type != "cpu" or tensor.nbytes <= _SMALL


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of one dtype and device, one behind the other in memory."""
    numels = [tensor.numel() for tensor in tensors]
    parts = torch.split(torch.cat([tensor.detach().flatten() for tensor in tensors]), numels)
    return [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]


def _of_norms(modules: Sequence[Buffers]) -> list[Tensor]:
    """The running statistics among the buffers of modules."""
    names = "running_mean", "running_var", "num_batches_tracked"
    norms = [buffers for buffers in modules if buffers.get("running_var") is not None]
    return [tensor for b in norms for name in names if (tensor := b.get(name)) is not None]


class _Snapshot:
    """The buffers of some modules, and copies of them, made when it is."""

    @torch.no_grad()
    def __init__(self, modules: Sequence[Buffers]) -> None:
        self._modules = list(modules)
        self._slots = [(buffers, name) for buffers in modules for name in buffers]
        self._values = [buffers[name] for buffers, name in self._slots]
        # torch copies a list of one dtype and device in few kernels, a mixed one tensor by tensor.
        alike: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        for tensor in {id(b): b for b in self._values if b is not None and _writable(b)}.values():
            kind = (tensor.dtype, tensor.device, _is_packed(tensor))
            alike.setdefault(kind, []).append(tensor)
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        self._copiers: list[Callable[[], object]] = []
        native: dict[int, Tensor] = {}
        for (_, device, together), tensors in alike.items():
            copies = packed(tensors) if together else [tensor.clone() for tensor in tensors]
            self._pairs.append((tensors, copies))
            if together and device.type == "cpu":
                native |= {id(t): copy for t, copy in zip(tensors, copies, strict=True)}
            elif together and (copier := direct("copier", device)):
                self._copiers.append(copier(tensors, copies))
            else:
                self._copiers.append(partial(_copy, copies, tensors))
        self._native = unavailable is None and _C.Snapshot(
            self._modules, [native.get(id(value)) for value in self._values]
        )

    @torch.no_grad()
    def take(self, modules: Sequence[Buffers]) -> bool:
        """Copies the buffers anew, if they are the same tensors, with the same memory layout."""
        same = len(modules) == len(self._modules) and all(map(is_, modules, self._modules))
        if not (same and self._native and self._native.take()):
            return False
        for copier in self._copiers:
            copier()
        return True

    @torch.no_grad()
    def put_back(self) -> None:
        for (buffers, name), value in zip(self._slots, self._values, strict=True):
            buffers[name] = value
        for tensors, copies in self._pairs:
            _put_back(tensors, copies)


class RunningStatistics:
    """The buffers that a task's forward pass may change, and a copy of them.

    They belong to the trunk, and to modules outside it that a task uses (`first_use`).
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._of_task: dict[str | None, list[Buffers]] = {}
        """For each task, the buffers of its normalizations; for None, those of other modules."""
        self._outside: dict[str, list[weakref.ref[nn.Module]]] = {}
        self._snapshots: dict[str | None, _Snapshot] = {}
        self._taken: list[_Snapshot] | None = None
        """The snapshots of the current step, in order."""
        self.find(trunk)

    def find(self, trunk: nn.Module) -> None:
        """Finds the modules of the trunk, which may have been replaced."""
        self._of_task.clear()
        own: set[nn.Module] = set()
        for norm in task_norms(trunk):
            for task in norm.tasks:
                modules = norm.of(task).modules()
                self._of_task.setdefault(task, []).extend(m._buffers for m in modules)
            own.update(norm.modules())
        self._of_task[None] = [m._buffers for m in trunk.modules() if m not in own]

    def _modules(self, task: str | None) -> list[Buffers]:
        modules = self._of_task.get(task, [])
        outside = self._outside.get(task, []) if task is not None else []
        return modules + [m._buffers for m in (ref() for ref in outside) if m is not None]

    def _take(self, task: str | None) -> _Snapshot:
        # Reused from step to step: a step costs one copy and no allocation.
        modules = self._modules(task)
        snapshot = self._snapshots.get(task)
        if snapshot is None or not snapshot.take(modules):
            snapshot = self._snapshots[task] = _Snapshot(modules)
        return snapshot

    def of_norms(self, tasks: Sequence[str]) -> dict[str | None, list[Tensor]]:
        """The trunk's running statistics that the passes of some tasks change, by task."""
        return {task: _of_norms(self._of_task.get(task, ())) for task in (None, *tasks)}

    def outside(self, task: str) -> list[Tensor]:
        """The running statistics of the modules outside the trunk that only this task uses."""
        others = {ref for other in self._outside if other != task for ref in self._outside[other]}
        modules = (ref() for ref in self._outside.get(task, ()) if ref not in others)
        return _of_norms([m._buffers for m in modules if m is not None])

    def sizes(self) -> Sizes:
        """By task: the number of elements and the type of each tensor of `outside`."""
        return {task: [(t.numel(), t.dtype) for t in self.outside(task)] for task in self._outside}

    def first_use(self, module: nn.Module, task: str) -> None:
        """Notes a module outside the trunk, before it first runs for a task."""
        if module._buffers:
            self._outside.setdefault(task, []).append(weakref.ref(module))
            if self._taken is not None:
                self._taken.append(_Snapshot([module._buffers]))

    @contextlib.contextmanager
    def restored_on_error(self, tasks: Sequence[str], always: bool = False) -> Iterator[None]:
        """Restores the buffers if the `with` block raises, or always."""
        before, self._taken = self._taken, [self._take(task) for task in (None, *tasks)]
        raised = True
        try:
            yield
            raised = False
        finally:
            if raised or always:
                # A module of several tasks has several copies; the first has the values before.
                for snapshot in reversed(self._taken):
                    snapshot.put_back()
            self._taken = before
