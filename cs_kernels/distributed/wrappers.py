"""Networks in DistributedDataParallel, whose reductions are replaced, and in FSDP1, refused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.nn import uncompiled


def _class(module: str, name: str) -> Any:
    """A class, if its module was imported: nobody has an object of it before."""
    return getattr(sys.modules.get(module), name, None)


def _is_ddp(module: object) -> bool:
    kind = _class("torch.nn.parallel.distributed", "DistributedDataParallel")
    return kind is not None and isinstance(module, kind)


def _refuse_fsdp1(module: nn.Module) -> None:
    kind = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    if kind is not None and isinstance(module, kind):
        raise TypeError(
            "trunk must not be in FullyShardedDataParallel (FSDP1), whose flat parameters have no"
            " output channels: use torch.distributed.fsdp.fully_shard(trunk)"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile or DistributedDataParallel wrapped, or the module itself.

    Raises:
        TypeError: FullyShardedDataParallel (FSDP1) wrapped it.

    """
    while True:
        for child in module.modules():
            _refuse_fsdp1(child)
        inner = uncompiled(module)
        if _is_ddp(inner):
            inner = inner.module  # type: ignore[assignment]
        if inner is module:
            return module
        module = inner


class Wrappers:
    """The DistributedDataParallel modules around some parameters.

    A second backward pass through one forward pass is not reduced by them, and surgery before the
    reduction would be another algorithm. So their reductions and broadcasts are switched off.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._found: list[Any] = []

    def find(self) -> None:
        """Finds them; they may be around the trunk or around a network that contains it."""
        if not dist.is_available() or not dist.is_initialized():
            return
        kind = _class("torch.nn.parallel.distributed", "DistributedDataParallel")
        # By `type`, as a proxy's `__class__` is that of its object, which may be gone.
        for module in [m for m in gc.get_objects() if kind and issubclass(type(m), kind)]:
            if not self._parameters.isdisjoint(map(id, module.parameters())):
                self.take(module)

    def take(self, module: nn.Module) -> None:
        """Switches off a module's reductions, if it is a DistributedDataParallel.

        Raises:
            TypeError: It is a FullyShardedDataParallel (FSDP1).
            ValueError: Its reductions cannot be switched off.

        """
        _refuse_fsdp1(module)
        if _is_ddp(module) and not any(module is other for other in self._found):
            if getattr(module, "static_graph", False):
                raise ValueError(
                    "DistributedDataParallel must be built without static_graph=True, which reduces"
                    " gradients on its own; MultiTaskOptimizer reduces them"
                )
            self._found.append(module)
            self.switch_off()

    def switch_off(self) -> None:
        """Switches off the reductions of all, which others may have switched on, as Lightning."""
        for module in self._found:
            module.require_backward_grad_sync = False
            module.require_forward_param_sync = False

    def group(self) -> dist.ProcessGroup | None:
        """The process group of the first one, if there is one."""
        return self._found[0].process_group if self._found else None
