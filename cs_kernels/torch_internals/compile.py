"""torch.compile: the modules that it wraps, and its recompilation limits."""

import contextlib
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import nn


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def one_graph_per_task(tasks: int) -> contextlib.AbstractContextManager[Any]:
    """Multiplies torch.compile's recompilation limit (8 by default) by the number of tasks."""
    compiles = "torch._dynamo" in sys.modules and not torch.compiler.is_compiling()
    if tasks == 1 or not compiles:
        return contextlib.nullcontext()
    config = torch._dynamo.config
    return _limits(tasks * config.recompile_limit, tasks * config.accumulated_recompile_limit)


@lru_cache(maxsize=64)
def _limits(recompile: int, accumulated: int) -> contextlib.AbstractContextManager[Any]:
    """A context with these limits of torch.compile; cached, because torch never frees a patch."""
    patch: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=recompile, accumulated_recompile_limit=accumulated
    )
    return patch
