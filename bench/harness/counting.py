"""Counts through torch's dispatcher: host synchronizations, gradients' memory, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read from the device: a number, a shape, or the status of a decomposition.
_WAITING = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
    "_unique2",
    "_linalg_eigh",
    "_linalg_svd",
    "_linalg_check_errors",
    "linalg_pinv",
}


class _Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0].removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
        self.count += name in _WAITING or bool(masks)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        targets = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
        to_host = name == "to" and any(str(target) == "cpu" for target in targets)
        self.count += name in {"cpu", "numpy", "tolist", "__array__"} or to_host
        return func(*args, **kwargs)


def host_synchronizations(run: Callable[[], object]) -> int:
    """The host synchronizations that a run on the CPU would make if its tensors were on a GPU."""
    with _Operators() as operators, _Functions() as functions:
        run()
    return operators.count + functions.count


class GradientMemory(TorchDispatchMode):
    """Adds up the live allocations that hold gradients of convolutions' weights.

    These are the weight gradients that `convolution_backward` returns, and everything that an
    operator writes with such an allocation among its inputs: `.grad`, buckets, rows, updates,
    temporaries. Each allocation counts with its whole size until it is freed. Buffers inside an
    operator or inside a backend of torch.distributed are not counted.

    Args:
        parameters: Tensors that are not gradients, although operators write them from gradients,
            such as the optimizer's parameters.
        everything: Whether to count every allocation that an operator makes or writes to. After a
            forward pass, these are the gradients of all weights and of activations.

    """

    def __init__(self, parameters: Iterable[Tensor], *, everything: bool = False) -> None:
        super().__init__()
        self._everything = everything
        self._parameters = {_storage(parameter)._cdata for parameter in parameters}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls operators on its shards, which are counted here.
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._everything:
            self._take_new(result, tree_leaves((args, kwargs)))
            self._take_written(func, args, kwargs)
        elif func is torch.ops.aten.convolution_backward.default:
            self._take([result[1]])
        elif any(self._holds_gradients(leaf) for leaf in tree_leaves((args, kwargs))):
            self._take(tree_leaves(result))
            self._take_written(func, args, kwargs)
        return result

    def _take_new(self, result: object, given: Iterable[object]) -> None:
        """Counts the results that are not views of the operator's inputs."""
        known = {_storage(leaf)._cdata for leaf in given if isinstance(leaf, Tensor)}
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._take(t for t in tensors if _storage(t)._cdata not in known)

    def _take_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for n, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[n] if n < len(args) else kwargs.get(argument.name)
                self._take(tree_leaves(given))

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
        """The bytes that hold gradients now."""
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._live.values())

    def start(self) -> None:
        """Resets the peak."""
        self.peak = self.now()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


_COLLECTIVES = {
    "c10d::allreduce_": ("all-reduce", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "c10d::_allgather_base_": ("all-gather", 0, 1),
    "c10d::allgather_": ("all-gather", 0, 1),
}
"""By operator: the kind, the index of the whole tensor's argument, how often a ring sends it."""


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes that each rank of a ring sends for them.

    `by_kind` has the number and the bytes of each kind of collective, for collectives between
    "devices" and for messages between hosts ("control"), whose tensors are not floating-point.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, dict[str, tuple[int, float]]] = {"devices": {}, "control": {}}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            kind, whole, times = _COLLECTIVES[func._schema.name]  # KeyError if its cost is unknown.
            tensors = [t for t in tree_leaves(args[whole]) if isinstance(t, Tensor)]
            ranks = next(
                dist.ProcessGroup.unbox(arg).size()
                for arg in args
                if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            found = self.by_kind["devices" if tensors[0].is_floating_point() else "control"]
            number, sent = found.get(kind, (0, 0.0))
            more = times * (ranks - 1) / ranks * sum(t.nbytes for t in tensors)
            found[kind] = number + 1, sent + more
        return func(*args, **(kwargs or {}))
