"""The features that each way to make gradients supports, in one table with the error messages.

`table` makes the documentation's table from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from cs_kernels.methods import GradDrop, Method
from cs_kernels.torch_internals.fsdp import is_sharded

if TYPE_CHECKING:  # Avoids a circular import.
    from cs_kernels.engine.engine import Engine

STEP = "step"
BACKWARD = "backward"
FEATURES = "backward with features"
TOGETHER = "step_together"
CAPTURED = "a captured step"
WAYS = (STEP, BACKWARD, FEATURES, TOGETHER, CAPTURED)
"""The ways to make gradients, in the order of the table's columns."""


@dataclass(frozen=True)
class Feature:
    """A feature that not every way to make gradients supports."""

    name: str
    """For the documentation."""
    found: Callable[["Engine"], object]
    """Returns the loop's use of the feature, which messages can quote; None or False if unused."""
    refused: Mapping[str, str]
    """By way that lacks it: the error message, a format string of `found` and `loop`."""
    error: type[Exception] = ValueError


def _needs_all_gradients(loop: "Engine") -> Method | None:
    """The method, if it cannot make the updates layer by layer."""
    return loop.method if loop.method.separate_gradients and not loop.method.layerwise else None


def _sharded(loop: "Engine") -> int | None:
    return sum(map(is_sharded, loop.trunk.held())) or None


def _plain_norm_in_training(loop: "Engine") -> str | None:
    return next(
        (
            name
            for name, module in loop.trunk.modules_outside_norms()
            if isinstance(module, _BatchNorm) and module.training
        ),
        None,
    )


WOULD_FORGET = (
    "step would drop the gradients of backward(..., update=False): call backward(...) first, which"
    " makes their update, or optimizer.zero_grad(), which drops them"
)
_AGAIN = (
    "weighting must not compute losses again {where}, got {{found!r}}: use FAMO(reevaluate=False)"
)
_KEPT = "method must not keep gradients for {where}, got {{found!r}}: use step or backward"

_ONE_PROCESS = {
    TOGETHER: "process_group must be None for step_together, got {loop.ranks.size} rank(s): use"
    " step",
    CAPTURED: "process_group must be None for a captured step, got {loop.ranks.size} rank(s), whose"
    " hosts exchange messages in every step",
}

TABLE = (
    Feature(
        "kept gradients (`Protect` with `refresh_every` or `rank`)",
        lambda loop: None if loop.method.keeps is None else loop.method,
        {
            FEATURES: _KEPT.format(where="backward with features, which differ from step to step"),
            TOGETHER: _KEPT.format(
                where="step_together, which never has all gradients of the tasks"
            ),
            CAPTURED: _KEPT.format(where="a captured step, which makes the same passes every time"),
        },
    ),
    Feature(
        "a method that needs the gradients of all layers at once",
        _needs_all_gradients,
        {
            TOGETHER: "method must be ConnectionStrength(), Sum() or one with groups='layer' for"
            " step_together, which never has all gradients of the tasks, got {found!r}: use step"
        },
    ),
    Feature(
        "a weighting that computes losses again (`FAMO()`)",
        lambda loop: loop.weighting if loop.weighting.reevaluates else None,
        {
            BACKWARD: _AGAIN.format(where="after backward, which has no closure"),
            FEATURES: _AGAIN.format(where="after backward, which has no closure"),
            TOGETHER: _AGAIN.format(where="in step_together"),
            CAPTURED: _AGAIN.format(where="in a captured step"),
        },
    ),
    Feature(
        "plain batch normalization in training",
        _plain_norm_in_training,
        {
            TOGETHER: "trunk must have no plain batch normalization in training for step_together,"
            " got {found}: convert it, set it to eval(), or use step"
        },
    ),
    Feature(
        "parameters after `fully_shard`",
        _sharded,
        {
            TOGETHER: "trunk must have whole parameters for step_together, but {found} in the"
            " optimizer are sharded: use step",
            CAPTURED: "trunk must have whole parameters for a captured step, but {found} in"
            " the optimizer are sharded, and ranks agree on every step on their hosts: use step",
        },
    ),
    Feature(
        "many ranks",
        lambda loop: loop.ranks.is_distributed,
        _ONE_PROCESS,
    ),
    Feature(
        "`GradDrop()` on many ranks",
        lambda loop: loop.ranks.is_distributed and isinstance(loop.method, GradDrop),
        {
            FEATURES: "method must not draw a number for each element in backward with features on"
            " several ranks, because each rank has different samples, got {loop.method!r}",
            **_ONE_PROCESS,
        },
    ),
    Feature(
        "`update_every` above 1",
        lambda loop: loop.method.update_every if loop.method.update_every > 1 else None,
        {
            CAPTURED: "update_every must be 1 in a captured step, got {found} from {loop.method!r},"
            " because steps that reuse task weights run different kernels: use step"
        },
    ),
    Feature(
        "`backward=`",
        lambda loop: loop.graph.backward,
        {
            FEATURES: "backward must be None with features, where the heads' passes end, got"
            " {found!r}",
            CAPTURED: "backward must be None for a captured step, got {found!r}: it may run Python"
            " code in every step",
        },
    ),
    Feature(
        "`count_conflicts`",
        lambda loop: loop.monitor.counter,
        {
            FEATURES: "count_conflicts needs gradients of all shared parameters, got features,"
            " where the heads' passes end: leave features out, or stop counting"
            " with count_conflicts(None)",
            TOGETHER: "count_conflicts needs all gradients of the tasks, got step_together, which"
            " never has them: use step, or stop counting with count_conflicts(None)",
        },
    ),
    Feature(
        "micro-batches",
        lambda loop: loop.accumulation.is_open(),
        {
            FEATURES: "features must be None in a call that ends micro-batches with update=False,"
            " whose gradients are dropped now: end them without features, or call"
            " optimizer.zero_grad() first",
            TOGETHER: WOULD_FORGET,
        },
        RuntimeError,
    ),
    Feature(
        "task-specific normalization, as for `ConnectionStrength()`",
        lambda loop: len(loop.trunk.norms) or None,
        dict.fromkeys(
            (BACKWARD, FEATURES),
            "trunk must have no task-specific normalization for backward, which takes one forward"
            " pass for all tasks, got {found} of them: use step(closure)",
        ),
    ),
    Feature(
        "Phase 1",
        lambda loop: not loop.accumulation.is_open() and loop.phase == 1,
        dict.fromkeys(
            (BACKWARD, FEATURES),
            "backward makes joint updates, but {loop.schedule!r} is in Phase 1: use step",
        ),
        RuntimeError,
    ),
)
"""The features, in the order of the checks."""


def check(way: str, loop: "Engine") -> None:
    """Raises the error of the first feature in use that a way does not support."""
    for feature in TABLE:
        message = feature.refused.get(way)
        if message is not None:
            found = feature.found(loop)
            if found is not None and found is not False:
                raise feature.error(message.format(found=found, loop=loop))


def table() -> str:
    """The table in Markdown."""
    rows = [
        [feature.name, *("no" if way in feature.refused else "yes" for way in WAYS)]
        for feature in TABLE
    ]
    head = ["", *(way if " " in way else f"`{way}`" for way in WAYS)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
