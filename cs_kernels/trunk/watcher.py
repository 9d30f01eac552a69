"""Watching forward passes: which normalization follows which layer, and which other modules run.

A layer's output channels are prioritized if a task-specific normalization consumes exactly the
tensor that the layer returned, or a view of it with the same channels. The first pass of every task
is watched, and a later one from the first run of a new layer on. A later
pass may run other normalizations than the watched ones, or feed them the outputs of other
operations: then the next pass of every task is watched again.
"""

import contextlib
import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from cs_kernels.nn.task_norm import Run, TaskBatchNorm, recorded_norms, uncompiled

LAYERS = (_ConvNd, nn.Linear)

Ran = Literal["not", "without gradients", "with gradients"]
"""How layers of the trunk ran in a pass."""


def eager() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled modules eagerly, so that hooks neither break graphs nor enter them."""
    if "torch._dynamo" not in sys.modules:  # Nothing is compiled; the import takes a second.
        return contextlib.nullcontext()
    return _force_eager()


@contextlib.contextmanager
def _force_eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # The warning does not concern our hook.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global")
        yield


def _memory(tensor: Tensor) -> Tensor:
    """The base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _version(tensor: Tensor) -> int | None:
    """The version counter, which a view shares with its base; None in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _channels(tensor: Tensor, dim: int) -> tuple[object, ...]:
    """Equal for two dense views of one tensor if index c of `dim` selects the same elements."""
    size = tensor.shape[dim]
    return tensor.storage_offset(), tensor.numel(), size, tensor.stride(dim) if size > 1 else 1


_MOST_FRUITLESS = 3
"""A network that is different in each pass, or compiled in a function, is then left alone."""


def _may_equal(run: Run, known: Run) -> bool:
    """Whether two runs are alike; a stacked pass does not know what has made an input."""
    return len(run) == len(known) and all(
        norm == other and (kind is other_kind or None in (kind, other_kind))
        for (norm, kind), (other, other_kind) in zip(run, known, strict=True)
    )


class _Produced:
    """The output of a layer."""

    def __init__(self, layer: str, output: Tensor, channel_dim: int) -> None:
        self.layer = layer
        # The base, since a view of the output may outlive the output.
        self._memory = TensorWeakRef(_memory(output))
        self._version = _version(output)
        self._channels = _channels(output, channel_dim) if output.dim() else ()

    def is_unchanged(self, tensor: Tensor) -> bool:
        same = self._memory() is _memory(tensor) and self._version == _version(tensor)
        return same and self._version is not None

    def has_channels_of(self, tensor: Tensor) -> bool:
        """Whether dimension 1 of a normalization's input holds the layer's output channels."""
        return tensor.dim() > 1 and self._channels == _channels(tensor, 1)


def _nothing(module: nn.Module, args: Any) -> None:
    """The hook in a copied or pickled network."""


def _no_hook() -> object:
    return _nothing


class LocalHook:
    """A hook that copied and pickled networks are without."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


class _FirstRun(LocalHook):
    """A hook of a layer that has not run yet."""

    def __init__(self, watcher: "Watcher") -> None:
        self._watcher = weakref.ref(watcher)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # The weight's first gradient shows the run.
            return
        watcher = self._watcher()
        if watcher is not None and watcher.thread == threading.get_ident():
            watcher.watch_rest()


