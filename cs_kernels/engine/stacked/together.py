"""`step_together`: one pass of the trunk makes a step of Phase 2; Phase 1 runs like `step`."""

import contextlib
import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from cs_kernels.engine import supports
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.loss_graph import checked_losses
from cs_kernels.engine.stacked.layer_updates import LayerUpdates
from cs_kernels.engine.stacked.trunk_pass import Pattern, TrunkPass
from cs_kernels.engine.steps import run_step
from cs_kernels.errors import described
from cs_kernels.stage import Passes, Stage
from cs_kernels.step import Step
from cs_kernels.torch_internals.compile import eager
from cs_kernels.trunk.watcher import LAYERS

RunTrunk = Callable[..., dict[str, Any]]
"""Takes the arguments of the trunk; returns the output for each task."""
Forward = Callable[[RunTrunk], Mapping[str, Tensor]]
"""Takes a `RunTrunk`, and returns the loss of each task."""


class Reached(NamedTuple):
    """The parameters that a pass reaches, as its graph shows them."""

    unreached: list[nn.Parameter]
    """The parameters of task-specific normalizations that their own task does not reach."""
    by_task: dict[str, set[Tensor]]
    """The parameters that each loss reaches; empty if the graph may hide parameters."""
    owners: dict[int, str]
    """The indices of the shared parameters that only one task has ever reached, and that task."""
    shared: list[int]
    """The indices of all other reached shared parameters."""
    unknown: bool
    """Whether tasks may reach different parameters, and the graph does not show which."""


class KnownPasses:
    """The parameters that earlier passes reached, by the pattern of the pass."""

    def __init__(self) -> None:
        self.parts_checked = -1
        """The generation of the trunk for which tasks' parts were last found independent."""
        self._reached: dict[Pattern, Reached] = {}
        self._version = -1

    def at(self, version: int) -> dict[Pattern, Reached]:
        """By pattern, the parameters reached since the last check of graphs; forgets older ones."""
        if version != self._version:
            self._version = version
            self._reached.clear()
        return self._reached


def step_together(
    engine: Engine,
    forward: Forward,
    tasks: Iterable[str] | None,
    trunk: nn.Module,
    known: KnownPasses,
) -> dict[str, Tensor]:
    """Makes a step: in Phase 2, one forward pass and one backward pass that makes the updates.

    Args:
        engine: Makes the step.
        forward: Makes the losses from the outputs of the trunk.
        tasks: The tasks of the step; None for all.
        trunk: The trunk as the caller runs it, perhaps compiled.
        known: The discoveries of earlier passes.

    """
    with engine.together():
        if not callable(forward):
            raise TypeError(
                "forward must be a function of run that returns the losses, got"
                f" {described(forward)}"
            )
        chosen = engine.check(supports.TOGETHER, tasks)
        phase = engine.phase
        engine.check_ready()
        if phase == 1:
            chosen = engine.begin(chosen, phase, Stage.TURN)
            return run_step(engine, chosen, phase, [partial(_loss_alone, forward, trunk)])
        chosen = engine.begin(chosen, phase, Stage.JOINT)
        with engine.undone_on_error("cs_kernels.step"):
            step = engine.new_step(chosen, phase)
            passes = Passes(step, chosen, Stage.JOINT, separate=engine.separates(step))
            with engine.passing(passes, restores=True) as parameters:
                _Together(engine, forward, trunk, known).run(step, parameters)
                engine.average(passes, parameters)
                return engine.finish(step, chosen, phase)


