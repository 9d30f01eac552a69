"""Compares values that must be equal on all ranks, before training and when a step starts."""

from collections.abc import Mapping
from typing import Any

from cs_kernels.ranks.strategy import RankError
from cs_kernels.ranks.transport import Transport
from cs_kernels.stage import Stage

NAMES = {
    "kind": "calls in a step",
    "number": "number of steps made before",
    "epoch": "epoch (set by start_epoch)",
    "phase": "phase",
    "stage": "calls (step, or backward with the same update=)",
    "features": "number of features",
    "held": "number of parameters in the optimizer",
    "plan": "shared parameters that require a gradient, and options of the optimizer",
}
"""The message fields that must be equal on all ranks, with their names in error messages."""


def compare(transport: Transport, facts: Mapping[str, object], error_type: type[Exception]) -> None:
    """Raises `error_type` if ranks have different values, and RankError if a rank has failed."""
    of_ranks = transport.gather(dict(facts))
    for rank, other in enumerate(of_ranks):
        if "error" in other:
            raise RankError(f"rank {transport.numbers[rank]} has failed: {other['error']}")
    for name, first in of_ranks[0].items():
        for rank, other in enumerate(of_ranks):
            if other[name] != first:
                raise error_type(difference(transport, name, rank, first, other[name]))


def difference(transport: Transport, name: str, rank: int, first: Any, other: Any) -> str:
    """The error message for unequal values; for equally long lists, their first unequal entries."""
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        first, other = next(pair for pair in zip(first, other, strict=True) if pair[0] != pair[1])
    if name == NAMES["stage"]:
        first, other = Stage(first).name, Stage(other).name
    return (
        f"ranks must have the same {name}: rank {transport.numbers[0]} has {first!r}, rank"
        f" {transport.numbers[rank]} has {other!r}"
    )
