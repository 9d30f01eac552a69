"""Training steps in CUDA graphs: what is captured, when it is captured again, and its replay.

A replay repeats the kernels of the captured step on the same addresses. What Python decides is
asked before each replay (the phase, the number of the step, checks), or lies in device memory (the
counter of draws, the state of methods and weightings), or is compared with that of the capture.
"""

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cs_kernels.checks import Closure, held_parameters, refuse_reevaluation
from cs_kernels.distributed import Alone
from cs_kernels.ops.gpu.device import captured_tables
from cs_kernels.options import checked_integer
from cs_kernels.report import Done
from cs_kernels.schedules import Phase

if TYPE_CHECKING:
    from cs_kernels.optimizer import MultiTaskOptimizer


class Engine(Protocol):
    """The graphs of a device."""

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def is_capturing() -> bool:
        """Whether a graph is captured now, by anyone."""

    def aside(self) -> AbstractContextManager[None]:
        """Makes the steps before a capture, in order with the work outside."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Records what `run` would do, without doing it, and returns what does it."""


class CudaEngine:
    """CUDA graphs. They share their memory: none is replayed while another one is."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()

    @staticmethod
    def is_capturing() -> bool:
        """Whether the current stream is captured."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream of the capture: libraries allocate their workspaces for a stream."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream), warnings.catch_warnings():
                # Torch cannot know that a capture follows.
                warnings.filterwarnings("ignore", "This instance was constructed with capturable")
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Other threads, as those that pin memory for a data loader, may go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self._graphs), None)  # It lives as long as a graph.
        with (
            captured_tables() as tables,
            torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
        ):
            run()
        self._graphs.add(graph)
        return _Replay(graph, tables)


class _Replay:
    """Replays a CUDA graph, and keeps the tables that it reads until the last replay has ended."""

    def __init__(self, graph: torch.cuda.CUDAGraph, tables: list[object]) -> None:
        self._graph = graph
        self._tables = tables
        self._replayed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self) -> None:
        self._graph.replay()
        self._replayed.record()

    def __del__(self) -> None:
        self._replayed.synchronize()


ENGINES: dict[str, type[Engine]] = {"cuda": CudaEngine}
"""By type of device."""


def refuse_capture(device: torch.device) -> None:
    """Raises a RuntimeError during the capture of a CUDA graph."""
    engine = ENGINES.get(device.type)
    if engine is not None and engine.is_capturing():
        raise RuntimeError(
            "a CUDA graph must not be captured around a step, whose phase, number and checks would"
            " be those of the capture in every replay: use MultiTaskOptimizer.capture(closure)"
        )


