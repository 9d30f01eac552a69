"""Parts of error messages."""

import contextlib
import sys
from collections.abc import Iterator


def described(value: object) -> str:
    """A value for an error message: a class or a function by its name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, str) else type(value).__name__


def add_note(error: BaseException, note: str) -> None:
    """Adds a line that is shown below the exception's message; Python 3.10 has no notes."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to an exception of the `with` block; none if it is empty."""
    try:
        yield
    except BaseException as error:
        if note:
            add_note(error, note)
        raise
