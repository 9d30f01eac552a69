"""Watches forward passes: which normalization follows which layer, and which other modules run.

A layer's output channels are prioritized if a task-specific normalization consumes exactly the
tensor that the layer returned, or a view of it with the same channels. The first pass of every task
is watched; a later pass is watched from the first run of a new layer on. If a later pass runs other
normalizations than the watched passes, or feeds them the outputs of other operations, the next pass
of every task is watched again.
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from cs_kernels.nn.task_norm import Run, TaskBatchNorm, recorded_norms
from cs_kernels.torch_internals.compile import eager, is_compiled
from cs_kernels.torch_internals.memory import TensorWeakRef

LAYERS = (_ConvNd, nn.Linear)

Ran = Literal["not", "without gradients", "with gradients"]
"""How the trunk's layers ran in a pass."""


def _memory(tensor: Tensor) -> Tensor:
    """The base of a view, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _version(tensor: Tensor) -> int | None:
    """The version counter, which a view shares with its base; None in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _channels(tensor: Tensor, dim: int) -> tuple[object, ...]:
    """Equal for two dense views of a tensor iff index c of `dim` selects the same elements."""
    size = tensor.shape[dim]
    return tensor.storage_offset(), tensor.numel(), size, tensor.stride(dim) if size > 1 else 1


_MOST_FRUITLESS = 3
"""Re-watching stops after this many consecutive passes that showed nothing new, as in a network
that differs in each pass, or is compiled inside a function."""


def _may_equal(run: Run, watched: Run) -> bool:
    """Whether two runs may be equal; in a stacked pass, the node type of an input is unknown."""
    return len(run) == len(watched) and all(
        norm == other and (kind is other_kind or None in (kind, other_kind))
        for (norm, kind), (other, other_kind) in zip(run, watched, strict=True)
    )


class _LayerOutput:
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
        """Whether dimension 1 of a normalization's input is the layer's output channels."""
        return tensor.dim() > 1 and self._channels == _channels(tensor, 1)


def _nothing(module: nn.Module, args: Any) -> None:
    """The hook in a copied or pickled network."""


def _no_hook() -> object:
    return _nothing


