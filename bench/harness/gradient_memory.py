"""The memory that holds gradients, as torch's dispatcher sees it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class GradientMemory(TorchDispatchMode):
    """Adds up the live allocations that hold gradients of convolutions' weights.

    These are the weight gradients that `convolution_backward` returns, and whatever an operator has
    written with such an allocation among its inputs: `.grad`, buckets, rows, updates, temporaries.
    Each counts with its whole size, until it is freed. Not seen are buffers inside of an operator
    or of a backend of torch.distributed.

    Args:
        parameters: What the optimizer writes with gradients, and is no gradient.

    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = {_storage(parameter)._cdata for parameter in parameters}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It calls the operators of its shards, which come here.
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution_backward.default:
            self._take([result[1]])
        elif any(self._holds_gradients(leaf) for leaf in tree_leaves((args, kwargs))):
            self._take(tree_leaves(result))
            for n, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[n] if n < len(args) else kwargs.get(argument.name)
                    self._take(tree_leaves(given))
        return result

    def _holds_gradients(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and _storage(leaf)._cdata in self._live

    def _take(self, leaves: Iterable[object]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                storage = _storage(leaf)
                if storage._cdata not in self._parameters and storage._cdata not in self._live:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Bytes that hold gradients."""
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._live.values())

    def start(self) -> None:
        """Begins a new peak."""
        self.peak = self.now()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
