"""Runs checks in child processes, so that a hang or a crash is reported as a result."""

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
"""The time limit for a child's imports and GPU context, in seconds."""
_MOST_LOST = 2
"""The number of hangs and crashes after which a backend's remaining checks are skipped."""


@dataclass(frozen=True)
class Result:
    backend: str
    device: str
    check: str
    outcome: str
    """"ok", "wrong", "hang", "crash" or "not run"."""
    value: float | None = None
    """The largest ratio of an error to its limit, or a ratio of times."""
    detail: str = ""
    seconds: float = 0.0


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    async def line(self, seconds: float) -> dict[str, Any] | None:
        """The next line of JSON; None at the end of the output.

        Raises:
            asyncio.TimeoutError: No line arrived within this time.

        """
        assert self._process.stdout is not None
        while line := await asyncio.wait_for(self._process.stdout.readline(), seconds):
            with contextlib.suppress(json.JSONDecodeError):  # Skips a library's output.
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
        return None

    async def end(self, sign: signal.Signals | None = None) -> int | None:
        """Ends the process; returns its exit status, or None if a driver call keeps it alive."""
        for signal_to_send in (sign, signal.SIGKILL):
            if signal_to_send is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signal_to_send)
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._process.wait(), 5)
        return None

    def last_words(self) -> str:
        """The last lines of stderr."""
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
    """Runs checks of `cases` one after another, with a new process after each failure.

    A check that takes longer than `seconds` counts as a hang. `command` starts a child process.
    """
    results: list[Result] = []
    lost = 0
    while len(results) < len(names) and lost < _MOST_LOST:
        remaining = names[len(results) :]
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *command, backend, device, *remaining, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
            child = _Child(process, errors)
            outcomes = await _outcomes(child, remaining, seconds)
            lost += bool(outcomes) and outcomes[-1][0] in ("hang", "crash")
            results += [
                Result(backend, device, name, *outcome)
                for name, outcome in zip(remaining, outcomes, strict=False)
            ]
    remaining = names[len(results) :]
    why = f"after {lost} processes that hung or crashed"
    return [*results, *(Result(backend, device, name, "not run", detail=why) for name in remaining)]


async def _outcomes(
    child: _Child, names: Sequence[str], seconds: float
) -> list[tuple[str, float | None, str, float]]:
    """The results of one process until it ends, each as (outcome, value, detail, seconds)."""
    outcomes: list[tuple[str, float | None, str, float]] = []
    try:
        for number in range(len(names) + 1):
            limit = seconds if number else START
            line = await child.line(limit)
            if line is None:
                status = await child.end()
                detail = f"exit status {status}\n{child.last_words()}"
                outcomes.append(("crash", None, detail, 0.0))
                return outcomes
            if number:
                failure = line["failure"]
                outcome = "ok" if failure is None else "wrong"
                outcomes.append((outcome, line["value"], failure or "", line["seconds"]))
                if failure is not None:
                    break
        await child.end()
    except TimeoutError:
        status = await child.end(signal.SIGABRT)
        unkillable = ", and it cannot be killed" if status is None else ""
        detail = f"no answer within {limit:.0f} s{unkillable}\n{child.last_words()}"
        outcomes.append(("hang", None, detail, limit))
    return outcomes


def pairs() -> list[tuple[str, str]]:
    """The compiled backends that run here, each with its device type."""
    return [
        (name, backend.devices[0])
        for name, backend in backends._BACKENDS.items()
        if backend.devices is not None and backend.reason is None
    ]


def run(
    selected: Sequence[tuple[str, str]],
    *,
    seconds: float,
    bench: bool = False,
    command: Sequence[str] = CHILD,
) -> list[Result]:
    """Checks these backends in parallel; with `bench`, then times one backend after another."""

    async def run_all() -> list[Result]:
        by_backend = await asyncio.gather(
            *(
                examine(*pair, cases.names(pair[1]), seconds=seconds, command=command)
                for pair in selected
            )
        )
        results = [result for backend_results in by_backend for result in backend_results]
        for pair in selected if bench else ():
            results += await examine(*pair, [*cases.TIMES], seconds=3 * seconds, command=command)
        return results

    return asyncio.run(run_all())
