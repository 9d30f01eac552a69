"""Anchors: gradients of protected tasks that constrain the updates of later steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cs_kernels.methods import Method
from cs_kernels.options import checked_integer
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.step import Anchor, Keeping, Step


@dataclass(frozen=True)
class _Kept:
    """A task's gradient in one step."""

    number: int
    """The number of the step that computed it."""
    row: list[Tensor | None]
    """The result of `Storage.keep`, perhaps on another device."""


class Anchors:
    """The gradients that a method keeps between steps (`Method.keeps`).

    Args:
        ranks: Holds the gradients of a step.

    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._names = ranks.gradients.names
        self._kept: dict[str, list[_Kept]] = {}
        """By task, the newest gradient first."""
        self._expired = False
        """Whether the next joint step computes the gradients again, whatever their age."""
        self._fresh: dict[str, list[Tensor | None]] = {}
        """The current step's gradients of protected tasks; `lend` sets them, `after` takes them."""

    def forget(self) -> None:
        """Drops all kept gradients."""
        self._kept, self._expired = {}, False

    def expire(self) -> None:
        """Makes the next joint step compute all gradients: different parameters may train now."""
        self._expired = True

    def due(self, tasks: Sequence[str], method: Method, number: int) -> tuple[str, ...]:
        """The tasks whose gradients a joint step computes; all given tasks if none is due.

        Args:
            tasks: The tasks with labels.
            method: The method of the step.
            number: The number of the step.

        """
        if method.keeps is None or self._expired:
            return tuple(tasks)
        waits = {
            task
            for task in method.keeps.tasks
            for kept in self._kept.get(task, [])[:1]
            if number - kept.number < method.keeps.refresh_every
        }
        return tuple(task for task in tasks if task not in waits) or tuple(tasks)

    def lend(self, step: Step, method: Method) -> None:
        """Before the method runs: adds anchors, and sets aside this step's protected gradients.

        `after` keeps the gradients that were set aside, in place of the oldest kept ones.
        """
        keeps, ranks = method.keeps, self._ranks
        if keeps is None:
            return
        present = [task for task in keeps.tasks if task in step.tasks]
        ranks.gradients.kept = frozenset(present)
        free = [t for t in keeps.tasks if t not in present and not self._kept.get(t)]
        if free:
            warnings.warn(
                f"losses should contain {free[0]!r}, because no gradient of it is kept yet, so it"
                " does not constrain this update; due_tasks lists the tasks that need a loss",
                stacklevel=2,
            )
        self._fresh = {t: ranks.keep(t, ranks.gradients.row_of(t), keeps.device) for t in present}
        for task in keeps.tasks:
            # A task with a gradient in this step needs one kept gradient fewer.
            for kept in self._kept.get(task, [])[: keeps.rank - (task in present)]:
                ranks.gradients.anchors.append(ranks.anchor(kept.row))
                step.anchors = (*step.anchors, Anchor(task, kept.number))

    def after(self, step: Step, method: Method) -> Callable[[], None]:
        """After the method has run: returns a function that keeps this step's gradients.

        A non-finite gradient is not kept; this check synchronizes with the device.
        """
        fresh, self._fresh = self._fresh, {}
        energies = step.surgery.energies
        if method.keeps is None or energies is None or not fresh:
            return lambda: None
        is_finite = dict(zip(step.surgery.rows, energies.isfinite().tolist(), strict=True))
        kept = dict(self._kept)
        for task, row in fresh.items():
            if is_finite[task]:
                kept[task] = [_Kept(step.number, row), *kept.get(task, [])][: method.keeps.rank]
        expired = self._expired and not all(is_finite[task] for task in fresh)

        def commit() -> None:
            self._kept, self._expired = kept, expired

        return commit

    # --- checkpoints ---

    def _trained(self) -> list[str]:
        parameters = zip(self._names, self._ranks.parameters, strict=True)
        return [name for name, parameter in parameters if parameter.requires_grad]

    def state_dict(self, keeps: Keeping) -> dict[str, Any]:
        """Facts and, for each gradient that the method keeps, one tensor per shared parameter.

        All entries exist even before the first step, because a distributed checkpoint is loaded
        only into existing entries.
        """
        facts: dict[str, Any] = {}
        tensors: dict[str, dict[str, Tensor]] = {}
        for task, n in _slots(keeps):
            of_task = self._kept.get(task, [])
            kept = of_task[n] if n < len(of_task) else _Kept(-1, [None] * len(self._names))
            named = [*zip(self._names, kept.row, strict=True)]
            reached = [name for name, grad in named if grad is not None]
            facts[f"{task}/{n}"] = {"number": kept.number, "reached": reached}
            tensors[f"{task}/{n}"] = {
                name: self._ranks.saved(i, grad) for i, (name, grad) in enumerate(named)
            }
        return {"facts": (facts, self._expired, self._trained()), "gradients": tensors}

    def check_state(self, state: Mapping[str, Any], keeps: Keeping) -> None:
        """Raises an error for a kept gradient with a wrong parameter, shape or step number."""
        facts, _, _ = state["facts"]
        shapes = dict(zip(self._names, (p.shape for p in self._ranks.parameters), strict=True))
        for task, n in _slots(keeps):
            of = facts.get(f"{task}/{n}", {"number": -1, "reached": []})
            checked_integer("number", of["number"], -1, 1 << 63)
            tensors = state["gradients"].get(f"{task}/{n}", {})
            for name in of["reached"]:
                if name not in shapes:
                    raise ValueError(
                        "state must be for this trunk, got a kept gradient of"
                        f" {task!r} for {name!r}, which is not one of its shared parameters"
                    )
                shape = tuple(tensors[name].shape) if name in tensors else None
                if shape != tuple(shapes[name]):
                    raise ValueError(
                        f"state must have a kept gradient of {task!r} for {name!r} of shape"
                        f" {tuple(shapes[name])}, got {shape}"
                    )

    def load_state_dict(self, state: Mapping[str, Any], keeps: Keeping) -> None:
        """Continues from a `state_dict`; the gradients expire if different parameters train now."""
        self.forget()
        facts, expired, trained = state["facts"]
        self._expired = expired or trained != self._trained()
        for task, n in _slots(keeps):
            of = facts.get(f"{task}/{n}", {"number": -1})
            if of["number"] >= 0:
                reached, tensors = set(of["reached"]), state["gradients"][f"{task}/{n}"]
                row = [
                    self._ranks.loaded(i, tensors[name], keeps.device) if name in reached else None
                    for i, name in enumerate(self._names)
                ]
                self._kept.setdefault(task, []).append(_Kept(int(of["number"]), row))


def _slots(keeps: Keeping) -> list[tuple[str, int]]:
    return [(task, n) for task in keeps.tasks for n in range(keeps.rank)]
