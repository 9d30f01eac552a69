"""Notes on exceptions, for Python 3.11 and later."""

import contextlib
import sys
from collections.abc import Iterator


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
