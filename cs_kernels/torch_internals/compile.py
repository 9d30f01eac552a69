"""torch.compile: the modules that it wraps, its stance, and its recompilation limits."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` or `torch.compile(module)` compiles a module."""
    return module._compiled_call_impl is not None or uncompiled(module) is not module


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


_lock = threading.RLock()
_running = 0
"""The number of passes, in all threads, that run eagerly."""
_restores = contextlib.ExitStack()
"""Restores torch's stance and the warning filters, which belong to the process, when the last of
these passes ends."""


@contextlib.contextmanager
def _force_eager() -> Iterator[None]:
    global _running
    with _lock:
        if not _running:
            _restores.enter_context(torch.compiler.set_stance("force_eager"))
            _restores.enter_context(warnings.catch_warnings())
            # The watcher's global hook only notes modules, so it may run an extra time.
            message = r"Using `torch\.compile\(module\)` when there are global"
            warnings.filterwarnings("ignore", message)
        _running += 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                _restores.close()


def eager() -> contextlib.AbstractContextManager[None]:
    """Runs compiled modules eagerly, so that hooks neither break graphs nor enter them."""
    if "torch._dynamo" not in sys.modules:  # Nothing is compiled; the import takes a second.
        return contextlib.nullcontext()
    return _force_eager()


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
