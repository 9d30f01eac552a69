"""Delays Ctrl-C until the end of a step, so that no step is left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_delays = False
"""Whether a block that delays Ctrl-C is active. Only the main thread uses this variable."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delays a KeyboardInterrupt until the end of the block; a second Ctrl-C is not delayed.

    Python runs signal handlers only in the main thread, so other threads have nothing to delay.
    """
    global _delays
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or _delays or not callable(handler):
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def delay(number: int, frame: FrameType | None) -> None:
        if not pending:
            pending.append((number, frame))
            return
        pending.clear()
        handler(number, frame)

    signal.signal(signal.SIGINT, delay)
    _delays = True
    try:
        yield
    finally:
        _delays = False
        signal.signal(signal.SIGINT, handler)
        if pending:  # Also after another exception, which the interrupt may have caused.
            handler(*pending[0])