@dataclass
class _Graph:
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
        self,
        opt: "MultiTaskOptimizer",
        closures: Sequence[Closure],
        tasks: Sequence[str],
        warmup: int,
    ) -> None:
        self._opt = opt
        self._closures = closures
        self._tasks = tuple(tasks)
        self._warmup = checked_integer("warmup", warmup, 1)
        self._modules: tuple[object, list[nn.Module]] = None, []
        """The versions for which modules were found, and these modules (`_modules_that_run`)."""
        self._graphs: dict[Phase, _Graph] = {}
        self._warm: Counter[Phase] = Counter()
        """Steps of each phase since its last capture."""
        device = opt._shared[0].device
        opt._check_ready()
        _check_replays(opt)
        self._engine: Engine | None = None
        if device.type in ENGINES:
            _check_on_device(opt, device)
            self._engine = ENGINES[device.type](device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        """The number of steps made before; each replay adds one."""
        self._counted = 0
        """The counter's value."""

    def __call__(self) -> dict[str, Tensor]:
        """One training step, eager, captured or replayed.

        After an exception in the capture, parameters, states and running statistics are as they
        were, and gradients are None.

        Returns:
            The loss of each task, detached and unweighted: copies, which no replay overwrites.

        Raises:
            RuntimeError: As `MultiTaskOptimizer.step`; or the torch optimizer keeps numbers or
                tensors on the host, which replays would not update; or a method or weighting reads
                `step.number`; or it is called under `torch.autocast` with a cache.

        """
        opt, engine = self._opt, self._engine
        if engine is None:
            return opt.step(self._closures, self._tasks)
        _check_autocast(self._counter.device)
        phase = opt.phase
        opt._check_ready()
        opt._notice_changes()
        graph = self._graphs.get(phase)
        if graph is not None and not self._is_current(graph, phase):
            del self._graphs[phase]
            graph = None
            self._warm[phase] = 0
        if graph is None and self._warm[phase] < self._warmup:
            with engine.aside():
                losses = opt.step(self._closures, self._tasks)
            self._warm[phase] += 1
            return losses
        if graph is None:
            graph = self._graphs[phase] = self._captured(phase, engine)
        return self._replayed(graph)

    def _captured(self, phase: Phase, engine: Engine) -> _Graph:
        opt = self._opt
        _check_state(opt)
        number, losses = opt._steps, dict[str, Tensor]()

        def run() -> None:
            losses.update(opt._make_step(self._closures, self._tasks, phase, self._counter))
            self._counter.add_(1)

        held = held_parameters(opt._optimizers)
        opt._clear(held)  # No block of the eager steps is freed in the capture.
        try:
            replay = engine.capture(run)
        finally:
            opt._steps = number
        grads = [(parameter, parameter.grad) for parameter in held]
        assert opt._done is not None
        return _Graph(replay, opt._done, losses, grads, *self._facts(phase))

    def _replayed(self, graph: _Graph) -> dict[str, Tensor]:
        opt = self._opt
        if self._counted != opt._steps:  # There were other steps.
            self._counter.fill_(opt._steps)
        graph.replay()
        opt._done = graph.done._replace(number=opt._steps, epoch=opt._epoch)
        opt._steps += 1
        self._counted = opt._steps
        if any(parameter.grad is not grad for parameter, grad in graph.grads):
            for parameter, grad in graph.grads:
                parameter.grad = grad
        return {task: graph.losses[task].clone() for task in self._tasks}

    def _is_current(self, graph: _Graph, phase: Phase) -> bool:
        """Whether a graph still does what a step would."""
        values, tensors = self._facts(phase)
        same = len(tensors) == len(graph.tensors) and all(map(is_, tensors, graph.tensors))
        return same and values == graph.values

    def _facts(self, phase: Phase) -> tuple[list[object], list[Tensor]]:
        """The values and the tensors that a graph depends on; tensors are compared by identity."""
        opt = self._opt
        held = held_parameters(opt._optimizers)
        parts = [opt.weighting] if phase == 1 else [opt.weighting, opt.method]
        options = [*_options(opt._optimizers)]
        modules = self._modules_that_run()
        buffers = (b for module in modules for b in module._buffers.values())
        state = (value for _, value in _state(opt._optimizers))
        candidates = [*held, *opt._shared, *options, *buffers, *state]
        tensors = [value for value in candidates if isinstance(value, Tensor)]
        values = [
            # A number on the host is an argument of kernels, also in a tensor.
            value.tolist() if isinstance(value, Tensor) else value
            for value in options
            if not (isinstance(value, Tensor) and value.device == self._counter.device)
        ]
        values += [
            opt._trainable,
            opt._submodules.version,
            [parameter.data_ptr() for parameter in (*held, *opt._shared)],
            [module.training for module in modules],
            opt._watcher.version,
            dict(opt._reach.owners()),
            [repr(part) for part in parts],
            [*_hooks(opt._optimizers)],
        ]
        states = [t for part in parts for t in part.captured_state()]
        if phase == 2 and opt._conflicts is not None:
            states += opt._conflicts.captured_state()
        return values, tensors + states

    def _modules_that_run(self) -> list[nn.Module]:
        """The modules of the trunk, and others, as heads, that a watched pass has run."""
        watcher = self._opt._watcher
        version = self._opt._submodules.version, watcher.version, len(watcher.outside)
        if self._modules[0] != version:
            outside = sorted(watcher.outside, key=id)
            self._modules = version, [*self._opt._inner.modules(), *outside]
        return self._modules[1]

    def __repr__(self) -> str:
        return f"CapturedStep(tasks={list(self._tasks)}, captured phases={sorted(self._graphs)})"


def _options(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[object]:
    """The options of every group of parameters, such as learning rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (value for name, value in group.items() if name != "params")


def _hooks(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[object]:
    """The hooks of optimizer steps, which may clip gradients."""
    for optimizer in optimizers:
        yield from getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
        yield from getattr(optimizer, "_optimizer_step_post_hooks", {}).values()


def _state(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, object]]:
    """The entries of the torch optimizers' states, by name."""
    for optimizer in optimizers:
        for of_parameter in optimizer.state.values():
            yield from of_parameter.items()


def _check_autocast(device: torch.device) -> None:
    """Raises RuntimeError if a capture could take weights from autocast's cache."""
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "autocast must be inside the closure of a captured step, or have cache_enabled=False:"
            " replays would read weights that were cast before"
        )


def _check_replays(opt: "MultiTaskOptimizer") -> None:
    """Raises ValueError if replays would go wrong on any device."""
    if not isinstance(opt._ranks, Alone):
        raise ValueError(
            f"process_group must be None for a captured step, got {opt._ranks.size} ranks, which"
            " agree on every step on their hosts"
        )
    if opt._backward is not None:
        raise ValueError(
            f"backward must be None for a captured step, got {opt._backward!r}: it may run Python"
            " code in every step"
        )
    for name, module in opt._inner.named_modules():
        averages = isinstance(module, _NormBase) and module.track_running_stats
        if averages and module.momentum is None:
            raise ValueError(
                "trunk must have batch normalization with a momentum for a captured step, got"
                f" momentum=None in {name}: the factor of its average is a number on the host"
            )
    refuse_reevaluation(opt.weighting, "in a captured step")
    opt.method.captured_state()
    opt.weighting.captured_state()


def _check_on_device(opt: "MultiTaskOptimizer", device: torch.device) -> None:
    """Raises ValueError if a graph of the device cannot have the optimizer's step."""
    for parameter in held_parameters(opt._optimizers):
        if parameter.device != device:
            raise ValueError(
                f"optimizer must hold parameters on {device} alone for a captured step, got one of"
                f" shape {tuple(parameter.shape)} on {parameter.device}"
            )
    scales = opt.scaler is not None and opt.scaler.is_enabled()
    for optimizer in opt._optimizers:
        name = type(optimizer).__name__
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer must be built with capturable=True for a captured step, got {name} with"
                " capturable=False"
            )
        if scales and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                "scaler must have optimizers with fused=True in a captured step, to skip a step"
                f" without a host synchronization, got {name} without"
            )


def _check_state(opt: "MultiTaskOptimizer") -> None:
    """Raises RuntimeError if torch optimizers keep something that replays would not update."""
    device = opt._shared[0].device
    for name, value in _state(opt._optimizers):
        if value is not None and not (isinstance(value, Tensor) and value.device == device):
            where = f"a tensor on {value.device}" if isinstance(value, Tensor) else repr(value)
            raise RuntimeError(
                f"optimizer must keep its state on {device} for a captured step, got {name!r}:"
                f" {where}"
            )
