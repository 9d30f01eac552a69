"""A stand-in for CUDA graphs on the CPU.

It records the operators of a step with the tensors that they read and wrote. A replay runs these
operators on the same memory, without the step's Python code.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# A capture on a GPU refuses host reads of numbers, and copies from pageable memory.
_REFUSED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::lift_fresh"}
_ALLOCATES = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _alias(leaf: Any) -> Any:
    """An alias of a tensor; its shape is unchanged if the tensor is reshaped in place."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Tape(TorchDispatchMode):
    """Records operators, including those of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._known: dict[int, Tensor] = {}
        """Keeps one tensor per storage alive, so that no address is reused."""
        self._before: list[tuple[Tensor, Tensor]] = []
        """Storages from outside the capture, as bytes, and copies of them."""
        self._new: list[Tensor] = []
        """Storages that were allocated during the capture, as bytes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name in _REFUSED:
            raise RuntimeError(f"a host synchronization in a capture: {name}")
        for tensor in self._not_seen((args, kwargs)):
            self._before.append((_bytes(tensor), _bytes(tensor).clone()))
        given = tree_map(_alias, (args, kwargs))
        result = func(*args, **kwargs)
        self._new += [_bytes(tensor) for tensor in self._not_seen(result)]
        reshapes = torch.Tag.inplace_view in func.tags
        if name not in _ALLOCATES and not name.startswith("profiler::") and not reshapes:
            self.calls.append((func, *given, _tensors(tree_map(_alias, result))))
        return result

    def _not_seen(self, tree: Any) -> list[Tensor]:
        """One tensor per storage that has not been seen before."""
        found = {_address(tensor): tensor for tensor in _tensors(tree)}
        new = [tensor for address, tensor in found.items() if address not in self._known]
        self._known.update((_address(tensor), _alias(tensor)) for tensor in new)
        return new

    def undo(self) -> None:
        """Restores overwritten memory, and fills newly allocated memory with NaN."""
        for content, before in self._before:
            content.copy_(before)
        for content in self._new:
            content.fill_(255)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, results in self.calls:
                given = {_address(tensor) for tensor in _tensors((args, kwargs))}
                new = [_address(result) not in given for result in results]
                if results and not any(new) and not func._schema.is_mutable:
                    continue  # a view
                values = _tensors(func(*args, **kwargs))
                for result, value, is_new in zip(results, values, new, strict=True):
                    if is_new:
                        result.copy_(value)


class Recorder:
    """Replaces the CUDA graphs in `cs_kernels.engine.cuda_graphs.DEVICES`."""

    capturing: ClassVar[bool] = False
    captures: ClassVar[int] = 0
    replays: ClassVar[int] = 0
    operators: ClassVar[list[str]] = []
    """The operators of the last capture."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"

    @staticmethod
    def is_capturing() -> bool:
        return Recorder.capturing

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        Recorder.capturing = True
        try:
            with tape:
                run()
        finally:
            Recorder.capturing = False
            tape.undo()
        Recorder.captures += 1
        Recorder.operators = [func.name() for func, *_ in tape.calls]

        def replay() -> None:
            Recorder.replays += 1
            tape.replay()

        return replay


class Reads(TorchDispatchMode):
    """Records the operators that read a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition(".")[0] in {
            *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::item"),
            *("aten::is_nonzero", "aten::masked_select", "aten::bincount", "aten::unique_dim"),
        }:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
