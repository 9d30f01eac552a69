"""`python -m cs_kernels check`, with and without faults in a kernel."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from layers import INTERPRETED, SMALL

from cs_kernels import __main__ as command
from cs_kernels.check import cases, record, watchdog
from cs_kernels.check.watchdog import Result
from cs_kernels.ops import backends

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

CHILD = str(Path(__file__).with_name("planted_child.py"))
NAMES = ["combine_", "gramian", "task_priority"]


@pytest.fixture
def pair(request: pytest.FixtureRequest, backend: str) -> tuple[str, str]:
    """A compiled backend and the type of its device."""
    if backend == "reference":
        pytest.skip("all other backends are compared with the reference")
    if "shuffled" in request.node.name:
        pytest.skip("the processes of checks run blocks in one order")
    if INTERPRETED:
        pytest.skip("a check in the interpreter may exceed its time limit")
    return backend, "cpu" if backend == "cpu" or not torch.cuda.is_available() else "cuda"


def examine(
    pair: tuple[str, str], fault: str, names: list[str] = NAMES, seconds: float = 60
) -> list[Result]:
    command = [sys.executable, CHILD, fault]
    examined = watchdog.examine(*pair, names, seconds=seconds, command=command)
    return asyncio.run(examined)


@pytest.mark.parametrize(
    ("fault", "outcome", "detail"),
    [
        ("wrong", "wrong", r"result 0 of torch.float64 is wrong by 1\.0e-03 .* limit is 1e-05"),
        pytest.param(*("unsteady", "wrong", "runs 1 and 2 differ bitwise"), marks=pytest.mark.full),
        ("crash", "crash", r"(?s)exit status .*Fatal Python error: Aborted.*_crash"),
    ],
)
def test_a_fault_is_a_result(pair: tuple[str, str], fault: str, outcome: str, detail: str) -> None:
    """The other checks still run."""
    results = examine(pair, fault)
    assert [r.check for r in results] == NAMES
    assert [r.outcome for r in results] == ["ok", outcome, "ok"]
    assert re.search(detail, results[1].detail)
    assert all(r.value is not None and r.value <= 1 for r in results[::2])


def test_a_hang_is_a_result(pair: tuple[str, str]) -> None:
    """The detail shows where the check hangs."""
    seconds = 60 if pair[0] == "triton" else 10  # Triton compiles its kernels first.
    results = examine(pair, "hang", seconds=seconds)
    assert [r.outcome for r in results] == ["ok", "hang", "ok"]
    assert re.match(rf"(?s)no answer within {seconds} s\n.*in _hang\n", results[1].detail)


@pytest.mark.full
def test_a_backend_that_keeps_crashing_is_abandoned() -> None:
    results = examine(("cpu", "cpu"), "crash", ["gramian", "combine_", "gramian", "combine_"])
    assert [r.outcome for r in results] == ["crash", "ok", "crash", "not run"]
    results = examine(("cpu", "cpu"), "crash at the start")
    assert [r.outcome for r in results] == ["crash", "crash", "not run"]
    assert "exit status -6" in results[0].detail


def test_nan_is_an_error() -> None:
    found = torch.tensor([1.0, torch.nan])
    assert cases._error(found, torch.ones(2)) == torch.inf
    assert cases._error(2 * torch.ones(2), torch.ones(2)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_host_synchronization_is_wrong(pair: tuple[str, str]) -> None:
    result = examine(pair, "waits", ["gramian"])[0]
    if pair[1] == "cuda":
        assert result.outcome == "wrong"
        assert "synchroniz" in result.detail


def test_the_kernels_of_this_machine(pair: tuple[str, str]) -> None:
    if pair == ("cpu", "cpu") or SMALL:
        pytest.skip("test_the_command checks the CPU; an interpreter takes minutes")
    results = examine(pair, "none", cases.names(pair[1]))
    assert not record.failures(results), record.table(results)
    assert {*backends.OPERATORS, *cases.STEPS} <= {r.check for r in results}
    assert ("captured step" in {r.check for r in results}) == (pair[1] == "cuda")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    status = command.main(["check", "--record", str(path), "--seconds", "600"])
    printed, found = capsys.readouterr().out, json.loads(path.read_text())
    assert status == 0, printed
    assert {r["outcome"] for r in found["results"]} == {"ok"}
    assert {"date", "driver", "torch", "gpus", "platform"} <= {*found}
    assert re.search(r"(?m)^gramian +ok \(\de-\d\d\)", printed)
    assert f"the record is in {path}" in printed


@pytest.mark.full
def test_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of `--bench` compute a ratio."""
    monkeypatch.setattr(cases, "_seconds", lambda run, _: float(run() is None) + 1)
    for ratio in cases.TIMES.values():
        assert ratio("cpu") > 0


def _results(*outcomes: tuple[str, str, str]) -> list[Result]:
    return [Result(b, d, "gramian", o, 0.5, "two\nlines") for b, d, o in outcomes]


@pytest.mark.parametrize(
    ("outcomes", "advice"),
    [
        ([("cpu", "cpu", "ok"), ("cuda", "cuda", "ok")], None),
        ([("cpu", "cpu", "wrong")], "on cpu, set CS_KERNELS_BACKEND=reference"),
        (
            [("cpu", "cpu", "ok"), ("cuda", "cuda", "hang"), ("triton", "cuda", "ok")],
            "on cuda, set CS_KERNELS_BACKEND=triton .*: cuda failed here",
        ),
        (
            [("cuda", "cuda", "not run"), ("triton", "cuda", "crash")],
            "on cuda, set CS_KERNELS_BACKEND=reference .*: cuda, triton failed here",
        ),
    ],
)
def test_the_advice(outcomes: list[tuple[str, str, str]], advice: str | None) -> None:
    lines = record.advice(_results(*outcomes))
    assert len(lines) == (0 if advice is None else 2)
    assert advice is None or re.match(advice, lines[0])


def test_the_table() -> None:
    text = record.table(
        [
            *_results(("cpu", "cpu", "ok"), ("cuda", "cuda", "hang")),
            Result("cuda", "cuda", "captured step", "ok", 0.0),
            Result("cuda", "cuda", next(iter(cases.TIMES)), "ok", 1.234),
        ]
    )
    assert text.splitlines() == [
        "check                        cpu (cpu)   cuda (cuda)",
        "gramian                      ok (5e-01)  HANG",
        "captured step                -           ok (0e+00)",
        "time of Phase 2 over a copy  -           1.23",
        "",
        "cuda, gramian: hang: two",
        "    lines",
    ]
