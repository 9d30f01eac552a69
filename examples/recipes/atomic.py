"""Atomic writes: after a kill, the file is either the complete old one or the complete new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write to, which replaces `path` once its whole content is on the disk."""
    new = path.with_name(f"{path.name}.new")  # A fixed name: the next write overwrites leftovers.
    with new.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # Makes the rename durable.
    os.close(folder)
