"""The passes of `step`: a forward and a backward pass per task, in Phase 1 and in Phase 2."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.engine.engine import Engine
from cs_kernels.engine.loss_graph import checked_loss
from cs_kernels.errors import described, noted
from cs_kernels.nn.task_norm import active
from cs_kernels.stage import Passes
from cs_kernels.step import Step

Closure = Callable[[str], Tensor]


def passes_of_task(engine: Engine, passes: Passes, task: str, closures: Sequence[Closure]) -> None:
    """Runs one task's passes; the gradients go into the task's row, or add up in `.grad`.

    A rank without labels for the task makes no passes.
    """
    trunk, ranks = engine.trunk, engine.ranks
    if not ranks.has(task):
        ranks.skip(task)
        return
    watched = task not in trunk.watcher.tasks
    _run(engine, passes, task, closures)
    if passes.separate:
        engine.collect(task)
    elif len(passes.tasks) == 1:
        trunk.check_reached(task, ranks.note(task))
    trunk.rewatch_new_layers(watched)


def _run(engine: Engine, passes: Passes, task: str, closures: Sequence[Closure]) -> None:
    """Runs one task's forward and backward passes, which leave its gradients in `.grad`."""
    step, trunk, graph = passes.step, engine.trunk, engine.graph
    alone = len(closures) == 1 and engine.ranks.size == 1
    # The task stays active in the backward pass, where checkpointing recomputes the trunk.
    with active(trunk.norms, task):
        for number, closure in enumerate(closures, 1):
            with unchanged_gradients(trunk.witnesses, task), trunk.watcher.passing(task):
                loss = checked_loss(closure(task), task)
            if not {norm.active for norm in trunk.norms} <= {task}:
                raise ValueError(
                    f"closure must leave {task!r} active in trunk, but another task is: in"
                    " the closure, use active_task(trunk, task) instead of set_task"
                )
            graph.check(task, loss, shows_reach=passes.adds_tasks, alone=True)
            step.known = {task: loss.detach()} if alone else {}
            weighted = graph.weigh(task, loss, step, engine.weighting)
            with _hint_at_backward():
                graph.run_backward({task: weighted}, step, last=number == len(closures))
    trunk.watcher.learned(task)
    graph.passed(task)


def observe_again(
    engine: Engine, step: Step, tasks: Sequence[str], closures: Sequence[Closure]
) -> None:
    """Recomputes the losses after a step with its closures, for a weighting that `reevaluates`."""
    trunk, weighting = engine.trunk, engine.weighting

    def evaluate(task: str) -> Tensor:
        with active(trunk.norms, task), torch.no_grad(), trunk.watcher.noticing(task):
            losses = [closure(task).detach().reshape(()) for closure in closures]
            return sum(losses[1:], losses[0])

    note = (
        f"the step is complete: {weighting!r} computes losses again after it, without gradients;"
        " with reevaluate=False, it takes the losses of the next step"
    )
    with noted(note):
        try:
            with engine.transaction.without_traces(step.tasks), engine.guard.during("passes"):
                step.losses_after = {task: evaluate(task) for task in tasks}
        finally:
            with engine.transaction.states(weighting):
                weighting.observe(step)


def trace(engine: Engine, closure: object) -> None:
    """Runs a watched forward pass of each task, without a step."""
    (closure,) = checked_closures(closure)
    trunk = engine.trunk
    engine.forget_passes()
    engine.kept.forget()
    with trunk.unchanged(trunk.tasks, always=True):
        for task in trunk.tasks:
            with active(trunk.norms, task), torch.enable_grad():
                with unchanged_gradients(trunk.witnesses, task), trunk.watcher.passing(task):
                    loss = closure(task)
                trunk.watcher.learned(task)
                if isinstance(loss, Tensor) and loss.requires_grad:
                    engine.graph.check(task, loss, shows_reach=True, alone=True)
                    engine.graph.passed(task)
    trunk.end_trace()


def checked_closures(closure: object) -> list[Closure]:
    """The closures as a list, one per micro-batch."""
    many = isinstance(closure, Iterable) and not isinstance(closure, Mapping | Tensor | str)
    closures = list(closure) if isinstance(closure, Iterable) and many else [closure]
    if not closures:
        raise ValueError("closure must be a function or a sequence of them, got none")
    for function in closures:
        if not callable(function):
            hint = ": with losses of one forward pass, call backward({task: loss})"
            raise TypeError(
                f"closure must be a function from a task to its loss, got {described(function)}"
                f"{hint if isinstance(function, Mapping | Tensor) else ''}"
            )
    found: dict[object, object] = {}
    for function in closures:
        facts = _what_it_reads(function)
        if facts is not None and found.setdefault(facts, function) is not function:
            raise ValueError(
                f"closure must be a function for each micro-batch, got {len(closures)}, two of"
                " which have the same code and variables, and so read the same batch: bind each"
                " batch, as in functools.partial(loss, batch); or repeat one function,"
                " [closure] * 2, if it gets its batches itself"
            )
    return cast("list[Closure]", closures)


def _what_it_reads(function: object) -> object:
    """A value that is equal for two functions with the same code and variables; None if unknown."""
    if isinstance(function, partial):
        inner = _what_it_reads(function.func)
        bound = *function.args, *function.keywords.values()
        return None if inner is None else (inner, *map(id, bound), *function.keywords)
    if not isinstance(function, FunctionType):
        return None
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    cells = function.__closure__ or ()
    return function.__code__, id(function.__globals__), *map(id, defaults), *map(id, cells)


@contextlib.contextmanager
def unchanged_gradients(parameters: Sequence[nn.Parameter], task: str) -> Iterator[None]:
    """Wraps a call of the closure.

    Raises:
        RuntimeError: The closure has changed a gradient in `.grad`.

    """
    # Version counters reveal in-place changes.
    grads = [parameter.grad for parameter in parameters]
    present = [grad for grad in grads if grad is not None]
    versions = [grad._version for grad in present]
    yield
    same = all(map(is_, [parameter.grad for parameter in parameters], grads))
    if not same or versions != [grad._version for grad in present]:
        raise RuntimeError(
            f"closure must leave gradients alone, but the closure of {task!r} changed one:"
            " leave out zero_grad() and backward()"
        )


@contextlib.contextmanager
def _hint_at_backward() -> Iterator[None]:
    """Explains torch's error for a freed graph: losses of one forward pass belong in `backward`."""
    try:
        yield
    except RuntimeError as error:
        if "through the graph a second time" in str(error):
            error.add_note(
                "step(closure) takes a forward pass for each task, and makes the backward passes:"
                " with losses of one forward pass, call backward({task: loss}) in its place",
            )
        raise
