"""Detects gradients whose memory something else holds."""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import TensorWeakRef as TensorWeakRef

_OWN_HOLDERS = 2
"""The references to a storage that one tensor alone uses: the tensor's, the Python object's."""

_use_count: Any = getattr(Tensor, "_use_count", None)
"""Counts the references to a tensor; None if torch does not count them."""


def is_in_foreign_memory(grad: Tensor) -> bool:
    """Whether a later pass may overwrite a gradient.

    True if the gradient is a part of a larger allocation, such as a CUDA graph's, or if something
    else holds its memory, such as a function that returns the same buffer from every backward pass.
    """
    if grad.layout is not torch.strided:
        return False
    storage = grad.untyped_storage()
    if storage.nbytes() > grad.numel() * grad.element_size():
        return True
    return bool(torch._C._storage_Use_Count(storage._cdata) > _OWN_HOLDERS)


def _holders(grads: tuple[Tensor | None, ...], storage: torch.UntypedStorage) -> tuple[int, ...]:
    """The references to the Python object, the tensor, the base of a view (else 0), the storage."""
    grad = grads[0]
    assert grad is not None
    base = grad._base
    return (
        sys.getrefcount(grad),
        _use_count(grad),
        0 if base is None else _use_count(base),
        torch._C._storage_Use_Count(storage._cdata),
    )


@cache
def lone_holders() -> frozenset[tuple[int, ...]]:
    """The reference counts that a hook sees for a gradient that autograd alone holds.

    They differ between versions of Python and of torch, so two backward passes measure them: for a
    gradient that is a whole tensor, and for a view. Empty if torch does not count references.
    """
    found = set[tuple[int, ...]]()
    if _use_count is None:
        return frozenset()
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(2, 2, device="cpu", requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        with node.register_prehook(
            lambda grads: found.add(_holders(grads, grads[0].untyped_storage()))
        ):
            (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
            functional.linear(leaf.detach(), leaf).sum().backward()  # type: ignore[no-untyped-call]
    return frozenset(found)


def may_be_overwritten(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether a hook is free to write into the gradient that autograd is about to accumulate.

    True if the gradient is dense and fills its storage, and autograd alone holds it; False if torch
    does not count references.

    Args:
        grads: The hook's argument. The hook must not hold the gradient by another name.

    """
    grad = grads[0]
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.is_inference():
        return False
    if not all(grad.stride()) or grad._is_zerotensor():
        return False
    storage = grad.untyped_storage()
    if storage.nbytes() != grad.nbytes:
        return False
    del grad
    lone = lone_holders()
    return bool(lone) and _holders(grads, storage) in lone
