"""The running statistics of a trunk, and how a step that fails leaves them as they were."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cs_kernels.nn import task_norms


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
        self._copies: dict[tuple[str, ...], list[Tensor]] = {}

    def _buffers(self, tasks: Sequence[str]) -> list[Tensor]:
        modules = [*self._common, *(m for task in tasks for m in self._of_task.get(task, []))]
        return [b for module in modules for b in module._buffers.values() if b is not None]

    @contextlib.contextmanager
    def restored_on_error(self, tasks: Sequence[str]) -> Iterator[None]:
        """Puts them back if anything is raised inside the `with`."""
        buffers = self._buffers(tasks)
        # Kept from step to step, so that a step costs one copy and no allocation.
        key = tuple(tasks)
        copies = self._copies.get(key, [])
        if [(c.shape, c.dtype, c.device) for c in copies] != [
            (b.shape, b.dtype, b.device) for b in buffers
        ]:
            copies = self._copies[key] = [torch.empty_like(b) for b in buffers]
        if buffers:
            torch._foreach_copy_(copies, buffers)
        try:
            yield
        except BaseException:
            if buffers:
                torch._foreach_copy_(buffers, copies)
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