class _Together:
    """A forward pass for all tasks, and a backward pass that makes the updates."""

    def __init__(
        self, engine: Engine, forward: Forward, trunk: nn.Module, known: KnownPasses
    ) -> None:
        self.engine = engine
        self._forward = forward
        self._trunk = trunk
        self._known = known

    def run(self, step: Step, held: Sequence[nn.Parameter]) -> None:
        """Runs one forward and one backward pass."""
        engine = self.engine
        # On a GPU, autograd calls `combine` from a thread without the context of `use_backend`.
        context = contextvars.copy_context()
        combine = partial(context.run, partial(engine.combine, step))
        gradients, by_module = engine.ranks.gradients, not engine.method.prioritizes
        self._updates = LayerUpdates(gradients, step, combine, by_module=by_module)
        modules = engine.trunk.modules_outside_norms()
        candidates = self._candidates(modules)
        passes = TrunkPass(
            self._trunk, modules, engine.trunk.norms, step, self._updates, candidates
        )
        with contextlib.closing(passes), engine.guard.during("passes"):
            self._one_pass(passes, step, held)
            step.surgery = self._updates.surgery()

    def _one_pass(self, passes: TrunkPass, step: Step, held: Sequence[nn.Parameter]) -> None:
        engine, tasks = self.engine, step.tasks
        trunk, graph = engine.trunk, engine.graph
        losses = self._losses(passes, tasks)
        self._check(losses, tasks, held)
        pattern = passes.find_outputs(
            losses, trains=any(p.requires_grad for p in trunk.module.parameters())
        )
        known = self._known.at(graph.version)
        reached = known.get(pattern)
        is_new = reached is None or reached.owners != trunk.reach.owners()
        if reached is None or is_new:
            reached = self._reached_by(passes, pattern)
        passes.begin_updates(self._taken(reached), reached.by_task, counts=is_new)
        step.known = {task: losses[task].detach() for task in tasks}
        weighted = {t: graph.weigh(t, losses[t], step, engine.weighting) for t in tasks}
        with passes.in_trunk(recomputes=True):
            graph.run_backward(weighted, step, last=True)
        self._updates.flush()
        for parameter in reached.unreached:
            parameter.grad = None  # An optimizer would apply its momentum to zeros, but skips None.
        trunk.watcher.learned(*tasks)
        known[pattern] = reached
        if len(tasks) > 1:  # With one task, there are no other parts to depend on.
            self._known.parts_checked = trunk.generation

    def _losses(self, passes: TrunkPass, tasks: Sequence[str]) -> dict[str, Tensor]:
        """The losses; graphs are checked again if the pass is watched or a layer first runs."""
        trunk, graph = self.engine.trunk, self.engine.graph
        with trunk.watcher.passing(*tasks) as watched, eager(), passes.in_trunk():
            layers_seen = trunk.watcher.version
            checks = watched or self._known.parts_checked != trunk.generation

            def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
                nonlocal checks
                # Only before the first call, because later checks would change its saved tensors.
                if checks:
                    checks = False
                    unseen = partial(self.engine.transaction.without_traces, tasks)
                    passes.check_parts(unseen, *args, **kwargs)
                return passes.run(*args, **kwargs)

            with _hint_at_step():
                losses = checked_losses(self._forward(run))
        if watched or trunk.watcher.version != layers_seen:
            graph.forget()
        return losses

    @staticmethod
    def _check(
        losses: Mapping[str, Tensor], tasks: Sequence[str], held: Sequence[nn.Parameter]
    ) -> None:
        if any(p.grad is not None for p in held):
            raise RuntimeError(
                "forward must not set gradients, but some .grad is set after it: remove backward()"
                " from forward"
            )
        if set(losses) != set(tasks):
            raise ValueError(
                f"forward must return the loss of every task, {list(tasks)}, got losses for"
                f" {list(losses)}"
            )

    def _reached_by(self, passes: TrunkPass, pattern: Pattern) -> Reached:
        """Checks the graph of a pass, and records which parameters each task reaches."""
        trunk = self.engine.trunk
        leaves, hidden = passes.reached_by_tasks(pattern)
        by_task: dict[str, set[Tensor]] = {}
        noted: dict[str, list[nn.Parameter]] = {}
        for task, found in leaves.items():
            parameters = [leaf for leaf in found if isinstance(leaf, nn.Parameter)]
            by_task[task] = set(parameters)
            noted[task] = self.engine.graph.checked_held(task, parameters)
        for task in noted if not hidden else ():
            trunk.reach.note_graph(task, noted[task])
        owners = trunk.reach.owners()
        tasks_of = Counter(p for found in by_task.values() for p in found)
        # A parameter that only one loss's graph contains may belong to a head.
        least, of_layers = (min(2, len(by_task)), passes.layers) if hidden else (1, {})
        shared = [
            i
            for i, p in enumerate(trunk.shared)
            if p.requires_grad and i not in owners and (tasks_of[p] >= least or p in of_layers)
        ]
        if hidden:
            return Reached([], {}, owners, shared, unknown=not passes.uses_all(pattern))
        unreached = [
            parameter
            for norm in trunk.norms
            for task, found in by_task.items()
            for parameter in norm.of(task).parameters()
            if parameter not in found
        ]
        return Reached(unreached, by_task, owners, shared, unknown=False)

    def _candidates(self, modules: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, str]:
        """The parameters, with names, whose update the method may make."""
        method, trunk = self.engine.method, self.engine.trunk
        if not method.separate_gradients:
            return {}
        layers = {name: m for name, m in modules if isinstance(m, LAYERS)}
        found = {m._parameters.get("weight") for m in layers.values()} | set(trunk.overrides)
        if method.prioritizes:
            prioritized = {layer.weight for layer in trunk.whole_layout().layers}
            ran = trunk.watcher.norms.keys() & layers.keys()
            found -= {layers[n]._parameters.get("weight") for n in ran} - prioritized
        else:
            found |= {m._parameters.get("bias") for m in layers.values()}
        names = {p: n for n, p in zip(trunk.names, trunk.shared, strict=True)}
        return {
            p: names[p]
            for p in found & names.keys()
            if p is not None and p.requires_grad and p.is_floating_point()
        }

    def _taken(self, reached: Reached) -> dict[Tensor, int]:
        """The parameters whose update the method makes, and their indices.

        Raises:
            ValueError: It is unknown which parameters each task reaches.

        """
        method, trunk = self.engine.method, self.engine.trunk
        if not method.separate_gradients:
            return {}
        if method.prioritizes:
            return {layer.weight: layer.weight_index for layer in trunk.layout().layers}
        if reached.unknown:
            raise ValueError(
                f"step_together with {method!r} must know which tasks reach which parameters, but a"
                " torch.autograd.Function may hide some, while a loss leaves an output of run"
                " unused: use step"
            )
        return {trunk.shared[i]: i for i in reached.shared}


def _loss_alone(forward: Forward, trunk: nn.Module, task: str) -> Tensor:
    """A task's loss in Phase 1, from a forward pass for this task alone."""

    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {task: trunk(*args, **kwargs)}

    try:
        losses = checked_losses(forward(run))
    except KeyError as error:
        if error.args[:1] != (task,):
            error.add_note("in Phase 1, run gives one task's output: iterate over its items()")
        raise
    if task not in losses:
        raise ValueError(f"forward must return the loss of {task!r}, got losses for {[*losses]}")
    return losses[task]


@contextlib.contextmanager
def _hint_at_step() -> Iterator[None]:
    """Explains torch's error when `forward` changes outputs, all views of one tensor, in place."""
    try:
        yield
    except RuntimeError as error:
        if "is a view and" in str(error) and "inplace" in str(error):
            raise ValueError(
                "forward must not change the outputs of run in place, as a head that begins with"
                " ReLU(inplace=True) does: use step, or leave out inplace"
            ) from error
        raise
