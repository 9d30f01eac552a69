"""Helpers for error messages."""

import contextlib
from collections.abc import Iterator, Sequence


def described(value: object) -> str:
    """Describes a value in an error message: its type, a string's text too, or a class's name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, str) else type(value).__name__


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note, unless it is empty, to an exception that the `with` block raises."""
    try:
        yield
    except BaseException as error:
        if note:
            error.add_note(note)
        raise
