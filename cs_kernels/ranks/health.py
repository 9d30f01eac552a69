"""Compares checksums of the parameters from time to time: they must be equal on all ranks."""

from collections.abc import Callable

from cs_kernels.ranks.failure import Failures
from cs_kernels.ranks.strategy import RankError
from cs_kernels.ranks.transport import Transport

_EVERY = 64
"""The number of steps between two checks, which are rare because they read all parameters."""

_FIRST = 2
"""The number of initial steps with a check; the second check shows whether optimizers differ."""


class Health:
    """Compares the parameters of all ranks.

    Args:
        transport: Carries the checksums.
        failures: Raises errors on all ranks.

    """

    def __init__(self, transport: Transport, failures: Failures) -> None:
        self._transport, self._failures = transport, failures
        self.checksums: Callable[[], dict[str, int]] = dict
        """Returns, by parameter name, a number that changes with the parameter's values."""
        self._checks = _FIRST
        """The number of coming steps in which the parameters are compared."""

    def begin(self, step: int) -> None:
        """Schedules the periodic comparison if it is due in the step with this number."""
        if step % _EVERY == 0:
            self._checks = max(self._checks, 1)

    def is_due(self) -> bool:
        """Whether this rank requests a comparison of parameters in this step."""
        return self._checks > 0

    def recheck(self) -> None:
        """Schedules a comparison in each of the next two steps."""
        self._checks = _FIRST

    def check(self) -> None:
        """Raises RankError if ranks hold different parameters; all ranks must call this."""
        self._checks = max(self._checks - 1, 0)
        numbers = self._transport.numbers
        first: dict[str, tuple[int, int]] = {}
        for rank, sums in enumerate(self._transport.gather(self.checksums())):
            for name, checksum in sums.items():
                expected, other = first.setdefault(name, (checksum, rank))
                if expected != checksum:
                    self.recheck()  # Checks again until the parameters are equal.
                    self._failures.raise_on_all(
                        RankError(
                            f"ranks must hold the same parameters: {name} of rank {numbers[rank]}"
                            f" differs from rank {numbers[other]}'s; load the same checkpoint or"
                            " set the same seed before the network is built"
                        )
                    )
