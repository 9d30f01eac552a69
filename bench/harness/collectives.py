"""The collectives of a step, as torch's dispatcher sees them, and what they make a rank send."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs_kernels.ranks.buckets import Buckets
from cs_kernels.ranks.distributed import Distributed
from cs_kernels.ranks.replicated import Replicated
from cs_kernels.ranks.sharded import Sharded

RING: dict[str, Callable[[int, int], float]] = {
    "all-reduce": lambda nbytes, ranks: 2 * (ranks - 1) / ranks * nbytes,
    "reduce-scatter": lambda nbytes, ranks: (ranks - 1) / ranks * nbytes,
    "all-gather": lambda nbytes, ranks: (ranks - 1) / ranks * nbytes,
    "broadcast": lambda nbytes, ranks: nbytes if ranks > 1 else 0,
}
"""Bytes that each rank of a ring sends, by the bytes of the whole tensor."""

_OPERATORS = {
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::broadcast_": ("broadcast", 0),
}
"""The kind of each operator, and the argument that has the whole tensor, or all parts of it."""

PARTS = ("gradients", "parameters", "other gradients", "sums", "control")
"""The purposes of collectives: the gradients of the shared parameters and their updates; the whole
parameters of `fully_shard`; the gradients of the heads and of the normalizations; products, losses
and statistics; messages between the hosts."""

_METHODS: list[tuple[type, str, str]] = [
    (Buckets, "send", "gradients"),
    (Buckets, "gather", "gradients"),
    (Distributed, "_average_others", "other gradients"),
    (Distributed, "_average_numbers", "sums"),
    (Replicated, "sum", "sums"),
    (Sharded, "sum", "sums"),
]
_OF_FULLY_SHARD = {"reduce-scatter": "gradients", "all-gather": "parameters"}


class Collective(NamedTuple):
    """One collective."""

    operator: str
    kind: str
    part: str
    group: str
    sent: float
    """Bytes that each rank of a ring sends."""


class Collectives(TorchDispatchMode):
    """Counts the collectives of a `with` block.

    Args:
        control: The group of the messages between the hosts, if there is one.

    """

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.found: list[Collective] = []
        self._control = None if control is None else control.group_name
        self._part: str | None = None

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Assigns the collectives of a block to a purpose."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts, and tells by the calling methods what the collectives are for."""
        with contextlib.ExitStack() as stack:
            for owner, name, part in _METHODS:
                method = self._labelled(getattr(owner, name), part)
                stack.enter_context(mock.patch.object(owner, name, method))
            yield stack.enter_context(self)

    def _labelled(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with self.part(part):
                return method(*arguments, **options)

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # It calls the operators of its shards, which come here.
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, operator: str, args: Any) -> None:
        kind, whole = _OPERATORS[operator]  # Another one has no known cost.
        group = next(
            dist.ProcessGroup.unbox(arg)
            for arg in args
            if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
        )
        nbytes = sum(t.nbytes for t in tree_leaves(args[whole]) if isinstance(t, Tensor))
        is_control = group.group_name == self._control
        part = "control" if is_control else self._part or _OF_FULLY_SHARD[kind]
        sent = RING[kind](nbytes, group.size())
        self.found.append(Collective(operator, kind, part, group.group_name, sent))

    def sent(self, part: str) -> float:
        """Bytes that a rank sends for one part."""
        return sum(c.sent for c in self.found if c.part == part)

    def number(self, part: str) -> int:
        """The collectives of one part."""
        return sum(c.part == part for c in self.found)

    def by_kind(self) -> dict[str, dict[str, tuple[int, float]]]:
        """For each part and kind: the collectives, and the bytes that a rank sends."""
        result: dict[str, dict[str, tuple[int, float]]] = {}
        for c in self.found:
            number, sent = result.setdefault(c.part, {}).get(c.kind, (0, 0.0))
            result[c.part][c.kind] = number + 1, sent + c.sent
        return result

    def by_operator(self) -> Counter[str]:
        """The collectives of each operator."""
        return Counter(c.operator for c in self.found)

    def by_group(self) -> Counter[str]:
        """The collectives of each group."""
        return Counter(c.group for c in self.found)
