"""Atomic writes: after a crash, a file has either its old or its new contents."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing, which replaces `path` once all of it is on disk."""
    new = path.with_name(f"{path.name}.new")  # A fixed name, so that leftovers are overwritten.
    with new.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # Makes the rename durable.
    os.close(folder)
