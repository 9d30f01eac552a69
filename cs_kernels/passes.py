"""The forward and backward passes of a step.

A task has a forward and a backward pass of its own (`task_pass`), or only a backward pass after the
caller's forward pass for all tasks (`backward_passes`). The gradients are left in `.grad`.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cs_kernels.checks import Closure, checked_loss, checked_losses
from cs_kernels.distributed import Ranks, all_sharded_modules, is_sharded, sharded_parameters
from cs_kernels.features import Features
from cs_kernels.gradients import TaskGradients
from cs_kernels.graphs import reached_parameters
from cs_kernels.nn import TaskBatchNorm, active
from cs_kernels.notes import add_note
from cs_kernels.stacked import Forward, Pattern, StackedPass
from cs_kernels.step import Step
from cs_kernels.watching import Watcher, eager
from cs_kernels.weightings import Weighting

Backward = Callable[..., object]


class Seen(NamedTuple):
    """What the graph of a stacked pass has shown."""

    unreached: list[nn.Parameter]
    """The parameters of normalizations that their tasks do not reach."""
    reached: dict[str, set[Tensor]]
    """By task, the parameters that its loss reaches; empty if there may be others."""
    owners: dict[int, str]
    """The indices of the shared parameters that only one task has ever reached, and that task."""
    shared: list[int]
    """The indices of the others that are reached."""
    unknown: bool
    """Whether a task may not reach what others reach, and what that is is not known."""


class Passes:
    """Runs the passes of a step."""

    def __init__(
        self,
        trunk: nn.Module,
        norms: Sequence[TaskBatchNorm],
        watcher: Watcher,
        gradients: TaskGradients,
        ranks: Ranks,
        weighting: Weighting,
        scaler: torch.amp.GradScaler | None,
        backward: Backward | None,
    ) -> None:
        self._trunk = set(trunk.parameters())
        self._modules = list(trunk.modules())
        self._norms = norms
        self._watcher = watcher
        self._gradients = gradients
        self._ranks = ranks
        self._weighting = weighting
        self._scaler = scaler
        self._backward = backward
        self._checked: set[str] = set()
        """The tasks whose graph was checked."""
        self._seen: dict[Pattern, Seen] = {}
        """By the pattern of a checked stacked pass."""
        self._witnesses: Sequence[nn.Parameter] = ()
        """Closures must leave their gradients alone."""
        self._known: set[str] = set()
        """The tasks that have once reached the trunk, which may have been frozen since."""

    def watch_gradients(self, held: Sequence[nn.Parameter]) -> None:
        """Closures must leave the gradients of the torch optimizer's parameters alone.

        One normalization stands for all of them, since they have most of the parameters.
        """
        others = {p for norm in self._norms[1:] for p in norm.parameters()}
        self._witnesses = [parameter for parameter in held if parameter not in others]

    def forget(self) -> None:
        """Watches the next pass of every task again, and checks its graph."""
        self._watcher.forget()
        self.check_graphs()

    def check_graphs(self) -> None:
        """Checks the graph of every task's next loss again."""
        self._checked.clear()
        self._seen.clear()

    def trace(self, task: str, closure: Closure, held: Sequence[nn.Parameter]) -> None:
        """A watched forward pass without a backward pass.

        Raises:
            ValueError: As `task_pass`.

        """
        with active(self._norms, task), torch.enable_grad():
            with _unchanged_gradients(self._witnesses, task), self._watcher.passing(task):
                loss = closure(task)
            self._watcher.learned(task)
            if isinstance(loss, Tensor) and loss.requires_grad:
                self._check_graph(task, loss, held)
                self._checked.add(task)

    def evaluate(self, task: str, closures: Sequence[Closure]) -> Tensor:
        """The loss of one task, without gradients."""
        try:
            with active(self._norms, task), torch.no_grad(), self._watcher.noticing(task):
                losses = [closure(task).detach().reshape(()) for closure in closures]
                return sum(losses[1:], losses[0])
        except Exception as error:
            add_note(
                error,
                f"the step has been made: {self._weighting!r} computes losses again after it,"
                " without gradients; with reevaluate=False, it takes those of the next step",
            )
            raise

    def task_pass(
        self,
        task: str,
        closures: Sequence[Closure],
        step: Step,
        held: Sequence[nn.Parameter],
    ) -> None:
        """The forward and backward passes of one task.

        Raises:
            ValueError: A loss is not a scalar, has no graph, depends on a parameter that is not
                held, or on none of the trunk.
            TypeError: A loss is not a tensor.

        """
        # Active in the backward pass too: checkpointing recomputes the trunk there.
        with active(self._norms, task):
            for number, closure in enumerate(closures, 1):
                with _unchanged_gradients(self._witnesses, task), self._watcher.passing(task):
                    loss = checked_loss(closure(task), task)
                if any(norm.active != task for norm in self._norms):
                    raise ValueError(
                        f"closure must leave {task!r} active in trunk, got another one: use"
                        " active_task(trunk, task) instead of set_task in it"
                    )
                if task not in self._checked:
                    self._check_graph(task, loss, held)
                alone = len(closures) == 1 and self._ranks.size == 1
                step.known = {task: loss.detach()} if alone else {}
                weighted = self._weighted(task, loss, step)
                if number == len(closures):
                    self._gradients.arm(task)
                with _hint_at_backward():
                    self._run_backward(weighted, step)
        self._watcher.learned(task)
        self._checked.add(task)

    def backward_passes(
        self,
        tasks: Sequence[str],
        losses: Mapping[str, Tensor],
        step: Step,
        held: Sequence[nn.Parameter],
        collect: Callable[[str], None] | None,
        features: Features | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """The backward passes of losses with a common graph; the last one frees it.

        `collect` is called after the backward pass of each task; without it, gradients add up. With
        features, the passes end there. Other ranks may have losses for more tasks. `whole` says
        that there is one micro-batch.

        Raises:
            ValueError: As `task_pass`.

        """
        for task in losses:
            if task not in self._checked:
                self._check_graph(task, losses[task], held)
        alone = whole and self._ranks.size == 1
        step.known = {task: loss.detach() for task, loss in losses.items()} if alone else {}
        weighted = {task: self._weighted(task, loss, step) for task, loss in losses.items()}
        present = [task for task in tasks if task in losses]
        if features is not None:
            scale = (lambda loss: loss) if self._scaler is None else self._scaler.scale
            features.head_passes({task: scale(weighted[task]) for task in present})
        elif collect is None:
            if present:
                first, *others = (weighted[task] for task in present)
                self._gradients.arm(present[-1])
                self._run_backward(sum(others, first), step)
        else:
            for task in tasks:
                if task in losses:
                    self._gradients.arm(task)
                    self._run_backward(weighted[task], step, retain_graph=task != present[-1])
                    collect(task)
                else:
                    self._gradients.skip(task)
        self._checked.update(losses)

    def stacked_pass(
        self,
        stacked: StackedPass,
        forward: Forward,
        step: Step,
        held: Sequence[nn.Parameter],
        restored: Callable[[], contextlib.AbstractContextManager[None]],
        take: Callable[[Seen], Mapping[Tensor, int]],
    ) -> None:
        """One forward and one backward pass for all tasks of a step.

        Args:
            stacked: The pass.
            forward: Makes the losses.
            step: Its tasks take part.
            held: The torch optimizer's parameters.
            restored: Gives the context of a forward pass that leaves nothing behind.
            take: Gives the parameters whose update the method makes, and their indices.

        Raises:
            ValueError: As `task_pass`; or the tasks' parts do not stay apart.
            TypeError: A loss is not a tensor.

        """
        tasks = step.tasks
        with self._watcher.passing(*tasks) as watched, eager(), stacked.in_trunk():
            if watched:
                self._seen.clear()
            checks, version = not self._seen, self._watcher.version

            def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
                nonlocal checks
                if checks:  # In the first call alone: it would change what that has saved.
                    checks = False
                    stacked.check_parts(restored, *args, **kwargs)
                return stacked.run(*args, **kwargs)

            with _hint_at_step():
                losses = checked_losses(forward(run))
        if self._watcher.version != version:  # A layer has first run.
            self._seen.clear()
        if any(p.grad is not None for p in held):
            raise RuntimeError(
                "forward must leave gradients alone, got some: leave out backward() in it"
            )
        if set(losses) != set(tasks):
            raise ValueError(
                f"forward must return the loss of every task, {list(tasks)}, got those of"
                f" {list(losses)}"
            )
        trains = any(p.requires_grad for p in self._trunk)
        pattern = stacked.find_outputs(losses, trains=trains)
        known = self._seen.get(pattern)
        if known is not None and known.owners != self._gradients.reach.owners():
            known = None
        seen = known or self._note_stack(stacked, pattern, held)
        stacked.begin_updates(take(seen), seen.reached, counts=known is None)
        step.known = {task: losses[task].detach() for task in tasks}
        first, *others = (self._weighted(task, losses[task], step) for task in tasks)
        with stacked.in_trunk(recomputes=True):
            self._run_backward(sum(others, first), step)
        stacked.end_updates()
        for parameter in seen.unreached:
            parameter.grad = None  # In place of zeros, which have an effect in an optimizer.
        self._watcher.learned(*tasks)
        self._seen[pattern] = seen

    def _note_stack(
        self, stacked: StackedPass, pattern: Pattern, held: Sequence[nn.Parameter]
    ) -> Seen:
        """Checks the graph of a stacked pass, and notes which task reaches what."""
        leaves, hidden = stacked.reached_by_tasks(pattern)
        reached: dict[str, set[Tensor]] = {}
        for task, found in leaves.items():
            parameters = [leaf for leaf in found if isinstance(leaf, nn.Parameter)]
            reached[task] = set(parameters)
            parameters = self._check_held(task, parameters, held)
            if not hidden:
                self._gradients.reach.note_graph(task, parameters)
        owners = self._gradients.reach.owners()
        tasks_of = Counter(p for found in reached.values() for p in found)
        # A parameter in the graph of one loss alone may be a head's.
        least, of_layers = (min(2, len(reached)), stacked.layers) if hidden else (1, {})
        shared = [
            i
            for i, p in enumerate(self._gradients.parameters)
            if p.requires_grad and i not in owners and (tasks_of[p] >= least or p in of_layers)
        ]
        if hidden:
            return Seen([], {}, owners, shared, unknown=not stacked.uses_all(pattern))
        unreached = [
            parameter
            for norm in self._norms
            for task, found in reached.items()
            for parameter in norm.of(task).parameters()
            if parameter not in found
        ]
        return Seen(unreached, reached, owners, shared, unknown=False)

    def _weighted(self, task: str, loss: Tensor, step: Step) -> Tensor:
        weighted = self._weighting.weigh(task, loss, step)
        if not isinstance(weighted, Tensor) or not weighted.requires_grad:
            raise ValueError(
                f"weighting must weigh a loss to one with a graph, got {weighted!r} by"
                f" {self._weighting!r} for {task!r}"
            )
        first = task not in step.losses
        step.add_loss(task, loss, weighted)
        regularizer = self._weighting.regularizer(task) if first else None
        weighted = weighted if regularizer is None else weighted + regularizer
        share = self._ranks.share(task)
        return weighted if share == 1 else weighted * share

    def _run_backward(self, weighted: Tensor, step: Step, retain_graph: bool = False) -> None:
        scaler, backward = self._scaler, self._backward
        self._gradients.before_backward(retains=retain_graph)
        if backward is None:
            loss = weighted if scaler is None else scaler.scale(weighted)
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            return
        # It may multiply the loss, as the scaler does: the gradient of the probe is the factor.
        probe = torch.zeros((), device=weighted.device, requires_grad=True)
        weighted = weighted + probe
        loss = weighted if scaler is None else scaler.scale(weighted)
        if step.loss_scale is None:  # Known before any layer's backward pass.
            probe.register_hook(  # type: ignore[no-untyped-call]
                lambda factor: setattr(step, "loss_scale", factor)
            )
        backward(loss, **({"retain_graph": True} if retain_graph else {}))

    def _check_graph(self, task: str, loss: Tensor, held: Sequence[nn.Parameter]) -> None:
        """A loss depends on parameters that the optimizer holds, and on some of the trunk."""
        reached, hidden = reached_parameters(loss)
        reached = self._check_held(task, reached, held)
        if hidden:
            return
        trains = any(p.requires_grad for p in self._trunk) and task not in self._known
        if trains and self._trunk.isdisjoint(reached):
            raise no_shared_parameter(task)
        self._known.add(task)
        self._gradients.reach.note_graph(task, reached)

    def _check_held(
        self, task: str, reached: list[nn.Parameter], held: Sequence[nn.Parameter]
    ) -> list[nn.Parameter]:
        """The optimizer holds the parameters of a graph; returns them, sharded ones as such."""
        sharded = sharded_parameters((*self._modules, *self._watcher.outside))
        reached = [sharded.get(parameter, parameter) for parameter in reached]
        unheld = list(set(reached) - set(held))
        if unheld and any(map(is_sharded, held)):  # Heads that no watched pass has run.
            self._modules += [m for m in all_sharded_modules() if m not in self._modules]
            sharded = sharded_parameters(self._modules)
            reached = [sharded.get(parameter, parameter) for parameter in reached]
            unheld = list(set(reached) - set(held))
        if unheld:
            names = self._watcher.names_of(unheld)
            raise ValueError(
                f"optimizer must hold every parameter that a loss depends on: that of {task!r}"
                f" depends on {names[0]} and {len(unheld) - 1} others that it does not hold; hand"
                " them to it (or to a second one), or freeze them"
            )
        return reached


@contextlib.contextmanager
def _unchanged_gradients(parameters: Sequence[nn.Parameter], task: str) -> Iterator[None]:
    """Around a closure.

    Raises:
        RuntimeError: It has changed a gradient in `.grad`.

    """
    # The version shows changes in place.
    grads = [parameter.grad for parameter in parameters]
    versions = [grad._version for grad in grads if grad is not None]
    yield
    same = all(p.grad is grad for p, grad in zip(parameters, grads, strict=True))
    if not same or versions != [grad._version for grad in grads if grad is not None]:
        raise RuntimeError(
            f"closure must leave gradients alone, got a changed one after that of {task!r}:"
            " leave out zero_grad() and backward()"
        )


@contextlib.contextmanager
def _hint_at_step() -> Iterator[None]:
    """Tasks' outputs are views of one tensor: torch only says that such views must not change."""
    try:
        yield
    except RuntimeError as error:
        if "is a view and" in str(error) and "inplace" in str(error):
            raise ValueError(
                "forward must not change the outputs of run in place, as a head that begins with"
                " ReLU(inplace=True) does: use step, or leave out inplace"
            ) from error
        raise


@contextlib.contextmanager
def _hint_at_backward() -> Iterator[None]:
    """Losses of one forward pass belong into `backward`; torch only says that its graph is gone."""
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" in str(error):
            add_note(
                error,
                "step(closure) takes a forward pass for each task, and makes the backward passes:"
                " with losses of one forward pass, call backward({task: loss}) in its place",
            )
        raise


def no_shared_parameter(task: str) -> ValueError:
    """The error for a loss from another network than the trunk."""
    return ValueError(
        f"a loss must depend on a parameter of trunk, got one for {task!r} that depends on none:"
        " was it computed with a copy of the trunk, or without gradients?"
    )
