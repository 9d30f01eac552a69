"""Faults at every point of a step: out of memory in any tensor operation, Ctrl-C at any line.

A step happens completely or not at all, and later training has the same bits as without the fault.
"""

import contextlib
import copy
import dis
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from networks import AB, same_bits, without_collections
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cs_kernels as cs

pytestmark = [pytest.mark.loop, pytest.mark.slow]

PACKAGE = str(Path(cs.__file__).parent)


class Run:
    """A small training loop, whose method with the name `way` makes the steps."""

    def __init__(
        self,
        method: cs.Method,
        weighting: cs.Weighting | None = None,
        *,
        normalized: bool = True,
        schedule: cs.Schedule | None = None,
    ) -> None:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d if normalized else nn.LayerNorm
        self.trunk: nn.Module = nn.Sequential(nn.Linear(4, 6), norm(6), nn.Linear(6, 5), norm(5))
        if normalized:
            self.trunk = cs.nn.convert_task_batchnorm(self.trunk, AB)
        self.heads = nn.ModuleDict({t: nn.Sequential(nn.Linear(5, 3), norm(3)) for t in AB})
        learned = [] if weighting is None else weighting.parameters()
        parameters = [*self.trunk.parameters(), *self.heads.parameters(), *learned]
        self.sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, AB, method, schedule, weighting)
        self.opt.start_epoch(0)
        self.stepping = False
        self.sgd.register_step_pre_hook(lambda *_: self._set(True))
        self.sgd.register_step_post_hook(lambda *_: self._set(False))
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(12, 8, 4, generator=generator)
        self.number = 0
        self.way = ""
        """The name of the method that makes a step."""

    def _set(self, stepping: bool) -> None:
        self.stepping = stepping

    def loss(self, task: str, part: slice = slice(None)) -> Tensor:
        x = self.inputs[self.number][part]
        target = 1.0 if task == "a" else x.square().sum(1, keepdim=True)
        loss: Tensor = (self.heads[task](self.trunk(x)) - target).square().mean()
        return loss

    def make(self) -> None:
        """Makes a step, or the part of it before the torch optimizer's step."""
        getattr(self, self.way)()

    def advance(self) -> None:
        self.make()
        if self.way not in APPLIED:
            self.sgd.step()
        self.number += 1

    def step(self) -> None:
        self.opt.step(self.loss)

    def micro_batches(self) -> None:
        halves = (slice(4), slice(4, 8))
        self.opt.step([lambda task, half=half: self.loss(task, half) for half in halves])

    def together(self) -> None:
        x, heads = self.inputs[self.number], self.heads
        self.opt.step_together(
            lambda run: {t: (heads[t](z) - len(t)).square().mean() for t, z in run(x).items()}
        )

    def backward(self) -> None:
        self.opt.backward({task: self.loss(task) for task in AB})

    def backward_twice(self) -> None:
        # Both forward passes come first, since the package cannot see a failure between the calls.
        first, second = ({task: self.loss(task) for task in AB} for _ in range(2))
        self.opt.backward(first, update=False)
        self.opt.backward(second)

    def features(self) -> None:
        x = self.inputs[self.number]
        z = self.trunk(x)
        losses = {task: (self.heads[task](z) - len(task)).square().mean() for task in AB}
        self.opt.backward(losses, features=z)

    def state(self) -> list[Any]:
        """All that later training depends on; `reach` is left out, as failed passes extend it."""
        state = self.opt.state_dict()
        del state["reach"]
        networks = [module.state_dict() for module in (self.trunk, self.heads)]
        return [networks, self.sgd.state_dict()["state"], state]


APPLIED = ("step", "micro_batches", "together")
"""The ways that include the torch optimizer's step."""

