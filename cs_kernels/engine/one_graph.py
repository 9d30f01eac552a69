"""The passes of `backward`: one per task, through the graph of the caller's forward pass."""

from collections.abc import Mapping

from torch import Tensor

from cs_kernels.engine.engine import Engine
from cs_kernels.engine.loss_graph import checked_losses
from cs_kernels.stage import Passes, Stage


def checked_call(engine: Engine, losses: object) -> dict[str, Tensor]:
    """Checks the losses of `backward`, and returns them by task.

    Raises:
        ValueError: There are no losses in a run of a single process.

    """
    checked = checked_losses(losses)
    if not checked and engine.ranks.size == 1:
        raise ValueError("losses must hold the loss of at least one task, got {}")
    return checked


def begin_update(engine: Engine, *, update: bool) -> Stage:
    """Begins an update, or continues the update of earlier calls; returns this call's stage."""
    accumulation = engine.accumulation
    if accumulation.is_open():
        return Stage.LAST if update else Stage.MIDDLE
    engine.guard.check_gradients()
    accumulation.begin()
    return Stage.WHOLE if update else Stage.FIRST


def passes_needed(engine: Engine, losses: Mapping[str, Tensor]) -> int:
    """The number of backward passes if all ranks must make equally many; otherwise 1."""
    counts = engine.ranks.passes_are_counted and engine.kept.since is not None
    return engine.graph.passes(losses) if counts else 1


def weighted_losses(
    engine: Engine, passes: Passes, losses: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The losses after weighting; their graphs are checked first."""
    step, graph = passes.step, engine.graph
    engine.accumulation.unmark()
    step.tasks = engine.in_order((*step.tasks, *passes.tasks))
    for task, loss in losses.items():
        graph.check(task, loss, shows_reach=passes.adds_tasks)
    known = passes.stage in (Stage.WHOLE, Stage.HEADS) and engine.ranks.size == 1
    step.known = {t: loss.detach() for t, loss in losses.items()} if known else {}
    weighted = {t: graph.weigh(t, loss, step, engine.weighting) for t, loss in losses.items()}
    return {task: weighted[task] for task in passes.tasks if task in losses}


def check_batched(engine: Engine, *, batched: bool) -> None:
    """Raises ValueError if the backward passes of several losses cannot be made at once."""
    if not batched:
        return
    if engine.ranks.is_distributed:
        raise ValueError(
            f"batched must be False with a process group, got {batched!r}"
            f" on {engine.ranks.size} rank(s)"
        )
    if engine.graph.backward is not None:
        raise ValueError(
            f"batched must be False with backward={engine.graph.backward!r}, which takes one loss,"
            f" got {batched!r}"
        )


def passes_of_losses(
    engine: Engine, passes: Passes, losses: Mapping[str, Tensor], *, batched: bool = False
) -> None:
    """Runs the backward passes of these losses; the last pass frees the graph.

    Other ranks may have losses of other tasks.
    """
    step, ranks, graph = passes.step, engine.ranks, engine.graph
    weighted = weighted_losses(engine, passes, losses)
    present = [*weighted]
    if not passes.separate:
        if present:
            graph.run_backward(weighted, step, last=True, apart=ranks.passes > 1)
    else:
        engine.pass_checks.check_repeatable(weighted)
        batched = (
            batched and len(present) > 1 and graph.run_batched(weighted, engine.collect_batched)
        )
        for task in () if batched else passes.tasks:
            if task not in weighted:
                ranks.skip(task)
                continue
            retains = task != present[-1]
            graph.run_backward({task: weighted[task]}, step, last=True, retain_graph=retains)
            engine.collect(task)
    graph.passed(*losses)


def trace_losses(engine: Engine, losses: Mapping[str, Tensor]) -> None:
    """Checks the losses of `backward`, without a step."""
    checked = checked_losses(losses)
    engine.chosen(checked)
    engine.forget_passes()
    engine.kept.forget()
    for task, loss in checked.items():
        engine.graph.check(task, loss, shows_reach=True)
    if engine.method.separate_gradients:
        engine.pass_checks.check_repeatable(checked)
    engine.trunk.end_trace()
