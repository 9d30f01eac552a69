"""The shared module of a training loop, and what its passes have shown."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from cs_kernels.nn.task_norm import TaskBatchNorm, modules_outside_norms, task_norms
from cs_kernels.ranks.fsdp import reshard
from cs_kernels.trunk.layers import Coverage, LayerLists, Layout, shared_parameters
from cs_kernels.trunk.pairing import Overrides, find_layout
from cs_kernels.trunk.reach import Reach
from cs_kernels.trunk.statistics import RunningStatistics
from cs_kernels.trunk.watcher import Ran, Watcher

_WHY: dict[Ran | None, str] = {
    "not": "no layer of trunk ran in this pass, but perhaps one of a copy, or before it",
    "without gradients": "its layers ran without gradients, as under torch.no_grad() or frozen",
    "with gradients": "its layers ran, and their output was detached on the way to the loss",
    None: "its features were detached, or computed without gradients or with a copy of the trunk,"
    " or a hook has moved gradients out of .grad",
}
"""By what a watched pass has shown; None for passes that were not watched."""


class Trunk:
    """The shared module: what trains, which layers are prioritized, who reaches what.

    It alone knows when something has changed (`changed`); then `forget` learns it anew from the
    next passes.

    Args:
        module: The shared module, without wrappers.
        tasks: In the order of the gradients.
        reach: The tasks that reach each shared parameter; ranks share theirs.
        held: Gives the parameters of the torch optimizers.
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
        this = weakref.proxy(self)  # No circle: this is freed at once, and with it what it holds.
        self.watcher = Watcher(module, lambda module, task: this._first_use(module, task))
        self.statistics = RunningStatistics(module)
        self._find_children()
        self.generation = 0
        """Increases when passes are learned anew."""
        self._layouts: dict[str, tuple[object, Layout]] = {}
        """By who asks: what was known, and the layout that was found from it."""
        self._covered = 0
        """The watcher's version for which a prioritized layer was found."""
        self._find_norms()
        self.trains: list[int] = []
        """Changes when other parameters require a gradient or the optimizer holds others."""
        self.end_step()

    @property
    def device(self) -> torch.device:
        """The device of the shared parameters."""
        return self.shared[0].device

    def combined(self) -> list[nn.Parameter]:
        """The shared parameters that tasks have reached and that are no task's own."""
        owners, reached = self.reach.owners(), self.reach.reached_by_any(self.tasks)
        return [self.shared[i] for i in sorted(reached) if i not in owners]

    # --- changes ---

    def exchanged(self) -> bool:
        """Whether a module was exchanged or added since the last step."""
        return any(self._empty) or self._children_now() != self._children

    def changed(self) -> bool:
        """Whether that is so, or other parameters train."""
        return self._what_trains() != self.trains or self.exchanged()

    def requires_grad(self) -> tuple[bool, ...]:
        """By parameter of the torch optimizers and of the trunk: whether it trains."""
        return tuple(p.requires_grad for p in (*self.held(), *self.shared))

    def forget(self) -> None:
        """Watches the next pass of every task again: other parameters may train, or modules run.

        Raises:
            ValueError: The trunk has other parameters than at first, of which there are no
                gradients.

        """
        self._check_parameters()
        self._find_children()
        self.generation += 1
        self._find_norms()
        self.watcher.forget()
        self.reach.forget_passes()
        self.statistics.find(self.module)
        self._layouts.clear()
        self._covered = 0
        self.trains = self._what_trains()

    def end_step(self) -> None:
        """Notes what trains, now that watched passes have shown the modules outside the trunk."""
        self._ended_at = self.watcher.version
        self.trains = self._what_trains()

    def end_step_if_watched(self) -> None:
        """Ends a step; cheap, if no pass was watched since the last one."""
        if self._ended_at != self.watcher.version:
            self.end_step()

    def end_trace(self) -> None:
        """After passes without gradients, which leave whole parameters in a sharded trunk."""
        self.reach.has_new = False
        reshard(self.module)
        self.end_step()

    def _what_trains(self) -> list[int]:
        held = self.held()
        flags = [*map(id, held), *(p.requires_grad for p in held)]
        flags += [p.requires_grad for p in (*self.shared, *self._not_held)]
        for module in self.watcher.outside:
            flags += [p.requires_grad for p in module._parameters.values() if p is not None]
        return flags

    def _find_children(self) -> None:
        of_all = [module._modules for module in self.module.modules()]
        self._empty = [children for children in of_all if not children]
        """The dictionaries of modules without children, to see when one is added."""
        self._filled = [children for children in of_all if children]
        self._children = self._children_now()
        """The names and modules in the others, to see when one is exchanged."""

    def _children_now(self) -> list[tuple[str, nn.Module | None]]:
        return [entry for children in self._filled for entry in children.items()]

    def _find_norms(self) -> None:
        held = self.held()
        of_optimizer = set(held)
        self.norms: list[TaskBatchNorm] = task_norms(self.module)
        """The task-specific normalizations."""
        self.of_norms = [p for norm in self.norms for p in norm.parameters()]
        """Their parameters."""
        self._not_held = [p for p in self.of_norms if p not in of_optimizer]
        # One normalization stands for all of them, since they have most of the parameters.
        others = {p for norm in self.norms[1:] for p in norm.parameters()}
        self.witnesses = [p for p in held if p not in others]
        """Parameters whose gradients closures must leave alone."""

    def _check_parameters(self) -> None:
        reshard(self.module)
        now = shared_parameters(self.module)
        other = [name for name, p in now.items() if p not in self._shared_set]
        if other or len(now) != len(self.shared):
            self.trains = []  # The next step looks again.
            raise ValueError(
                "trunk must keep the parameters that it had when MultiTaskOptimizer was built, got"
                f" {f'another one as {other[0]}' if other else 'fewer'}: build a new one, and load"
                " the state_dict of this one if the names are the same"
            )

    # --- passes ---

    def _first_use(self, module: nn.Module, task: str) -> None:
        """Before a module outside the trunk first runs for a task."""
        if (
            isinstance(module, TaskBatchNorm)
            and module.active not in (None, task, *self.watcher.passing_tasks)
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in module.parameters())
        ):
            raise ValueError(
                "trunk must contain the task-specific normalizations of its passes, got one outside"
                f" it with {module.active!r} active in the loss of {task!r}: hand over the whole"
                " converted network, or run that part inside active_task(part, task)"
            )
        self.statistics.first_use(module, task)
        self._on_first_use(module)

    def modules_outside_norms(self) -> list[tuple[str, nn.Module]]:
        """The modules that are no task-specific normalization and in none, with names."""
        return list(modules_outside_norms(self.module))

    def unchanged(
        self, tasks: Sequence[str], *, always: bool = False
    ) -> AbstractContextManager[None]:
        """Restores the buffers that passes of some tasks change, after an exception or always."""
        return self.statistics.restored_on_error(tasks, always)

    def rewatch_new_layers(self, watched: bool) -> None:
        """Watches the next passes if a layer has first run in an unwatched one.

        In a compiled network no hook shows it, but the first gradient of the layer's weight does.
        """
        if self.reach.has_new and not watched:
            self.watcher.forget()
        self.reach.has_new = False

    def check_reached(self, task: str, reached: bool) -> None:
        """Raises for a loss that reaches nothing of the trunk, unless the trunk is frozen."""
        if reached:
            return
        before = self.reach.reached_by(task)
        held = set(self.held())
        own = [p for norm in self.norms for p in norm.of(task).parameters() if p in held]
        frozen = bool(before) and not any(p.requires_grad for p in before)
        trains = any(p.requires_grad for p in self.shared)
        if trains and not frozen and all(p.grad is None for p in own):
            raise self.not_reached(task)

    def not_reached(self, task: str) -> ValueError:
        """The error for a loss that depends on no parameter of the trunk, and why.

        Raises:
            ValueError: The trunk has other parameters than at first.

        """
        self._check_parameters()
        return ValueError(
            f"a loss must depend on a parameter of trunk, got one for {task!r} that depends on"
            f" none: {_WHY[self.watcher.ran]}"
        )

    # --- layers ---

    def layout(self) -> Layout:
        """The prioritized layers, as the next update takes them."""
        owners = self.reach.owners()
        own = {self.names[i]: task for i, task in owners.items()}
        return self._layout("update", (self.watcher.version, owners), own)

    def whole_layout(self) -> Layout:
        """The prioritized layers, also those that only one task reaches."""
        return self._layout("whole", self.watcher.version, {})

    def _layout(self, asker: str, known: object, own: dict[str, str]) -> Layout:
        found = self._layouts.get(asker)
        if found is None or found[0] != known:
            reshard(self.module)
            layout = find_layout(self.module, self.tasks, self.watcher, self.overrides, own)
            found = self._layouts[asker] = known, layout
        return found[1]

    def forget_layout(self) -> None:
        """Finds the layers anew: parameters were frozen, or normalizations replaced."""
        self._layouts.pop("update", None)

    def coverage(self) -> Coverage:
        """Which shared parameters are prioritized, as they are now."""
        if self.norms:
            self.check_watched()
        self.forget_layout()
        return self.layout().coverage

    @torch.no_grad()
    def priority(self, priorities: Callable[[LayerLists], Sequence[Tensor]]) -> dict[str, Tensor]:
        """By name of a layer, the top-priority tasks of its channels, as they are now."""
        self.check_watched()
        self.forget_layout()
        lists = self.layout().lists
        names = (layer.name for layer in lists.layers)
        return dict(zip(names, priorities(lists), strict=True))

    def check_watched(self) -> None:
        """Raises RuntimeError if no pass has been seen yet."""
        if not self.watcher.tasks and not self.reach.tasks_seen:
            raise RuntimeError(
                "which layers are prioritized is seen in a forward pass: call step or trace first"
            )

    def require_covered(self, method: object) -> None:
        """Raises ValueError if no layer is prioritized; those of one task alone count."""
        if self._covered == self.watcher.version:
            return
        layout = self.whole_layout()
        if not layout.layers:
            self.watcher.forget()
            raise ValueError(
                f"trunk must have a layer whose output goes to a task-specific normalization for"
                f" {method!r} (`layers` can name one); {layout.coverage}"
            )
        self._covered = self.watcher.version
