"""Files that a killed process leaves whole: the old one or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` at the end, once the disk has all of it."""
    new = path.with_name(f"{path.name}.new")  # One name: the next write reuses what a kill leaves.
    with new.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # The rename itself.
    os.close(folder)
