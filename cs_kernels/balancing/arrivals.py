"""Hooks that see gradients on their way to `.grad`, and the ends of steps."""

import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from cs_kernels.balancing.sketches import Sketches
from cs_kernels.torch_internals.fsdp import (
    groups_of,
    is_sharded,
    modules_that_shard,
    sharded_parameters,
)
from cs_kernels.torch_internals.memory import lone_holders

Take = Callable[[Any, int, tuple[Tensor | None, ...], Tensor], tuple[Tensor | None] | None]
"""Called with an object, a parameter's index, the hook's argument (a tuple with the gradient), and
the leaf; returns a tuple with the gradient to accumulate instead, or None for no change."""


class Blocks:
    """Warns of a loop that makes passes but ends no step, or that ends steps without any pass.

    Such a loop would train with the plain sum.
    """

    MOST_BLOCKS = 1000
    """More passes than any accumulation of micro-batches needs."""
    MOST_DROPS = 20
    """More often than a loop sets gradients to None and changes parameters in one step."""
    EMPTY_STEPS = 10

    def __init__(self) -> None:
        self._since_step = 0
        self._drops = 0
        self._version = 0
        self._empty_steps = 0
        self._warned = False

    def open(self) -> None:
        """Counts a pass; warns once after too many passes or drops without the end of a step."""
        self._since_step += 1
        self._empty_steps = 0
        many = self._since_step >= self.MOST_BLOCKS or self._drops >= self.MOST_DROPS
        if many and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._since_step} passes of GradientBalancer have been made, and no step has"
                " ended: pass the optimizer that steps these parameters as optimizer=, or None and"
                " call update() after each step",
                stacklevel=5,
            )

    def drop(self, version: int) -> None:
        """Counts that the loop has dropped gradients, unless the parameters have not changed.

        Args:
            version: The sum of the parameters' versions, to leave out steps that a scaler skips.

        """
        self._drops += version != self._version
        self._version = version

    def end_step(self) -> None:
        """Counts the end of a step; warns after `EMPTY_STEPS` steps in a row without a pass."""
        self._empty_steps += self._since_step == 0
        self._since_step = self._drops = 0
        if self._empty_steps == self.EMPTY_STEPS:
            warnings.warn(
                f"{self.EMPTY_STEPS} steps have ended without a block of GradientBalancer.task, so"
                " gradients have the weight 1: run each task's backward pass in such a block, or"
                " all passes with GradientBalancer.backward",
                stacklevel=4,
            )


class Arrivals:
    """Hooks at the autograd nodes that accumulate the parameters' gradients.

    The hooks are not attached to the parameters, so copies of a network have no hooks.

    Args:
        parameters: The parameters.
        owner: The first argument of `take`, referenced weakly.
        take: Called with each gradient before its accumulation.
        sketches: The sketches, which replace the hooks by faster ones that do the same.

    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], owner: Any, take: Take, sketches: Sketches
    ) -> None:
        self._owner, self._take = weakref.ref(owner), take
        self._parameters = parameters
        self._sketches = sketches
        self._whole = {n: p for n, p in enumerate(parameters) if not is_sharded(p)}
        self._kinds: list[tuple[torch.dtype, torch.device] | None] = [None] * len(parameters)
        """The dtypes and devices with which the parameters were hooked."""
        self._hooked: dict[int, tuple[Any, Any]] = {}
        """The node and the hook's handle, by index of a parameter."""
        lone_holders()  # Cached: its first call runs backward passes, best outside other passes.
        self._sharding = modules_that_shard(parameters)
        groups = [group for module in self._sharding for group in groups_of(module)]
        known = {p.sharded_param for group in groups for p in group.fsdp_params}
        if any(is_sharded(p) and p not in known for p in parameters):
            raise ValueError(
                "parameters must be sharded by fully_shard alone, got other DTensors, such as those"
                " of tensor parallelism"
            )
        # FSDP creates the unsharded parameters in the first forward pass.
        self._handles = [
            module.register_forward_hook(lambda *_: self.connect()) for module in self._sharding
        ]

    def connect(self) -> None:
        """Adds missing hooks, such as for parameters that were cast, moved or sharded meanwhile."""
        kinds = [(p.dtype, p.device) for p in self._parameters]
        if kinds == self._kinds:
            return
        whole = {s: w for w, s in sharded_parameters(self._sharding).items()}
        for n, (p, kind) in enumerate(zip(self._parameters, kinds, strict=True)):
            leaf = p if n in self._whole else whole.get(p)
            if kind == self._kinds[n] or leaf is None:
                continue
            self._kinds[n] = kind
            self._disconnect(n)
            if leaf.is_floating_point() or leaf.is_complex():
                node = _node_of(leaf)
                arrival = _Arrival(self._owner, self._take, n, leaf)
                hook = self._sketches.hook(leaf, n, arrival)
                self._hooked[n] = node, node.register_prehook(hook)

    def left_in_grad(self, numbers: Collection[int]) -> dict[int, nn.Parameter]:
        """Selects the parameters whose `.grad` is not None; skips sharded ones."""
        return {n: p for n, p in self._whole.items() if n in numbers and p.grad is not None}

    def _disconnect(self, n: int) -> None:
        if n in self._hooked:
            self._hooked.pop(n)[-1].remove()

    def remove(self) -> None:
        """Removes all hooks."""
        for n in [*self._hooked]:
            self._disconnect(n)
        for handle in self._handles:
            handle.remove()


def _node_of(leaf: Tensor) -> Any:
    """The node that accumulates a leaf's gradient; it is the same before and after unfreezing."""
    trains = leaf.requires_grad
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf.requires_grad_(True)
            return get_gradient_edge(leaf).node
    finally:
        leaf.requires_grad_(trains)


class _Arrival:
    """The hook of a leaf's node."""

    def __init__(self, owner: "weakref.ref[Any]", take: Take, number: int, leaf: Tensor) -> None:
        self._owner, self._take = owner, take
        self._number = number
        self._leaf = leaf

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None:
        owner = self._owner()
        # The node still runs if the parameter was frozen after the forward pass.
        if owner is None or not self._leaf.requires_grad:
            return None
        return self._take(owner, self._number, grads, self._leaf)


class StepEnd:
    """The post-step hook of the optimizer, with a weak reference to the balancer's method."""

    def __init__(self, end_step: "weakref.WeakMethod[Callable[[], None]]") -> None:
        self._end_step = end_step

    def __call__(self, *_: object) -> None:
        """Ends a step of the balancer, if there still is one."""
        end_step = self._end_step()
        if end_step is not None:
            end_step()


def release(hooks: Arrivals, handle: Any) -> None:
    """Removes the hooks of a balancer."""
    hooks.remove()
    if handle is not None:
        handle.remove()
