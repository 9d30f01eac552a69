"""Checks tasks, and the options of methods, schedules and weightings."""

from collections.abc import Iterable, KeysView, Mapping, Set
from math import isfinite
from numbers import Real
from operator import index
from typing import SupportsIndex


def checked_integer(name: str, value: SupportsIndex, least: int, below: int | None = None) -> int:
    """The value as an int.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is less than `least`, or not less than `below`.

    """
    try:
        number = index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {value!r}") from error
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if below is not None and not least <= number < below:
        raise ValueError(f"{name} must lie in [{least}, {below}), got {number}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def checked_seed(seed: SupportsIndex) -> int:
    """A seed in the operators' range, [0, 2^63)."""
    try:
        return checked_integer("seed", seed, 0, 1 << 63)
    except ValueError as error:
        raise ValueError(f"seed must lie in [0, 2^63), got {seed}") from error


def is_finite_number(value: object) -> bool:
    """Whether the value is a real number, neither infinite nor NaN."""
    return isinstance(value, Real) and isfinite(value)


def check_mapping(name: str, value: object, of_task: str) -> None:
    """Raises TypeError unless the value is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping from task to {of_task}, got {value!r}")


def checked_tasks(tasks: Iterable[str]) -> tuple[str, ...]:
    """The tasks as a tuple, from any ordered iterable of strings, such as a dictionary's keys."""
    unordered = isinstance(tasks, Set) and not isinstance(tasks, KeysView)
    ordered = isinstance(tasks, Iterable) and not isinstance(tasks, str) and not unordered
    names = tuple(tasks) if ordered else ()
    if not ordered or not all(isinstance(name, str) for name in names):
        raise TypeError(f"tasks must be a sequence of names, got {tasks!r}")
    if not names:
        raise ValueError("tasks must name at least one task, got none")
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tasks must be distinct, got {name!r} twice in {list(names)}")
        if not name or "." in name:
            raise ValueError(f"tasks must be non-empty names without a dot, got {name!r}")
    return names


def check_scaler(scaler: object) -> None:
    """Raises TypeError unless this is None or looks like a GradScaler."""
    is_scaler = all(callable(getattr(scaler, name, None)) for name in ("scale", "is_enabled"))
    if scaler is not None and (isinstance(scaler, type) or not is_scaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")
