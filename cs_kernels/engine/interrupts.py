"""Ctrl-C waits for the end of a step, which must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delays a KeyboardInterrupt until the end of the block; a second Ctrl-C is not delayed.

    Python runs signal handlers in the main thread alone, so elsewhere there is nothing to delay.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def delay(number: int, frame: FrameType | None) -> None:
        pending.append((number, frame))
        if len(pending) > 1:
            signal.signal(signal.SIGINT, handler)
            handler(number, frame)

    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        handler(*pending[0])
