"""Runs checks in child processes and survives what they do: a hang or a crash is a result."""

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from cs_kernels.check import cases
from cs_kernels.ops import backends

CHILD = (sys.executable, "-m", "cs_kernels.check.child")
START = 120.0
"""Seconds for the imports and the context of a GPU."""
_MOST_LOST = 2
"""Children of one backend that may hang or crash before its other checks are left out."""


@dataclass(frozen=True)
class Result:
    """The outcome of one check on one backend."""

    backend: str
    device: str
    check: str
    outcome: str
    """"ok", "wrong", "hang", "crash" or "not run"."""
    value: float | None = None
    """The greatest error over its limit, or a ratio of times."""
    detail: str = ""
    seconds: float = 0.0


class _Child:
    """A process that makes checks."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    async def line(self, seconds: float) -> dict[str, Any] | None:
        """The next line of JSON; None at the end.

        Raises:
            asyncio.TimeoutError: There was none in this time.

        """
        assert self._process.stdout is not None
        while line := await asyncio.wait_for(self._process.stdout.readline(), seconds):
            with contextlib.suppress(json.JSONDecodeError):  # A library's own output.
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return None

    async def end(self, sign: signal.Signals | None = None) -> int | None:
        """Its exit status; None if it cannot be killed, as inside of a driver."""
        for sent in (sign, signal.SIGKILL):
            if sent is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(sent)
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._process.wait(), 5)
        return None

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-30:])


async def examine(
    backend: str,
    device: str,
    names: Sequence[str],
    *,
    seconds: float,
    command: Sequence[str] = CHILD,
) -> list[Result]:
    """Makes checks one after the other, and goes on in a new process after one that failed.

    Args:
        backend: The backend in force.
        device: Of the tensors.
        names: Of `cases.CHECKS`.
        seconds: After which a check is a hang.
        command: Starts a child.

    """
    results: list[Result] = []
    lost = 0
    while len(results) < len(names) and lost < _MOST_LOST:
        left = names[len(results) :]
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *command, backend, device, *left, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
            child = _Child(process, errors)
            found = await _watched(child, left, seconds)
            lost += bool(found) and found[-1][0] in ("hang", "crash")
            results += [
                Result(backend, device, name, *one) for name, one in zip(left, found, strict=False)
            ]
    rest = names[len(results) :]
    why = f"after {lost} processes that hung or crashed"
    return [*results, *(Result(backend, device, name, "not run", detail=why) for name in rest)]


async def _watched(
    child: _Child, names: Sequence[str], seconds: float
) -> list[tuple[str, float | None, str, float]]:
    """The results of one process, up to its end: outcome, value, detail, seconds."""
    found: list[tuple[str, float | None, str, float]] = []
    try:
        for number in range(len(names) + 1):
            limit = seconds if number else START
            line = await child.line(limit)
            if line is None:
                status = await child.end()
                found.append(("crash", None, f"exit status {status}\n{child.last_words()}", 0.0))
                return found
            if number:
                wrong = line["failure"]
                outcome = "ok" if wrong is None else "wrong"
                found.append((outcome, line["value"], wrong or "", line["seconds"]))
                if wrong is not None:
                    break
        await child.end()
    except asyncio.TimeoutError:
        status = await child.end(signal.SIGABRT)
        stays = ", and cannot be killed" if status is None else ""
        detail = f"no answer within {limit:.0f} s{stays}\n{child.last_words()}"
        found.append(("hang", None, detail, limit))
    return found


def pairs() -> list[tuple[str, str]]:
    """The compiled backends that run here, each with the type of device it computes on."""
    return [
        (name, backend.devices[0])
        for name, backend in backends._BACKENDS.items()
        if backend.devices is not None and backend.reason is None
    ]


def run(
    chosen: Sequence[tuple[str, str]],
    *,
    seconds: float,
    bench: bool = False,
    command: Sequence[str] = CHILD,
) -> list[Result]:
    """All checks of backends, side by side; then the times, one after the other."""

    async def all_of_them() -> list[Result]:
        found = await asyncio.gather(
            *(
                examine(*pair, cases.names(pair[1]), seconds=seconds, command=command)
                for pair in chosen
            )
        )
        results = [result for of_one in found for result in of_one]
        for pair in chosen if bench else ():
            results += await examine(*pair, [*cases.TIMES], seconds=3 * seconds, command=command)
        return results

    return asyncio.run(all_of_them())
