"""Weights a gradient on its way to `.grad`, in place where nothing else holds the memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from cs_kernels.torch_internals.memory import may_be_overwritten


class Weighting(NamedTuple):
    """Where a gradient times a weight goes."""

    update: Tensor
    """The gradient's own memory, its parameter's `.grad`, or fresh memory."""
    weight: Tensor
    """Float64, a scalar."""
    add: bool
    """Whether to add to the update rather than overwrite it."""

    def apply(self, grad: Tensor) -> None:
        """Weights the gradient; half precision would round the weight."""
        update, weight, add = self
        if grad.dtype.itemsize == 2:
            product = grad.float() * weight
            update.copy_(update + product if add else product)
        elif add:
            update.addcmul_(grad, weight)
        else:
            torch.mul(grad, weight, out=update)


def weighting_of(grads: tuple[Tensor | None, ...], leaf: Tensor, weight: Tensor) -> Weighting:
    """Chooses where a gradient goes: fresh memory would dominate the time.

    Args:
        grads: The argument of the hook of the leaf's node.
        leaf: The leaf.
        weight: The gradient's weight.

    """
    # The gradient gets no name before its holders are counted.
    total = leaf.grad
    if total is None and may_be_overwritten(grads):
        assert grads[0] is not None
        return Weighting(grads[0], weight, add=False)
    grad = grads[0]
    assert grad is not None
    if total is not None and _adds_in_place(total, grad, leaf):
        return Weighting(total, weight, add=True)
    return Weighting(torch.empty_like(grad), weight, add=False)


def _adds_in_place(total: Tensor, grad: Tensor, leaf: Tensor) -> bool:
    """Whether autograd would add a gradient to `.grad` in place, and call no hook afterwards."""
    alike = total.dtype is grad.dtype and total.shape == grad.shape
    dense = total.layout is torch.strided is grad.layout
    return alike and dense and not getattr(leaf, "_post_accumulate_grad_hooks", None)