class LocalHook:
    """A hook that does nothing in copied and pickled networks."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_hook, ()


class _FirstRunHook(LocalHook):
    """Watches the rest of a forward pass in which a layer runs for the first time."""

    def __init__(self, watcher: "Watcher") -> None:
        self._watcher = weakref.ref(watcher)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # The weight's first gradient will show this run.
            return
        watcher = self._watcher()
        if watcher is not None and watcher.thread == threading.get_ident():
            watcher.watch_rest()


class Watcher:
    """The layers, normalizations and other modules seen in forward passes of a trunk.

    Args:
        trunk: The shared module.
        on_first_use: Called with a module outside the trunk and a task, before the module first
            runs for the task in a watched pass.

    """

    def __init__(self, trunk: nn.Module, on_first_use: Callable[[nn.Module, str], None]) -> None:
        self.norms: dict[str, set[str]] = {}
        """For each layer that ran: the normalizations of its output channels."""
        self.other_channels: dict[str, set[str]] = {}
        """For each layer that ran: the normalizations of its output along another dimension."""
        self.norms_ran = False
        """Whether any task-specific normalization has run."""
        self.tasks: set[str] = set()
        """The tasks with a watched pass."""
        self.outside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules outside the trunk that ran."""
        self.thread: int | None = None
        """The thread of a step's forward pass, while one is running."""
        self.passing_tasks: tuple[str, ...] = ()
        """The tasks of the current or last pass."""
        self.version = 0
        """Increases when a pass is watched, or when `join` adds another rank's discoveries."""
        self.ran: Ran | None = None
        """How layers ran in this pass; None if it is not watched, or the trunk has no layers."""
        self._trunk = trunk
        self._on_first_use = on_first_use
        self._used: dict[str, weakref.WeakSet[nn.Module]] = {}
        self._hooks: list[RemovableHandle] = []
        self._first_run_hooks: dict[str, RemovableHandle] = {}
        self._outputs: dict[int, _LayerOutput] = {}
        """Outputs of layers, by the `id` of the tensor, or of its base if it is a view."""
        self._outdated: set[str] = set()
        """Layers with entries in `norms` from before `forget`, which the layer's next watched run
        replaces."""
        self._is_whole = False
        """Whether this pass is watched from its beginning."""
        self._has_gap = False
        """Whether this pass showed that all tasks must be watched again."""
        self._runs: set[Run] = set()
        """The runs of watched passes since `forget`."""
        self._before_rewatch: tuple[object, object] | None = None
        """`norms` and `other_channels` before a differing pass, until another pass is watched."""
        self._fruitless = 0
        """The number of consecutive re-watched passes that showed nothing new."""
        self._is_compiled = False
        """Whether a module is compiled; then runs cannot be compared."""
        self._find_modules()

    def _find_modules(self) -> None:
        """Collects the trunk's modules again, since some may have been replaced."""
        named = list(self._trunk.named_modules())
        self._layers = {n: m for n, m in named if isinstance(m, LAYERS)}
        self._norms = {n: m for n, m in named if isinstance(m, TaskBatchNorm)}
        self._inside = weakref.WeakSet(module for _, module in named)

    @property
    def has_norms(self) -> bool:
        return bool(self._norms)

    @contextlib.contextmanager
    def passing(self, *tasks: str) -> Iterator[bool]:
        """Wraps a forward pass of a task, or of several at once.

        Watches the pass if any task has no watched pass yet; yields whether the pass is watched.
        """
        watched = not self.tasks.issuperset(tasks)
        self.thread, self.passing_tasks = threading.get_ident(), tasks
        self._is_whole = watched
        self.ran = "not" if watched and self._layers else None
        try:
            whole_pass = self._watching(*tasks) if watched else contextlib.nullcontext()
            with whole_pass, recorded_norms() as run:
                yield watched
                self._compare(tuple(run))
        finally:
            self._stop()

    @contextlib.contextmanager
    def _watching(self, *tasks: str) -> Iterator[None]:
        with eager(), self._modules_outside(*tasks):
            self.watch_rest()
            yield

    @contextlib.contextmanager
    def noticing(self, task: str) -> Iterator[None]:
        """Wraps an extra forward pass of a task, and notes only new modules outside the trunk."""
        self.thread = threading.get_ident()
        try:
            with self._modules_outside(task):
                yield
        finally:
            self._stop()

    def learned(self, *tasks: str) -> None:
        """Records that the watched passes of these tasks have succeeded."""
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
        """Merges another rank's discoveries in forward passes."""
        for local, remote in ((self.norms, norms), (self.other_channels, other_channels)):
            for layer, names in remote.items():
                if layer not in local or not names <= local[layer]:
                    local[layer] = local.get(layer, set()) | names
                    self.version += 1
        self.norms_ran |= norms_ran

    def forget(self) -> None:
        """Watches the next pass of each task again, and records its layers anew."""
        self._fruitless, self._is_compiled, self._before_rewatch = 0, False, None
        self._rewatch()

    def _rewatch(self) -> None:
        self.tasks.clear()
        self._runs.clear()
        self._outdated = set(self.norms)
        self._find_modules()

    def _compare(self, run: Run) -> None:
        """Watches all tasks again if a pass runs other normalizations than the watched passes."""
        if self._is_whole:
            if self._before_rewatch is not None:
                same = self._before_rewatch == (self.norms, self.other_channels)
                self._before_rewatch = None
                self._fruitless = self._fruitless + 1 if same else 0
            self._runs.add(run)
        elif not (
            run in self._runs
            or self._is_compiled
            or self._fruitless == _MOST_FRUITLESS
            or any(_may_equal(run, watched) for watched in self._runs)
        ):
            modules = (*self._trunk.modules(), *self.outside)
            self._is_compiled = any(map(is_compiled, modules))
            if not self._is_compiled:
                self._has_gap = True
                self._before_rewatch = copy.deepcopy((self.norms, self.other_channels))
                self._rewatch()

    def watch_rest(self) -> None:
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
        self._outputs.clear()
        for name, layer in self._layers.items():
            if name in self.norms:
                if name in self._first_run_hooks:
                    self._first_run_hooks.pop(name).remove()
            elif name not in self._first_run_hooks:
                hook = layer.register_forward_pre_hook(_FirstRunHook(self))
                self._first_run_hooks[name] = hook
                weakref.finalize(self, hook.remove)

    def _remember(self, layer: str, output: object, channel_dim: int) -> None:
        for norms_by_layer in (self.norms, self.other_channels):
            if layer in self._outdated or layer not in norms_by_layer:
                norms_by_layer[layer] = set()
        self._outdated.discard(layer)
        if isinstance(output, Tensor):
            if output.requires_grad:
                self.ran = "with gradients"
            elif self.ran == "not":
                self.ran = "without gradients"
            self._outputs[id(_memory(output))] = _LayerOutput(layer, output, channel_dim)

    def _connect(self, norm: str, inputs: tuple[object, ...]) -> None:
        self.norms_ran = True
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        output = self._outputs.get(id(_memory(inputs[0])))
        if output is None or not output.is_unchanged(inputs[0]):
            return
        same_channels = output.has_channels_of(inputs[0])
        (self.norms if same_channels else self.other_channels)[output.layer].add(norm)

    @contextlib.contextmanager
    def _modules_outside(self, *tasks: str) -> Iterator[None]:
        used = {task: self._used.setdefault(task, weakref.WeakSet()) for task in tasks}

        def notice(module: nn.Module, _args: object) -> None:
            if self.thread != threading.get_ident() or module in self._inside:
                return
            self.outside.add(module)
            for task, modules in used.items():
                if module not in modules:
                    modules.add(module)
                    self._on_first_use(module, task)

        hook = register_module_forward_pre_hook(notice)
        try:
            yield
        finally:
            hook.remove()
