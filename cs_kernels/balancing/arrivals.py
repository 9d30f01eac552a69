"""Hooks that weigh gradients on their way to `.grad`."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from cs_kernels.torch_internals.fsdp import is_sharded, modules_that_shard, sharded_parameters

Take = Callable[[int, Tensor, bool], Tensor | None]
"""Takes the number of a parameter, a gradient, and whether `.grad` is None; returns the gradient's
weight, or None to leave it."""


class Arrivals:
    """Hooks at the nodes that accumulate the gradients of parameters.

    They are not attached to parameters, so copies of a network have none.

    Args:
        parameters: The parameters.
        take: A bound method, called for each gradient that is accumulated, and not kept alive.

    """

    def __init__(self, parameters: Sequence[nn.Parameter], take: Take) -> None:
        self._take = weakref.WeakMethod(take)
        self._parameters = parameters
        self._nodes: dict[int, tuple[Any, ...]] = {}
        """By parameter: its dtype and device at that time, its node, and the hook's handle."""
        self._sharding = modules_that_shard(parameters)
        # Whole parameters are made in the first forward pass.
        self._handles = [
            module.register_forward_hook(lambda *_: self.connect()) for module in self._sharding
        ]

    def connect(self) -> None:
        """Adds missing hooks: for parameters that were converted or sharded before."""
        whole: dict[Tensor, Tensor] | None = None
        for n, p in enumerate(self._parameters):
            kind = p.dtype, p.device
            if n in self._nodes and self._nodes[n][:2] == kind:
                continue
            leaf: Tensor | None = p
            if is_sharded(p):
                whole = whole or {s: w for w, s in sharded_parameters(self._sharding).items()}
                leaf = whole.get(p)
            if leaf is not None and (leaf.is_floating_point() or leaf.is_complex()):
                self._disconnect(n)
                node = _node_of(leaf)
                handle = node.register_prehook(_Arrival(self._take, n, p, leaf))
                self._nodes[n] = (*kind, node, handle)

    def _disconnect(self, n: int) -> None:
        if n in self._nodes:
            self._nodes.pop(n)[-1].remove()

    def remove(self) -> None:
        """Removes all hooks."""
        for n in [*self._nodes]:
            self._disconnect(n)
        for handle in self._handles:
            handle.remove()


def _node_of(leaf: Tensor) -> Any:
    """The node that accumulates a leaf's gradient; a frozen one, thawed later, has the same."""
    trains = leaf.requires_grad
    leaf.requires_grad_(True)
    node = get_gradient_edge(leaf).node
    leaf.requires_grad_(trains)
    return node


class _Arrival:
    """The hook of a leaf's node."""

    def __init__(
        self, take: "weakref.WeakMethod[Take]", number: int, parameter: Tensor, leaf: Tensor
    ) -> None:
        self._take = take
        self._number = number
        self._parameter = parameter
        self._leaf = leaf

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None] | None:
        take, (grad,) = self._take(), grads
        if take is None or grad is None:
            return None
        leaf, total = self._leaf, self._leaf.grad
        # Hooks that step an optimizer or move `.grad` leave None after every pass, and so may
        # `fully_shard` in a whole parameter.
        moves = bool(getattr(leaf, "_post_accumulate_grad_hooks", None))
        is_first = total is None and leaf is self._parameter and not moves
        weight = take(self._number, grad, is_first)
        if weight is None:
            return None
        if total is not None and not moves and _adds_in_place(total, grad):
            # A weighted copy would need fresh memory, which would dominate the time.
            with torch.no_grad():
                total.addcmul_(grad, weight)
            return (None,)
        return ((grad * weight).to(grad.dtype),)


def _adds_in_place(total: Tensor, grad: Tensor) -> bool:
    """Whether autograd would add a gradient in place."""
    alike = total.dtype is grad.dtype and total.shape == grad.shape
    dense = total.layout is torch.strided is grad.layout
    return alike and dense and not torch.is_grad_enabled()
