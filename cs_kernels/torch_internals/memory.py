"""Detects gradients whose memory something else holds."""

import torch
from torch import Tensor

_OWN_HOLDERS = 2
"""The references to a storage that nothing else holds: the tensor's, and the Python object's."""


def is_in_foreign_memory(grad: Tensor) -> bool:
    """Whether a later pass may overwrite a gradient.

    This holds if the gradient is a part of a larger allocation, such as a CUDA graph's, or if
    something else holds its memory, such as a function that returns the same buffer from every
    backward pass.
    """
    if grad.layout is not torch.strided:
        return False
    storage = grad.untyped_storage()
    if storage.nbytes() > grad.numel() * grad.element_size():
        return True
    return bool(torch._C._storage_Use_Count(storage._cdata) > _OWN_HOLDERS)