WAYS: dict[str, Callable[[], tuple[Run, str]]] = {
    "connection strength": lambda: (Run(cs.ConnectionStrength()), "step"),
    "phase 1": lambda: (Run(cs.ConnectionStrength(), schedule=cs.Sequential()), "step"),
    "micro-batches": lambda: (Run(cs.GradVac(beta=0.5)), "micro_batches"),
    "together": lambda: (Run(cs.GradVac(groups="layer", beta=0.5)), "together"),
    "conflicts, GradNorm": lambda: (_counting(Run(cs.UPGrad(), cs.GradNorm())), "step"),
    "kept weights": lambda: (Run(cs.UPGrad(update_every=3)), "step"),
    "DWA": lambda: (Run(cs.Sum(), cs.DynamicWeightAverage()), "step"),
    "FAMO again": lambda: (Run(cs.PCGrad(), cs.FAMO()), "step"),
    "backward": lambda: (_counting(Run(cs.GradVac(), cs.GradNorm(), normalized=False)), "backward"),
    "backward, kept": lambda: (Run(cs.NashMTL(update_every=3), normalized=False), "backward"),
    "two backward": lambda: (
        Run(cs.GradVac(), cs.FAMO(reevaluate=False), normalized=False),
        "backward_twice",
    ),
    "features": lambda: (
        Run(cs.GradVac(), cs.SmoothTchebycheff(warmup=0), normalized=False),
        "features",
    ),
}


def _counting(run: Run) -> Run:
    run.opt.count_conflicts(0.1)
    return run


class FailsAt(TorchDispatchMode):
    """Raises in the n-th tensor operation outside the torch optimizer."""

    def __init__(self, run: Run, number: int) -> None:
        super().__init__()
        self.run, self.left = run, number

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self.run.stepping and "profiler" not in str(function):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("injected")
        return function(*args, **(kwargs or {}))


@functools.cache
def _ends_of_with(code: CodeType) -> set[int]:
    """Offsets of `__exit__(None, None, None)`, before which no signal is handled."""
    found = [(i.offset, i.opname, i.argval) for i in dis.get_instructions(code)]
    return {
        offset
        for (offset, name, value), (_, second, _), (_, third, _) in zip(
            found, found[1:], found[2:], strict=False
        )
        if (name, value) == ("LOAD_CONST", None)
        and second == third
        and second in ("LOAD_CONST", "DUP_TOP")
    }


class InterruptsAt:
    """Sends Ctrl-C at the n-th line of the package."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.left = run, number

    def __enter__(self) -> "InterruptsAt":
        sys.settrace(self._calls)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _calls(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._lines if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _lines(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_lasti not in _ends_of_with(frame.f_code):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._lines


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _started(way: str, steps: int) -> Run:
    run, run.way = WAYS[way]()
    for _ in range(steps):
        run.advance()
    return run


def _middle_of_phase_1(steps: int) -> list[Any]:
    """The state after a fault in the passes of the second task."""
    run = _started("phase 1", steps)
    with contextlib.suppress(ZeroDivisionError):
        run.opt.step(lambda task: run.loss(task) / (1 if task == "a" else 1 // 0))
    return copy.deepcopy(run.state())


@pytest.mark.each
@pytest.mark.filterwarnings("ignore:.* in backward has dropped")
@pytest.mark.parametrize("fault", [FailsAt, InterruptsAt])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 2, 3])
def test_a_fault_at_every_point(
    way: str, steps: int, fault: type[FailsAt] | type[InterruptsAt], full: bool
) -> None:
    """Tests all points with `--full`, else a sample, in the first step and in two later ones."""
    run = _started(way, steps)
    before = copy.deepcopy(run.state())
    with fault(run, 1 << 40) as counter:
        run.make()
    points = (1 << 40) - counter.left
    after = copy.deepcopy(run.state())
    run = _started(way, steps)
    allowed = [before, *([_middle_of_phase_1(steps)] if way == "phase 1" else [])]
    with without_collections():
        for number in range(1, points + 1, 1 if full else 1 + points // 8):
            error: BaseException | None = None
            try:
                with fault(run, number):
                    run.make()
            except (torch.OutOfMemoryError, KeyboardInterrupt) as raised:
                error = raised
                if run.way not in APPLIED and fault is InterruptsAt:
                    run.sgd.zero_grad()  # The first of two calls may have succeeded.
            made = run.opt.state_dict()["steps"] > steps
            if made and not same_bits(
                run.state(), after
            ):  # A second evaluation of the losses failed.
                assert way == "FAMO again"
                assert error is not None
                assert "the step is complete" in "".join(error.__notes__), number
            elif made:
                # If this run had fewer points than the first, no error occurs.
                assert error is None or isinstance(error, KeyboardInterrupt), number
            else:
                assert any(same_bits(run.state(), one) for one in allowed), number
                assert error is not None
            if made or not same_bits(run.state(), before):
                run = _started(way, steps)
    expected = _started(way, steps + 2)
    for _ in range(2):
        run.advance()
    assert same_bits(run.state(), expected.state())
