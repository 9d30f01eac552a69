"""Training steps in CUDA graphs: capture, replay, and the conditions for a new capture.

A replay repeats the kernels of the captured step on the same addresses. Everything that may change
between steps is handled in Python before each replay (phase, step number, checks), read from device
memory (the step counter, the states of methods and weightings), or compared with its value in the
capture, so that a change leads to a new capture.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cs_kernels.engine import supports
from cs_kernels.engine.cuda_graphs import DEVICES, Graphs, refuse_capture
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.interrupts import held_back
from cs_kernels.engine.per_task import Closure, checked_closures
from cs_kernels.engine.steps import run_step, step
from cs_kernels.monitor.report import Done
from cs_kernels.options import checked_integer
from cs_kernels.schedules import Phase
from cs_kernels.torch_internals.optimizers import skips_on_device


@dataclass
class _Recording:
    """The captured step of one phase."""

    replay: Callable[[], None]
    done: Done
    losses: dict[str, Tensor]
    grads: list[tuple[nn.Parameter, Tensor | None]]
    values: list[object]
    tensors: list[Tensor]


class CapturedStep:
    """A training step in CUDA graphs, made by `MultiTaskOptimizer.capture`."""

    def __init__(
        self, engine: Engine, closure: object, tasks: Iterable[str] | None, warmup: int
    ) -> None:
        self._engine = engine
        self._closures: Sequence[Closure] = checked_closures(closure)
        self._tasks = engine.chosen(tasks)
        self._warmup = checked_integer("warmup", warmup, 1)
        self._modules: tuple[object, list[nn.Module]] = None, []
        """The cache of `_modules_that_run`: the versions for which it is valid, and the modules."""
        self._recordings: dict[Phase, _Recording] = {}
        self._warm: Counter[Phase] = Counter()
        """By phase, the number of warm-up steps, which are eager, before the next capture."""
        device = engine.trunk.device
        refuse_capture(device)
        engine.check_ready()
        supports.check(supports.CAPTURED, engine)
        _check_replays(engine)
        self._graphs: Graphs | None = None
        if device.type in DEVICES:
            _check_on_device(engine, device)
            self._graphs = DEVICES[device.type](device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        """The number of earlier steps, on the device; each replay adds one."""
        self._counted = 0
        """The value of `_counter`, on the host."""

    def __call__(self) -> dict[str, Tensor]:
        """Makes one training step: eager, captured or replayed.

        After an exception in the capture, parameters, states and running statistics are
        unchanged, and gradients are None.

        Returns:
            The loss of each task, detached and unweighted: copies, which no replay overwrites.

        Raises:
            RuntimeError: As in `MultiTaskOptimizer.step`; or the torch optimizer keeps numbers or
                tensors on the host, which replays would not update; or a method or weighting reads
                `step.number`; or the call is made under `torch.autocast` with its cache enabled.

        """
        with held_back():
            return self._call()

    def _call(self) -> dict[str, Tensor]:
        engine, graphs = self._engine, self._graphs
        if graphs is None:
            return self._eager()
        _check_autocast(self._counter.device)
        phase = engine.phase
        refuse_capture(self._counter.device)
        engine.check_ready()
        if engine.trunk.changed():
            engine.forget_passes()
        recording = self._recordings.get(phase)
        if recording is not None and not self._is_current(recording, phase):
            del self._recordings[phase]
            recording = None
            self._warm[phase] = 0
        if recording is None and self._warm[phase] < self._warmup:
            with graphs.aside():
                losses = self._eager()
            self._warm[phase] += 1
            return losses
        if recording is None:
            recording = self._recordings[phase] = self._captured(phase, graphs)
        return self._replayed(recording)

    def _eager(self) -> dict[str, Tensor]:
        return step(self._engine, self._closures, self._tasks)

    def _captured(self, phase: Phase, graphs: Graphs) -> _Recording:
        engine = self._engine
        _check_state(engine)
        number, losses = engine.steps, dict[str, Tensor]()

        def run() -> None:
            made = run_step(engine, self._tasks, phase, self._closures, self._counter)
            losses.update(made)
            self._counter.add_(1)

        held = engine.trunk.held()
        # Drops the gradients of eager steps, which the capture would otherwise free.
        engine.transaction.clear(held)
        try:
            replay = graphs.capture(run)
        finally:
            engine.steps = number
        grads = [(parameter, parameter.grad) for parameter in held]
        assert engine.monitor.done is not None
        return _Recording(replay, engine.monitor.done, losses, grads, *self._facts(phase))

    def _replayed(self, recording: _Recording) -> dict[str, Tensor]:
        engine = self._engine
        if self._counted != engine.steps:  # Steps were made outside of this object.
            self._counter.fill_(engine.steps)
        recording.replay()
        engine.guard.note_replay()
        engine.monitor.done = recording.done._replace(number=engine.steps, epoch=engine.epoch)
        engine.steps += 1
        self._counted = engine.steps
        if any(parameter.grad is not grad for parameter, grad in recording.grads):
            for parameter, grad in recording.grads:
                parameter.grad = grad
        return {task: recording.losses[task].clone() for task in self._tasks}

    def _is_current(self, recording: _Recording, phase: Phase) -> bool:
        """Whether a replay would still do the same as an eager step."""
        values, tensors = self._facts(phase)
        known = recording.tensors
        same = len(tensors) == len(known) and all(map(is_, tensors, known))
        return same and values == recording.values

    def _facts(self, phase: Phase) -> tuple[list[object], list[Tensor]]:
        """The values and the tensors that a recording depends on; tensors compare by identity."""
        engine = self._engine
        trunk, optimizers = engine.trunk, engine.optimizers
        held = trunk.held()
        parts = [engine.weighting] if phase == 1 else [engine.weighting, engine.method]
        options = [value for _, _, value in optimizers.options()]
        modules = self._modules_that_run()
        buffers = (b for module in modules for b in module._buffers.values())
        state = (value for _, value in optimizers.state())
        candidates = [*held, *trunk.shared, *options, *buffers, *state]
        tensors = [value for value in candidates if isinstance(value, Tensor)]
        values = [
            # A number on the host, even in a tensor, is baked into the graph as a kernel argument.
            value.tolist() if isinstance(value, Tensor) else value
            for value in options
            if not (isinstance(value, Tensor) and value.device == self._counter.device)
        ]
        values += [
            trunk.trains,
            trunk.generation,
            [parameter.data_ptr() for parameter in (*held, *trunk.shared)],
            [module.training for module in modules],
            trunk.watcher.version,
            dict(trunk.reach.owners()),
            [repr(part) for part in parts],
            [*optimizers.hooks()],
        ]
        states = [t for part in parts for t in part.captured_state()]
        if phase == 2:
            states += engine.monitor.captured_state()
        return values, tensors + states

    def _modules_that_run(self) -> list[nn.Module]:
        """The trunk's modules, and other modules, such as heads, that ran in a watched pass."""
        trunk = self._engine.trunk
        watcher = trunk.watcher
        version = trunk.generation, watcher.version, len(watcher.outside)
        if self._modules[0] != version:
            outside = sorted(watcher.outside, key=id)
            self._modules = version, [*trunk.module.modules(), *outside]
        return self._modules[1]

    def __repr__(self) -> str:
        phases = sorted(self._recordings)
        return f"CapturedStep(tasks={list(self._tasks)}, captured phases={phases})"


