"""Weights gradients on their way to `.grad`, where possible without allocating memory."""

import torch
from torch import Tensor

from cs_kernels.torch_internals.autograd import has_late_hooks
from cs_kernels.torch_internals.memory import may_be_overwritten


def factors(weights: Tensor) -> list[list[Tensor | float]]:
    """Float64 weights [modules, K] by task and module; numbers on the CPU, for faster operators."""
    columns = weights.unbind(1)
    return [c.tolist() if c.device.type == "cpu" else [*c.unbind()] for c in columns]


def update_of(grads: tuple[Tensor | None, ...], leaf: Tensor) -> tuple[Tensor | None, bool]:
    """Chooses the memory for a weighted gradient: the gradient's own, or `.grad`, to add to it.

    Args:
        grads: The argument of the hook of the leaf's node. No variable may hold the gradient,
            because `may_be_overwritten` counts its references.
        leaf: The leaf.

    Returns:
        The tensor to write to, or None to allocate one; and whether to add to this tensor.

    """
    total = leaf.grad
    if total is None:
        return (grads[0] if may_be_overwritten(grads) else None), False
    adds = grads[0] is not None and _adds_in_place(total, grads[0], leaf)
    return (total if adds else None), adds


def _adds_in_place(total: Tensor, grad: Tensor, leaf: Tensor) -> bool:
    """Whether autograd would add a gradient to `.grad` in place, and call no hook afterwards."""
    alike = total.dtype is grad.dtype and total.shape == grad.shape
    dense = total.layout is torch.strided is grad.layout and type(total) is Tensor
    return alike and dense and not has_late_hooks(leaf)


def weigh(grad: Tensor, factor: Tensor | float, update: Tensor | None, *, adds: bool) -> Tensor:
    """Weights a gradient, into the update if there is one; returns the result."""
    if grad.dtype.itemsize == 2:  # Half precision would round the weight.
        product = grad.float() * factor
        if update is None:
            return product.to(grad.dtype)
        return update.copy_(update + product if adds else product)
    if update is None:
        return (grad * factor).to(grad.dtype)
    if not adds:
        return update.mul_(factor)
    if isinstance(factor, float):
        return update.add_(grad, alpha=factor)
    return update.addcmul_(grad, factor)
