"""Raises an exception of one rank on all ranks, in the same step."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from cs_kernels.ranks.strategy import RankError
from cs_kernels.ranks.transport import Transport


def text_of(error: BaseException) -> str:
    """The type and message of an exception."""
    return f"{type(error).__name__}: {error}"


def _is_of_collective(error: BaseException) -> bool:
    """Whether a collective of torch.distributed, or the wait for its result, raised the error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    waits = module.startswith("torch.distributed.") or module == "cs_kernels.ranks.buckets"
    ran_out = isinstance(error, torch.OutOfMemoryError)
    return isinstance(error, RuntimeError) and waits and not ran_out


class Failures:
    """Reports this rank's exceptions to the other ranks, and raises RankError for theirs.

    Args:
        transport: Carries the messages.

    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._started = 0.0
        """The time at which the step began, in seconds."""
        self._on_all: Exception | None = None
        """The last exception that every rank raises on its own."""

    def raise_on_all(self, error: Exception) -> NoReturn:
        """Raises an exception that every rank raises on its own, so no message is needed."""
        self._on_all = error
        raise error

    @contextlib.contextmanager
    def together(
        self, number: Callable[[], int], tell: Callable[[Exception, float], None]
    ) -> Iterator[None]:
        """Wraps a step.

        Args:
            number: Returns the number of the step.
            tell: Tells the other ranks about an exception and the seconds since the step began.

        Raises:
            RankError: Another rank failed first, or a collective failed or timed out.

        """
        self._started = time.monotonic()
        try:
            yield
        except Exception as error:
            if error is self._on_all:
                self._on_all = None  # The traceback would keep the step's tensors alive.
                raise
            numbers, rank = self._transport.numbers, self._transport.rank
            if _is_of_collective(error):
                late = RankError(
                    f"rank {numbers[rank]} timed out while it waited for another rank in step"
                    f" {number()}: a rank has ended, or has not reached this step within the"
                    f" timeout of the process group; {text_of(error)}"
                )
                late.__cause__, error = error, late
            try:
                tell(error, time.monotonic() - self._started)
            except RankError as other:
                self._on_all = None
                raise other from error
            except Exception:
                error.add_note(f"the other ranks of {numbers} did not answer")
            raise error from error.__cause__

    def raise_first(self, number: int, error: Exception | None = None, after: float = 0.0) -> None:
        """Raises RankError if another rank failed first; all ranks must call this.

        Args:
            number: The number of the step.
            error: The exception of this rank, if it has failed.
            after: The seconds between the start of the step and the exception.

        Raises:
            RankError: Another rank failed first, with a different exception.

        """
        mine = None if error is None else (after, text_of(error))
        failures = [
            (after_and_text, rank)
            for rank, after_and_text in enumerate(self._transport.gather(mine))
            if after_and_text is not None
        ]
        ((_, text), rank) = min(failures)
        if error is None or (rank != self._transport.rank and text != text_of(error)):
            failed = self._transport.numbers[rank]
            self.raise_on_all(RankError(f"rank {failed} failed in step {number}: {text}"))