class Watcher:
    """The layers, normalizations and other modules seen in forward passes of a trunk.

    Args:
        trunk: The shared module.
        on_first_use: Called with a module outside the trunk and a task, before the module runs
            for the task for the first time in a watched pass.

    """

    def __init__(self, trunk: nn.Module, on_first_use: Callable[[nn.Module, str], None]) -> None:
        self.norms: dict[str, set[str]] = {}
        """By name of each layer that ran: the normalizations of its output."""
        self.other_channels: dict[str, set[str]] = {}
        """The same for normalizations of other channels than the layer's."""
        self.norms_ran = False
        """Whether any task-specific normalization has run."""
        self.tasks: set[str] = set()
        """The tasks with a watched pass."""
        self.outside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules outside the trunk that ran."""
        self.thread: int | None = None
        """The thread of the forward pass of a step, while one is running."""
        self.passing_tasks: tuple[str, ...] = ()
        """The tasks of this pass, or of the last one."""
        self.version = 0
        """Increases when a pass is watched."""
        self.ran: Ran | None = None
        """How layers ran in this pass, if it is watched and there are some."""
        self._trunk = trunk
        self._on_first_use = on_first_use
        self._used: dict[str, weakref.WeakSet[nn.Module]] = {}
        self._hooks: list[RemovableHandle] = []
        self._first_runs: dict[str, RemovableHandle] = {}
        self._produced: dict[int, _Produced] = {}
        """By `id` of the output's base."""
        self._outdated: set[str] = set()
        """The layers whose normalizations are those seen before `forget`: their next watched run
        replaces these."""
        self._is_whole = False
        """Whether this pass is watched from its beginning."""
        self._has_gap = False
        """Whether this pass has shown that the layers must be seen anew."""
        self._runs: set[Run] = set()
        """The normalizations of watched passes since `forget`."""
        self._before: tuple[object, object] | None = None
        """What had been seen before a pass unlike the watched ones, until another is watched."""
        self._fruitless = 0
        """How often in a row nothing new was seen after such a pass."""
        self._is_compiled = False
        """Whether a module is compiled, whose normalizations cannot be compared."""
        self._find()

    def _find(self) -> None:
        """Finds the modules of the trunk, which may have been exchanged."""
        named = list(self._trunk.named_modules())
        self._layers = {n: m for n, m in named if isinstance(m, LAYERS)}
        self._norms = {n: m for n, m in named if isinstance(m, TaskBatchNorm)}
        self._inside = weakref.WeakSet(module for _, module in named)

    @property
    def has_norms(self) -> bool:
        """Whether the trunk has task-specific normalization."""
        return bool(self._norms)

    @contextlib.contextmanager
    def passing(self, *tasks: str) -> Iterator[bool]:
        """Around a forward pass of a task, or of several at once.

        Watches it if no pass of one of them was; yields whether it does.
        """
        watched = not self.tasks.issuperset(tasks)
        self.thread, self.passing_tasks = threading.get_ident(), tasks
        self._is_whole = watched
        self.ran = "not" if watched and self._layers else None
        try:
            with contextlib.ExitStack() as whole_pass:
                if watched:
                    whole_pass.enter_context(eager())
                    whole_pass.enter_context(self._modules_outside(*tasks))
                    self.watch_rest()
                ran = whole_pass.enter_context(recorded_norms())
                yield watched
                self._compare(tuple(ran))
        finally:
            self._stop()

    @contextlib.contextmanager
    def noticing(self, task: str) -> Iterator[None]:
        """Around another forward pass of a task: only new modules outside the trunk are seen."""
        self.thread = threading.get_ident()
        try:
            with self._modules_outside(task):
                yield
        finally:
            self._stop()

    def learned(self, *tasks: str) -> None:
        """Notes that the watched passes of some tasks have not failed."""
        self.ran = None
        if not self._has_gap:
            self.tasks.update(tasks)
        self._has_gap = False

    def names_of(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The names and shapes of parameters, for errors."""
        names = {p: f"trunk.{name}" for name, p in self._trunk.named_parameters()}
        for module in self.outside:
            for name, parameter in module.named_parameters(recurse=False):
                names.setdefault(parameter, f"{type(module).__name__}.{name}")
        return [f"{names.get(p, 'a parameter')} of shape {tuple(p.shape)}" for p in parameters]

    def join(
        self,
        norms: Mapping[str, Set[str]],
        other_channels: Mapping[str, Set[str]],
        *,
        norms_ran: bool,
    ) -> None:
        """Adds what was seen in the forward passes of another rank."""
        for mine, others in ((self.norms, norms), (self.other_channels, other_channels)):
            for layer, found in others.items():
                if layer not in mine or not found <= mine[layer]:
                    mine[layer] = mine.get(layer, set()) | found
                    self.version += 1
        self.norms_ran |= norms_ran

    def forget(self) -> None:
        """Watches the next pass of each task again, and learns the layers that run in it anew."""
        self._fruitless, self._is_compiled, self._before = 0, False, None
        self._forget()

    def _forget(self) -> None:
        self.tasks.clear()
        self._runs.clear()
        self._outdated = set(self.norms)
        self._find()

    def _compare(self, run: Run) -> None:
        """After a pass: whether a watched one had the same normalizations, on the same inputs."""
        if self._is_whole:
            if self._before is not None:
                same = self._before == (self.norms, self.other_channels)
                self._before, self._fruitless = None, self._fruitless + 1 if same else 0
            self._runs.add(run)
        elif not (
            run in self._runs
            or self._is_compiled
            or self._fruitless == _MOST_FRUITLESS
            or any(_may_equal(run, known) for known in self._runs)
        ):
            modules = (*self._trunk.modules(), *self.outside)
            self._is_compiled = any(
                m._compiled_call_impl is not None or uncompiled(m) is not m for m in modules
            )
            if not self._is_compiled:
                self._has_gap, self._before = True, copy.deepcopy((self.norms, self.other_channels))
                self._forget()

    def watch_rest(self) -> None:
        """Watches the rest of a pass."""
        if self._hooks:
            return
        self.version += 1
        for name, layer in self._layers.items():
            dim = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
            self._hooks.append(
                layer.register_forward_hook(
                    lambda _, __, output, name=name, dim=dim: self._remember(name, output, dim)
                )
            )
        for name, norm in self._norms.items():
            self._hooks.append(
                norm.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._connect(
                        name, (*args, *kwargs.values())
                    ),
                    with_kwargs=True,
                )
            )

    def _stop(self) -> None:
        self.thread = None
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._produced.clear()
        for name, layer in self._layers.items():
            if name in self.norms:
                if name in self._first_runs:
                    self._first_runs.pop(name).remove()
            elif name not in self._first_runs:
                hook = layer.register_forward_pre_hook(_FirstRun(self))
                self._first_runs[name] = hook
                weakref.finalize(self, hook.remove)

    def _remember(self, layer: str, output: object, channel_dim: int) -> None:
        for seen in (self.norms, self.other_channels):
            if layer in self._outdated or layer not in seen:
                seen[layer] = set()
        self._outdated.discard(layer)
        if isinstance(output, Tensor):
            if output.requires_grad:
                self.ran = "with gradients"
            elif self.ran == "not":
                self.ran = "without gradients"
            self._produced[id(_memory(output))] = _Produced(layer, output, channel_dim)

    def _connect(self, norm: str, inputs: tuple[object, ...]) -> None:
        self.norms_ran = True
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        produced = self._produced.get(id(_memory(inputs[0])))
        if produced is None or not produced.is_unchanged(inputs[0]):
            return
        same = produced.has_channels_of(inputs[0])
        (self.norms if same else self.other_channels)[produced.layer].add(norm)

    @contextlib.contextmanager
    def _modules_outside(self, *tasks: str) -> Iterator[None]:
        used = {task: self._used.setdefault(task, weakref.WeakSet()) for task in tasks}

        def see(module: nn.Module, args: object) -> None:
            if self.thread != threading.get_ident() or module in self._inside:
                return
            self.outside.add(module)
            for task, modules in used.items():
                if module not in modules:
                    modules.add(module)
                    self._on_first_use(module, task)

        hook = register_module_forward_pre_hook(see)
        try:
            yield
        finally:
            hook.remove()
