"""`step` and `backward`, from the call to the torch optimizers: the file to read first.

A call checks its arguments, and the ranks agree on the call (`begin`). Backward passes then leave
each task's gradients in a row, or add them up in `.grad`, stage by stage (`stage.py`); the method
combines the rows (`surgery`); everything that can fail is computed before the torch optimizers step
(`finish`). An exception undoes the stage in which it is raised. The two
other ways to make a step build on this file: `stacked/together.py` runs the same operations of the
engine around a single forward pass, and `captured.py` records `run_step`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing

from torch import Tensor

from cs_kernels.engine import supports
from cs_kernels.engine.at_features import (
    combine_features,
    found_features,
    pass_of_trunk,
    passes_to_features,
)
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.one_graph import (
    begin_update,
    check_batched,
    checked_call,
    passes_needed,
    passes_of_losses,
)
from cs_kernels.engine.per_task import Closure, checked_closures, observe_again, passes_of_task
from cs_kernels.errors import noted
from cs_kernels.schedules import Phase
from cs_kernels.stage import Passes, Stage
from cs_kernels.step import Step


def step(engine: Engine, closure: object, tasks: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Runs a forward and a backward pass per task, and steps the torch optimizers.

    Args:
        engine: Makes the step.
        closure: A function from a task to its loss, or a sequence of them, one per micro-batch.
        tasks: The tasks of the step; None for all.

    """
    with engine.together():
        closures = checked_closures(closure)
        chosen = engine.check(supports.STEP, tasks)
        phase = engine.phase
        engine.check_ready()
        stage = Stage.JOINT if phase == 2 else Stage.TURN
        chosen = engine.begin(chosen, phase, stage, passes=len(closures))
        return run_step(engine, chosen, phase, closures)


def run_step(
    engine: Engine,
    tasks: Sequence[str],
    phase: Phase,
    closures: Sequence[Closure],
    counter: Tensor | None = None,
) -> dict[str, Tensor]:
    """Makes a step whose arguments have been checked.

    Args:
        engine: Makes the step.
        tasks: The tasks of all ranks.
        phase: The phase of the step.
        closures: For each micro-batch, a function from a task to its loss.
        counter: In a capture, a device tensor with the step's number.

    """
    eager = counter is None
    with engine.undone_on_error("cs_kernels.step", eager=eager):
        step = engine.new_step(tasks, phase, counter=counter)
        for passes in _stages(engine, step, tasks, phase):
            with _after(passes, tasks), engine.passing(passes, restores=eager) as parameters:
                with engine.guard.during("passes"):
                    for task in passes.tasks:
                        passes_of_task(engine, passes, task, closures)
                engine.average(passes, parameters)
                if passes.stage.is_joint:
                    engine.surgery(passes)
                if passes.tasks[-1] == tasks[-1]:
                    losses = engine.finish(step, tasks, phase)
                else:
                    engine.apply()
        if engine.weighting.reevaluates:
            observe_again(engine, step, tasks, closures)
    return losses


def _stages(engine: Engine, step: Step, tasks: Sequence[str], phase: Phase) -> list[Passes]:
    """One stage per task in Phase 1, and one for all tasks in Phase 2."""
    if phase == 1:
        return [Passes(step, (task,), Stage.TURN) for task in tasks]
    return [Passes(step, tuple(tasks), Stage.JOINT, separate=engine.separates(step))]


def _after(passes: Passes, tasks: Sequence[str]) -> AbstractContextManager[None]:
    """Adds a note to an exception: which tasks were updated before it."""
    made = [*tasks[: tasks.index(passes.tasks[0])]]
    return noted(f"in Phase 1, the updates of {made} have been made" if made else "")


def backward(engine: Engine, losses: object, *, update: bool, batched: bool) -> dict[str, Tensor]:
    """Runs a backward pass per task through one graph; the caller steps the torch optimizer.

    Args:
        engine: Makes the update.
        losses: The loss of each task that this rank has labels for.
        update: Whether to make the update; otherwise the gradients wait for a later call.
        batched: Whether to make all backward passes at once.

    """
    with engine.together(), engine.accumulation.dropped_on_error(engine.transaction.drop):
        given = checked_call(engine, losses)
        chosen = engine.check(supports.BACKWARD, given)
        check_batched(engine, batched=batched)
        stage = begin_update(engine, update=update)
        tasks = engine.begin(chosen, 2, stage, passes=passes_needed(engine, given))
        with engine.undone_on_error("cs_kernels.backward"):
            step = engine.accumulation.step or engine.new_step(tasks, 2, more=stage.is_open)
            passes = Passes(step, tasks, stage, separate=engine.separates(step))
            return _made(engine, passes, given, batched=batched)


def _made(
    engine: Engine, passes: Passes, losses: dict[str, Tensor], *, batched: bool = False
) -> dict[str, Tensor]:
    """Runs the losses' backward passes, and makes the update unless a later call does."""
    step = passes.step
    with engine.passing(passes) as parameters:
        passes_of_losses(engine, passes, losses, batched=batched)
        engine.average(passes, parameters)
        if passes.stage.is_open:
            found = engine.ranks.returned(step.recent.losses, passes.tasks)
            engine.accumulation.wait(step)
        else:
            engine.surgery(passes)
            found = engine.leave(step, step.recent.losses, passes.tasks)
    return found


def backward_at_features(
    engine: Engine, losses: object, features: object, *, update: bool
) -> dict[str, Tensor]:
    """Runs the heads' backward passes down to the features, and one backward pass of the trunk.

    Args:
        engine: Makes the update.
        losses: As in `backward`.
        features: A tensor that the trunk has returned, or a sequence of such tensors.
        update: As in `backward`; it must be True.

    """
    with engine.together(), engine.accumulation.dropped_on_error(engine.transaction.drop):
        given = checked_call(engine, losses)
        chosen = engine.check(supports.FEATURES, given)
        if not update:
            raise ValueError(
                "update must be True for backward with features, which change from one micro-batch"
                f" to the next, got {update!r}"
            )
        with closing(found_features(engine, features, given)) as found:
            stage = begin_update(engine, update=True)
            needed = passes_needed(engine, given)
            tasks = engine.begin(chosen, 2, stage, passes=needed, features=found.number)
            with engine.undone_on_error("cs_kernels.backward"):
                step = engine.new_step(tasks, 2, at_features=True)
                # A plain sum needs no stop at the features.
                if not engine.method.separate_gradients:
                    return _made(engine, Passes(step, tasks, stage), given)
                heads = Passes(step, tasks, Stage.HEADS)
                with engine.passing(heads) as parameters:
                    passes_to_features(engine, heads, given, found)
                    # Before the method runs, ranks share losses and learn if any rank has failed.
                    engine.average(heads, parameters)
                    combine_features(engine, heads, found)
                trunk = Passes(step, tasks, Stage.TRUNK)
                with engine.passing(trunk) as parameters:
                    pass_of_trunk(engine, trunk, given, found)
                    engine.average(trunk, parameters)
                    found.check_reached()
                    return engine.leave(step, step.losses, tasks)
