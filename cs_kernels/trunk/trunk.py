"""The shared module of a training loop, and the discoveries of its passes."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import Tensor, nn

from cs_kernels.nn.task_norm import TaskBatchNorm, modules_outside_norms, task_norms
from cs_kernels.torch_internals.fsdp import reshard
from cs_kernels.trunk.layers import Coverage, LayerLists, Layout, shared_parameters
from cs_kernels.trunk.pairing import Overrides, find_layout
from cs_kernels.trunk.reach import Reach
from cs_kernels.trunk.statistics import RunningStatistics
from cs_kernels.trunk.watcher import Ran, Watcher

_REASONS: dict[Ran | None, str] = {
    "not": "no layer of trunk ran in this pass: did a copy run, or did trunk run before the pass?",
    "without gradients": "trunk's layers ran without gradients, under torch.no_grad() or frozen",
    "with gradients": "trunk's layers ran, but their output was detached on the way to the loss",
    None: "features of trunk were detached, or computed without gradients or with a copy of trunk,"
    " or a hook moved gradients out of .grad",
}
"""Reasons why a loss reached no parameter, by how the layers ran (None: not watched)."""


class Trunk:
    """The shared module, its trained parameters, its prioritized layers, and each task's reach.

    `changed` detects that these facts may be out of date; `forget` then makes the next passes of
    all tasks discover them again.

    Args:
        module: The shared module, without wrappers.
        tasks: The names of the tasks, in the order of the rows.
        reach: Records which tasks reach each shared parameter, on any rank.
        held: Returns the parameters of the torch optimizers.
        overrides: The argument `layers` of `MultiTaskOptimizer`.
        on_first_use: Called with a module outside the trunk, before it first runs for a task.

    """

    def __init__(
        self,
        module: nn.Module,
        tasks: Sequence[str],
        reach: Reach,
        held: Callable[[], list[nn.Parameter]],
        overrides: Overrides,
        on_first_use: Callable[[nn.Module], None],
    ) -> None:
        self.module = module
        self.tasks = tuple(tasks)
        self.reach = reach
        self.held = held
        self.overrides = overrides
        shared = shared_parameters(module)
        self.names, self.shared = [*shared], [*shared.values()]
        self._shared_set = set(self.shared)
        self._on_first_use = on_first_use
        this = weakref.proxy(self)  # Without a reference cycle, the trunk is freed at once.
        self.watcher = Watcher(module, lambda module, task: this._first_use(module, task))
        self.statistics = RunningStatistics(module)
        self._find_children()
        self.generation = 0
        """Increases with every `forget`."""
        self._layouts: dict[str, tuple[object, Layout]] = {}
        """By kind: the state of the trunk from which a layout was made, and the layout."""
        self._covered_version = 0
        """The watcher's version for which a prioritized layer was last found."""
        self._find_norms()
        self.trains: list[int] = []
        """A fingerprint of the optimizers' parameters and of which parameters require gradients."""
        self.end_step()

    @property
    def device(self) -> torch.device:
        return self.shared[0].device

    def combined(self) -> list[nn.Parameter]:
        """The shared parameters that tasks reach and that are not one task's own."""
        owners, reachable = self.reach.owners(), self.reach.reached_by_any(self.tasks)
        return [self.shared[i] for i in sorted(reachable) if i not in owners]

    def modules_changed(self) -> bool:
        """Whether a module was replaced or added since the last step."""
        return any(self._childless) or self._list_children() != self._children

    def changed(self) -> bool:
        """Whether different parameters train than in the last step, or a module was replaced."""
        return self._training_fingerprint() != self.trains or self.modules_changed()

    def requires_grad(self) -> tuple[bool, ...]:
        """Whether each of the torch optimizers' parameters, then each shared one, trains."""
        return tuple(p.requires_grad for p in (*self.held(), *self.shared))

    def forget(self) -> None:
        """Watches every task's next pass again: different parameters or modules may take part.

        Raises:
            ValueError: The trunk's parameters have changed since MultiTaskOptimizer was built.

        """
        self._check_parameters()
        self._find_children()
        self.generation += 1
        self._find_norms()
        self.watcher.forget()
        self.reach.forget_passes()
        self.statistics.find(self.module)
        self._layouts.clear()
        self._covered_version = 0
        self.trains = self._training_fingerprint()

    def end_step(self) -> None:
        """Updates `trains`, now that watched passes have shown the modules outside the trunk."""
        self._ended_at = self.watcher.version
        self.trains = self._training_fingerprint()

    def end_step_if_watched(self) -> None:
        """Ends a step; cheap if no pass was watched since the last one."""
        if self._ended_at != self.watcher.version:
            self.end_step()

    def end_trace(self) -> None:
        """Ends a trace: reshards the trunk, which forward passes alone leave unsharded."""
        self.reach.has_new = False
        reshard(self.module)
        self.end_step()

    def _training_fingerprint(self) -> list[int]:
        optimizer_parameters = self.held()
        flags = [*map(id, optimizer_parameters)]
        watched = (*optimizer_parameters, *self.shared, *self._unoptimized)
        flags += [p.requires_grad for p in watched]
        for module in self.watcher.outside:
            flags += [p.requires_grad for p in module._parameters.values() if p is not None]
        return flags

    def _find_children(self) -> None:
        dictionaries = [module._modules for module in self.module.modules()]
        self._childless = [children for children in dictionaries if not children]
        """`_modules` of modules without children, to detect when a child is added."""
        self._parents = [children for children in dictionaries if children]
        self._children = self._list_children()
        """The entries of all other `_modules`, to detect when a child is replaced."""

    def _list_children(self) -> list[tuple[str, nn.Module | None]]:
        return [*chain.from_iterable(map(dict.items, self._parents))]

    def _find_norms(self) -> None:
        optimizer_parameters = self.held()
        optimized = set(optimizer_parameters)
        self.norms: list[TaskBatchNorm] = task_norms(self.module)
        """The task-specific normalizations."""
        self.of_norms = [p for norm in self.norms for p in norm.parameters()]
        """The parameters of `norms`."""
        self._unoptimized = [p for p in self.of_norms if p not in optimized]
        # For speed, leaves out all normalizations but the first: most parameters are in
        # normalizations.
        others = {p for norm in self.norms[1:] for p in norm.parameters()}
        self.witnesses = [p for p in optimizer_parameters if p not in others]
        """The parameters whose gradients show whether a closure writes to `.grad`."""

    def _check_parameters(self) -> None:
        reshard(self.module)
        parameters = shared_parameters(self.module)
        new_names = [name for name, p in parameters.items() if p not in self._shared_set]
        if new_names or len(parameters) != len(self.shared):
            self.trains = []  # The next step checks again.
            raise ValueError(
                "trunk must keep the parameters that it had when MultiTaskOptimizer was built, got"
                f" {f'a new parameter {new_names[0]}' if new_names else 'fewer'}: build a new"
                " MultiTaskOptimizer, and load this one's state_dict if the names are the same"
            )

    def _first_use(self, module: nn.Module, task: str) -> None:
        """Called before a module outside the trunk first runs for a task."""
        if (
            isinstance(module, TaskBatchNorm)
            and module.active not in (None, task, *self.watcher.passing_tasks)
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in module.parameters())
        ):
            raise ValueError(
                "trunk must contain every task-specific normalization that runs, but one outside it"
                f" ran with {module.active!r} active in the loss of {task!r}: pass the whole"
                " converted network, or run that part within active_task(part, task)"
            )
        self.statistics.first_use(module, task)
        self._on_first_use(module)

    def modules_outside_norms(self) -> list[tuple[str, nn.Module]]:
        return list(modules_outside_norms(self.module))

    def unchanged(
        self, tasks: Sequence[str], *, always: bool = False
    ) -> AbstractContextManager[None]:
        """Restores the buffers that these tasks' passes change, after an exception or always."""
        return self.statistics.restored_on_error(tasks, always)

    def rewatch_new_layers(self, watched: bool) -> None:
        """Watches the next passes if a layer first ran in an unwatched pass.

        In a compiled network, no hook sees a layer's first run, but its weight's first gradient
        shows that the layer ran.
        """
        if self.reach.has_new and not watched:
            self.watcher.forget()
        self.reach.has_new = False

    def check_reached(self, task: str, reached: bool) -> None:
        """Raises if a loss reached no parameter of the trunk.

        A loss may reach none if all parameters that its task has ever reached are frozen.
        """
        if reached:
            return
        reachable = self.reach.reached_by(task)
        optimized = set(self.held())
        own = [p for norm in self.norms for p in norm.of(task).parameters() if p in optimized]
        frozen = bool(reachable) and not any(p.requires_grad for p in reachable)
        trains = any(p.requires_grad for p in self.shared)
        if trains and not frozen and all(p.grad is None for p in own):
            raise self.not_reached(task)

    def not_reached(self, task: str) -> ValueError:
        """The error for a loss that depends on no parameter of the trunk, with the reason.

        Raises:
            ValueError: The trunk's parameters have changed since MultiTaskOptimizer was built.

        """
        self._check_parameters()
        return ValueError(
            f"a loss must depend on a parameter of trunk, but the loss of {task!r} depends on none:"
            f" {_REASONS[self.watcher.ran]}"
        )

    def layout(self) -> Layout:
        """The prioritized layers of the next update."""
        owners = self.reach.owners()
        own = {self.names[i]: task for i, task in owners.items()}
        return self._layout("update", (self.watcher.version, owners), own)

    def whole_layout(self) -> Layout:
        """The prioritized layers, including those that only one task reaches."""
        return self._layout("whole", self.watcher.version, {})

    def _layout(self, kind: str, state: object, own: dict[str, str]) -> Layout:
        cached = self._layouts.get(kind)
        if cached is None or cached[0] != state:
            reshard(self.module)
            layout = find_layout(self.module, self.tasks, self.watcher, self.overrides, own)
            cached = self._layouts[kind] = state, layout
        return cached[1]

    def forget_layout(self) -> None:
        """Makes `layout` find the layers anew: parameters or normalizations may have changed."""
        self._layouts.pop("update", None)

    def coverage(self) -> Coverage:
        """Which shared parameters are prioritized now."""
        if self.norms:
            self.check_watched()
        self.forget_layout()
        return self.layout().coverage

    @torch.no_grad()
    def priority(self, priorities: Callable[[LayerLists], Sequence[Tensor]]) -> dict[str, Tensor]:
        """The current top-priority tasks of each layer's channels, by name of the layer."""
        self.check_watched()
        self.forget_layout()
        lists = self.layout().lists
        names = (layer.name for layer in lists.layers)
        return dict(zip(names, priorities(lists), strict=True))

    def check_watched(self) -> None:
        if not self.watcher.tasks and not self.reach.tasks_seen:
            raise RuntimeError(
                "no forward pass has run, so it is unknown which layers are prioritized: call step"
                " or trace first"
            )

    def require_covered(self, method: object) -> None:
        """Raises if no layer is prioritized; layers that only one task reaches also count."""
        if self._covered_version == self.watcher.version:
            return
        layout = self.whole_layout()
        if not layout.layers:
            self.watcher.forget()
            raise ValueError(
                f"trunk must have a layer whose output goes to a task-specific normalization for"
                f" {method!r} (`layers` can name one); {layout.coverage}"
            )
        self._covered_version = self.watcher.version
