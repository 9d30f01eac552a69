"""Replaces the reductions of DistributedDataParallel wrappers; rejects FSDP1 wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs_kernels.torch_internals.ddp import is_ddp, refuse_fsdp1, running_ddp, set_reductions
from cs_kernels.trunk.watcher import LocalHook

_switched_off: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""For each module, the number of `Wrappers` that keep its reductions switched off."""


class _SeesWrapper(LocalHook):
    """A forward pre-hook of the trunk that finds the DistributedDataParallel around it."""

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = weakref.ref(wrappers)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        around, wrappers = running_ddp(), self._wrappers()
        if around is not None and wrappers is not None:
            wrappers.take(around)


class Wrappers:
    """The DistributedDataParallel modules around a network or parts of it.

    DistributedDataParallel averages gradients only in the first backward pass after a forward pass,
    but surgery needs every task's averaged gradients. Its reductions and broadcasts are therefore
    switched off while any `Wrappers` object contains the module.
    """

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._ranks: list[int] | None = None
        """The ranks that train together; None before `watch`, empty if the caller named none."""
        self.release = weakref.finalize(self, _switch_on, self._found)
        """Switches the modules' reductions on again, unless another `Wrappers` needs them off."""

    def watch(self, trunk: nn.Module, ranks: Sequence[int]) -> None:
        """Takes every wrapper that runs the trunk from now on; all wrappers must have these ranks.

        Args:
            trunk: The shared module.
            ranks: The ranks that train together; empty if the caller has not named them.

        Raises:
            ValueError: A wrapper has different ranks.

        """
        self._ranks = list(ranks)
        for module in self._found:
            self._check_ranks(module)
        handle = trunk.register_forward_pre_hook(_SeesWrapper(self))
        weakref.finalize(self, handle.remove)

    def _check_ranks(self, module: Any) -> None:
        if self._ranks == []:
            raise ValueError(
                "process_group must be the process group of the DistributedDataParallel around"
                " trunk, got None:"
                " pass the wrapped network as trunk, or give"
                " process_group=torch.distributed.group.WORLD"
            )
        ranks = dist.get_process_group_ranks(module.process_group)
        if self._ranks is not None and set(ranks) != set(self._ranks):
            raise ValueError(
                "process_group must have the ranks of the DistributedDataParallel around trunk,"
                f" {ranks}, got {self._ranks}"
            )

    def take(self, module: nn.Module) -> None:
        """Switches off a module's reductions, if it is a DistributedDataParallel.

        Raises:
            TypeError: The module is a FullyShardedDataParallel (FSDP1).
            ValueError: The module's reductions cannot be switched off, or it has different ranks.

        """
        refuse_fsdp1(module)
        if is_ddp(module) and not any(module is other for other in self._found):
            if getattr(module, "static_graph", False):
                raise ValueError(
                    "DistributedDataParallel must be built without static_graph=True, whose"
                    " reductions cannot be switched off: MultiTaskOptimizer reduces the gradients"
                )
            self._check_ranks(module)
            self._found.append(module)
            _switched_off[module] = _switched_off.get(module, 0) + 1
        self.switch_off()  # The end of a `no_sync` block may have switched other modules on.

    def switch_off(self) -> None:
        """Switches off all reductions again: frameworks such as Lightning may have enabled them."""
        for module in self._found:
            set_reductions(module, on=False)

    def group(self) -> dist.ProcessGroup | None:
        """The process group of the first wrapper, or None."""
        return self._found[0].process_group if self._found else None


def _switch_on(modules: Sequence[Any]) -> None:
    for module in modules:
        _switched_off[module] -= 1
        if not _switched_off[module]:
            del _switched_off[module]
            # Don't restore the earlier setting: it may have come from `no_sync`.
            set_reductions(module, on=True)
