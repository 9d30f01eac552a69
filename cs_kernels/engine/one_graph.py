"""`backward`: a backward pass a task after one forward pass of the caller, and micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from cs_kernels.engine import supports
from cs_kernels.engine.engine import Engine, Mode
from cs_kernels.engine.loss_graph import checked_losses
from cs_kernels.schedules import Phase
from cs_kernels.step import KeptWeights, Part, Step


def trace_losses(engine: Engine, losses: Mapping[str, Tensor]) -> None:
    """Checks the losses of `backward`, without a step."""
    checked = checked_losses(losses)
    engine.chosen(checked)
    engine.forget_passes()
    for task, loss in checked.items():
        engine.graph.check(task, loss, shows_reach=True)
    if engine.method.separate_gradients:
        engine.pass_checks.check_repeatable(checked)
    engine.trunk.end_trace()


class OneGraph(Mode):
    """Losses with a common graph, whose last backward pass frees it.

    The caller's torch optimizer makes the step. With `update=False`, the gradients wait for those
    of a later call.
    """

    name = supports.BACKWARD
    label = "cs_kernels.backward"
    applies = False

    def __init__(self, engine: Engine, losses: object, *, update: bool) -> None:
        super().__init__(engine)
        self._given = losses
        self.losses: Mapping[str, Tensor] = {}
        self.update = update
        self._continues = False

    def around(self) -> AbstractContextManager[None]:
        """An exception drops the gradients that wait."""
        return self.engine.accumulation.dropped_on_error(self.engine.transaction.drop)

    def arguments(self) -> Iterable[str] | None:
        """Checks the losses."""
        self.losses = checked_losses(self._given)
        if not self.losses and self.engine.ranks.size == 1:
            raise ValueError("losses must hold the loss of at least one task, got {}")
        return self.losses

    def phase(self) -> Phase:
        """Joint updates only."""
        return 2

    def check(self) -> None:
        """Begins an update, or goes on with that of earlier calls."""
        self.prepare()
        accumulation = self.engine.accumulation
        self._continues = accumulation.is_open()
        if not self._continues:
            self.engine.guard.check_gradients()
            accumulation.begin()
        self.kind = 1 + (not self.update) + 2 * self._continues
        engine = self.engine
        if engine.ranks.passes_are_counted and engine.kept.since is not None:
            self.passes = engine.graph.passes(self.losses)

    def prepare(self) -> None:
        """Further checks, before an update begins."""

    def open_step(self) -> Step | None:
        """The step that earlier calls have begun."""
        return self.engine.accumulation.step

    def kept_weights(self, step: Step) -> KeptWeights | None:
        """Only if no further call can bring a task that they lack."""
        more = not self.update and step.tasks != self.engine.trunk.tasks
        return None if more else super().kept_weights(step)

    def parts(self, step: Step, tasks: Sequence[str], phase: Phase) -> Iterator[Part]:
        """One part, to which earlier calls may have contributed."""
        for part in super().parts(step, tasks, phase):
            part.adds_up, part.continues = not self.update, self._continues
            yield part

    def make(self, part: Part, held: Sequence[nn.Parameter]) -> None:
        """The backward passes of the losses."""
        engine, step = self.engine, part.step
        engine.accumulation.unmark()
        step.tasks = engine.in_order((*step.tasks, *part.tasks))
        for task, loss in self.losses.items():
            engine.graph.check(task, loss, shows_reach=part.adds_tasks)
        alone = self.update and not self._continues and engine.ranks.size == 1
        step.known = {t: loss.detach() for t, loss in self.losses.items()} if alone else {}
        weighted = {
            task: engine.graph.weigh(task, loss, step, engine.weighting)
            for task, loss in self.losses.items()
        }
        present = [task for task in part.tasks if task in self.losses]
        self.backward_passes(part, {task: weighted[task] for task in present})
        engine.graph.passed(*self.losses)

    def backward_passes(self, part: Part, losses: Mapping[str, Tensor]) -> None:
        """The backward passes of weighted losses; other ranks may have some for more tasks."""
        engine, step, present = self.engine, part.step, [*losses]
        ranks, graph = engine.ranks, engine.graph
        if not part.separate:
            if present:
                graph.run_backward(losses, step, last=True, apart=ranks.passes > 1)
            return
        engine.pass_checks.check_repeatable(losses)
        for task in part.tasks:
            if task not in losses:
                ranks.skip(task)
                continue
            retains = task != present[-1]
            graph.run_backward({task: losses[task]}, step, last=True, retain_graph=retains)
            engine.collect(task)

    def prepared(self, step: Step, phase: Phase) -> Callable[[], None]:
        """Leaves the update to the torch optimizer, or the gradients to the next call."""
        accumulation, guard = self.engine.accumulation, self.engine.guard
        if not self.update:
            return accumulation.waiting(step)
        finished = super().prepared(step, phase)

        def commit() -> None:
            finished()
            accumulation.clear()
            guard.note_update()

        return commit

    def losses_of(self, step: Step) -> dict[str, Tensor]:
        """The losses of this call."""
        return step.recent.losses
