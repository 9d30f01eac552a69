"""Snapshots of a network's buffers, such as running statistics, restored when a step fails."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor, nn

from cs_kernels.nn.task_norm import task_norms

Buffers = dict[str, Tensor | None]

Sizes = dict[str, list[tuple[int, torch.dtype]]]


def _running_statistics(modules: Sequence[Buffers]) -> list[Tensor]:
    """The running statistics among the buffers of modules."""
    names = "running_mean", "running_var", "num_batches_tracked"
    norms = [buffers for buffers in modules if buffers.get("running_var") is not None]
    return [tensor for b in norms for name in names if (tensor := b.get(name)) is not None]


def _writable(buffer: Tensor) -> bool:
    """Whether a buffer is neither expanded nor sparse, so that it can be written in place."""
    if buffer.layout is not torch.strided:
        return False
    return all(
        stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _identical(now: Sequence[object], before: Sequence[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _write_back(tensors: list[Tensor], copies: list[Tensor]) -> None:
    """Writes through `.data`: otherwise, a new version would break graphs that saved the tensor."""
    pairs = list(zip(tensors, copies, strict=True))
    alike = all(t.shape == c.shape and t.dtype == c.dtype for t, c in pairs)
    if alike and not any(t.is_conj() or t.is_neg() for t in tensors):
        torch._foreach_copy_([tensor.data for tensor in tensors], copies)
        return
    for tensor, copy in pairs:
        if (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype):
            tensor.data.copy_(copy)
        else:  # The step changed its size or dtype.
            tensor.data = copy.clone()


class _Snapshot:
    """The buffers of several modules, and copies of their values.

    A large network has thousands of small running statistics. One call of torch copies all
    statistics with the same dtype, device and number of dimensions.
    """

    def __init__(self, modules: Sequence[Buffers]) -> None:
        self._modules = list(modules)
        self._slots = [(buffers, name) for buffers in modules for name in buffers]
        self._values = [buffers[name] for buffers, name in self._slots]
        others = {id(b): b for b in self._values if b is not None and _writable(b)}
        batches: dict[tuple[torch.dtype, int, torch.device], list[Tensor]] = {}
        for tensor in _running_statistics(modules):
            plain = type(tensor) is Tensor and tensor.dim() < 2
            if plain and others.pop(id(tensor), None) is not None:
                batches.setdefault((tensor.dtype, tensor.dim(), tensor.device), []).append(tensor)
        self._batches = list(batches.values())
        self._formats = self._formats_now()
        self._others = list(others.values())
        self._copy()

    def _formats_now(self) -> list[list[tuple[torch.Size, torch.dtype]]]:
        return [[(tensor.shape, tensor.dtype) for tensor in batch] for batch in self._batches]

    @torch.no_grad()
    def _copy(self) -> None:
        self._packed = [torch.cat(b) if b[0].dim() else torch.stack(b) for b in self._batches]
        self._clones = [tensor.clone() for tensor in self._others]

    def take(self, modules: Sequence[Buffers]) -> bool:
        """Copies the same buffers again; returns False if this snapshot no longer fits them.

        A snapshot does not fit after a module or tensor was replaced, or a running statistic was
        resized or cast.
        """
        values = [*chain.from_iterable(map(dict.values, modules))]
        if not (_identical(modules, self._modules) and _identical(values, self._values)):
            return False
        if self._formats != self._formats_now():
            return False
        self._copy()
        return True

    @torch.no_grad()
    def put_back(self) -> None:
        for (buffers, name), value in zip(self._slots, self._values, strict=True):
            buffers[name] = value
        if self._others:
            _write_back(self._others, self._clones)
        for batch, packed, formats in zip(self._batches, self._packed, self._formats, strict=True):
            shapes = [shape for shape, _ in formats]
            flat = torch.split(packed.flatten(), [shape.numel() for shape in shapes])
            _write_back(batch, [copy.view(shape) for copy, shape in zip(flat, shapes, strict=True)])


class RunningStatistics:
    """The buffers that a task's forward pass may change, and snapshots of them.

    The buffers belong to the trunk, and to modules outside it that a task uses (`first_use`).
    """

    def __init__(self, trunk: nn.Module) -> None:
        self._buffers: dict[str | None, list[Buffers]] = {}
        """By task, the buffers of its normalizations; for None, the buffers of other modules."""
        self._outside: dict[str, list[weakref.ref[nn.Module]]] = {}
        self._snapshots: dict[str | None, _Snapshot] = {}
        self._active: list[_Snapshot] | None = None
        """The snapshots of the current step, in order."""
        self.find(trunk)

    def find(self, trunk: nn.Module) -> None:
        """Finds the modules of the trunk, which may have been replaced."""
        self._buffers.clear()
        in_norms: set[nn.Module] = set()
        for norm in task_norms(trunk):
            for task in norm.tasks:
                modules = norm.of(task).modules()
                self._buffers.setdefault(task, []).extend(m._buffers for m in modules)
            in_norms.update(norm.modules())
        self._buffers[None] = [m._buffers for m in trunk.modules() if m not in in_norms]

    def _all_buffers(self, task: str | None) -> list[Buffers]:
        outside = self._outside.get(task, []) if task is not None else []
        modules = (ref() for ref in outside)
        return self._buffers.get(task, []) + [m._buffers for m in modules if m is not None]

    def _take(self, task: str | None) -> _Snapshot:
        # A snapshot is reused from step to step, unless an enclosing context still needs it.
        modules = self._all_buffers(task)
        snapshot = self._snapshots.get(task)
        if snapshot is None or snapshot in (self._active or ()) or not snapshot.take(modules):
            snapshot = self._snapshots[task] = _Snapshot(modules)
        return snapshot

    def of_norms(self, tasks: Sequence[str]) -> dict[str | None, list[Tensor]]:
        """The trunk's running statistics that these tasks' passes change, by task."""
        return {task: _running_statistics(self._buffers.get(task, ())) for task in (None, *tasks)}

    def outside(self, task: str) -> list[Tensor]:
        """The running statistics of the modules outside the trunk that only this task uses."""
        others = {ref for other in self._outside if other != task for ref in self._outside[other]}
        modules = (ref() for ref in self._outside.get(task, ()) if ref not in others)
        return _running_statistics([m._buffers for m in modules if m is not None])

    def sizes(self) -> Sizes:
        """By task: the number of elements and the dtype of each tensor of `outside`."""
        return {task: [(t.numel(), t.dtype) for t in self.outside(task)] for task in self._outside}

    def first_use(self, module: nn.Module, task: str) -> None:
        """Registers a module outside the trunk, before it first runs for a task."""
        if module._buffers:
            self._outside.setdefault(task, []).append(weakref.ref(module))
            if self._active is not None:
                self._active.append(_Snapshot([module._buffers]))

    @contextlib.contextmanager
    def restored_on_error(self, tasks: Sequence[str], always: bool = False) -> Iterator[None]:
        """Restores the buffers if the `with` block raises, or always."""
        outer, self._active = self._active, [self._take(task) for task in (None, *tasks)]
        raised = True
        try:
            yield
            raised = False
        finally:
            if raised or always:
                # A module of several tasks has several snapshots; the first has the initial values.
                for snapshot in reversed(self._active):
                    snapshot.put_back()
            self._active = outer
