"""DistributedDataParallel, whose reductions can be switched off, and FSDP1, which is refused."""

import sys
from typing import Any

from torch import nn

from cs_kernels.torch_internals.compile import uncompiled

FLAGS = "require_backward_grad_sync", "require_forward_param_sync"
"""The attributes of a DistributedDataParallel that switch its reductions and broadcasts on."""


def _class(module: str, name: str) -> Any:
    """A class; None if its module was not imported, because then it has no objects."""
    return getattr(sys.modules.get(module), name, None)


def is_ddp(module: object) -> bool:
    kind = _class("torch.nn.parallel.distributed", "DistributedDataParallel")
    return kind is not None and isinstance(module, kind)


def refuse_fsdp1(module: nn.Module) -> None:
    kind = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    if kind is not None and isinstance(module, kind):
        raise TypeError(
            "trunk must not be in FullyShardedDataParallel (FSDP1), whose flat parameters have no"
            " output channels: use torch.distributed.fsdp.fully_shard(trunk)"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile or DistributedDataParallel wrapped, or the module itself."""
    while True:
        inner = uncompiled(module)
        if is_ddp(inner):
            inner = inner.module  # type: ignore[assignment]
        if inner is module:
            return module
        module = inner


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward pass runs now, or None."""
    kind = _class("torch.nn.parallel.distributed", "DistributedDataParallel")
    return getattr(kind, "_active_ddp_module", None)


def set_reductions(module: Any, *, on: bool) -> None:
    """Switches the reductions and broadcasts of a DistributedDataParallel on or off."""
    for name in FLAGS:
        setattr(module, name, on)