def _check_autocast(device: torch.device) -> None:
    """Raises RuntimeError if a capture could take weights from autocast's cache."""
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "autocast must be inside the closure of a captured step, or have cache_enabled=False:"
            " replays would read weights that autocast had cached"
        )


def _check_replays(engine: Engine) -> None:
    """Raises ValueError if replays would be wrong on any device."""
    for name, module in engine.trunk.module.named_modules():
        averages = isinstance(module, _NormBase) and module.track_running_stats
        if averages and module.momentum is None:
            raise ValueError(
                "trunk must have running statistics with a momentum for a captured step, got"
                f" momentum=None in {name}: replays would repeat the averaging factor of one step"
            )
    engine.method.captured_state()
    engine.weighting.captured_state()


def _check_on_device(engine: Engine, device: torch.device) -> None:
    """Raises ValueError if a graph on the device cannot contain the optimizer's step."""
    for parameter in engine.trunk.held():
        if parameter.device != device:
            raise ValueError(
                f"optimizer must hold parameters on {device} alone for a captured step, but one of"
                f" shape {tuple(parameter.shape)} is on {parameter.device}"
            )
    scales = engine.scaler is not None and engine.scaler.is_enabled()
    for optimizer in engine.optimizers:
        name = type(optimizer).__name__
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer must be built with capturable=True for a captured step, got {name} with"
                " capturable=False"
            )
        if scales and not skips_on_device(optimizer):
            raise ValueError(
                "optimizer must have fused=True in a captured step with a scaler, to skip a step"
                f" without a host synchronization, got {name} without fused=True"
            )


def _check_state(engine: Engine) -> None:
    """Raises RuntimeError if torch optimizers keep a state that replays would not update."""
    device = engine.trunk.device
    for name, value in engine.optimizers.state():
        if value is not None and not (isinstance(value, Tensor) and value.device == device):
            where = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
            raise RuntimeError(
                f"optimizer must keep its state on {device} for a captured step, got {name!r}:"
                f" {where}"
            )
