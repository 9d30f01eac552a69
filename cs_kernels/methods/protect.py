"""Protect: projects the gradients of all other tasks off those of the protected tasks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups, nan_unless_finite
from cs_kernels.options import check_mapping, checked_integer
from cs_kernels.step import Step

_SHORT = 1e-30
"""The length of the constraints' gradients in a quadratic program, where the other one has 1."""


class Protect(GramianMethod):
    """Protects the given tasks from the gradients of all other tasks, in one direction only.

    The other tasks' gradients are added, and their sum is projected onto the vectors that conflict
    with no protected task's gradient. Without conflict, the sum is unchanged; in a conflict with
    one protected task, it loses its component along that task's gradient. The protected gradients
    are added to the projection, unchanged: a conflict between two protected tasks stays.

    This is the projection of GEM (Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual
    Learning", 2017), and, with one protected task, of A-GEM (Chaudhry et al., "Efficient Lifelong
    Learning with A-GEM", 2019) and SafeGrad (Yi et al., "Gradient Surgery for Safe LLM
    Fine-Tuning", 2025).

    Args:
        *tasks: The protected tasks: those of level 0.
        levels: More than two levels of priority: a level from 0 per task. The sum of a level's
            gradients is projected off the gradients of all lower-numbered levels. A task without a
            level comes after all levels that are named.
        constraint_only: Whether the gradients of level 0 only constrain the update, as in GEM and
            A-GEM, and are not added to it. Heads of these tasks still get their gradients.
        groups: "all", or "layer" for separate projections in each layer.
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: No task is protected, `levels` repeats a protected task, or an option has an
            invalid value. `MultiTaskOptimizer` and `GradientBalancer` raise it for unknown tasks,
            and if all tasks are protected.
        TypeError: A task is not a string, `levels` not a mapping, or a level not an integer.

    Examples:
        >>> method = cs.Protect("retain")
        >>> step = cs.Step(0, ("retain", "forget"))
        >>> method.weights(torch.tensor([[4.0, -2.0], [-2.0, 9.0]]).double(), step)
        tensor([1.5000, 1.0000], dtype=torch.float64)

    """

    def __init__(
        self,
        *tasks: str,
        levels: Mapping[str, int] | None = None,
        constraint_only: bool = False,
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        for task in tasks:
            if not isinstance(task, str):
                raise TypeError(f"tasks must be names, as in Protect('a', 'b'), got {task!r}")
        self.levels = dict.fromkeys(tasks, 0)
        given = {} if levels is None else levels
        check_mapping("levels", given, "level")
        for task, level in given.items():
            if task in self.levels:
                raise ValueError(f"levels must leave out the protected {task!r}, got {level}")
            self.levels[task] = checked_integer(f"levels[{task!r}]", level, 0)
        if 0 not in self.levels.values():
            raise ValueError(f"tasks must name a protected task, got {tasks} and levels={levels}")
        if constraint_only not in (True, False):
            raise ValueError(f"constraint_only must be True or False, got {constraint_only!r}")
        self.constraint_only = constraint_only

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that all named tasks exist, and that another level is left to be projected.

        Raises:
            ValueError: A named task does not exist, or all tasks are protected.

        """
        super().check(tasks)
        unknown = [task for task in self.levels if task not in tasks]
        if unknown:
            raise ValueError(f"method must name tasks among {list(tasks)}, got {unknown[0]!r}")
        if not any(self._level_of(tasks)):
            raise ValueError(
                f"method must leave tasks unprotected, but {self!r} protects all of {list(tasks)}"
            )

    def _level_of(self, tasks: Sequence[str]) -> list[int]:
        last = 1 + max(self.levels.values())
        return [self.levels.get(task, last) for task in tasks]

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """Non-negative task weights: 1, and more for a task that the projections have moved toward.

        Raises:
            ValueError: `step` is None.

        """
        if step is None:
            raise ValueError(f"step must have the names of the tasks for {self!r}")
        gramian = gramian.double()
        level_of = self._level_of(step.tasks)
        first = 0.0 if self.constraint_only else 1.0
        weights = [
            gramian.new_full(gramian.shape[:-2], 1.0 if level else first) for level in level_of
        ]
        for level in sorted({*level_of} - {0}):
            above = [i for i, other in enumerate(level_of) if other < level]
            own = [i for i, other in enumerate(level_of) if other == level]
            if above:
                for i, moved in zip(above, _projection(gramian, above, own), strict=True):
                    weights[i] = weights[i] + moved
        return nan_unless_finite(torch.stack(weights, -1), gramian)

    def __repr__(self) -> str:
        tasks = ", ".join(repr(task) for task, level in self.levels.items() if level == 0)
        lower = {task: level for task, level in self.levels.items() if level > 0}
        options: dict[str, object] = {"levels": lower} if lower else {}
        if self.constraint_only:
            options["constraint_only"] = True
        rest = self._repr(**options)[len("Protect(") : -1]
        return f"Protect({', '.join(filter(None, (tasks, rest)))})"


def _projection(gramian: Tensor, above: Sequence[int], own: Sequence[int]) -> list[Tensor]:
    """The multiples of the gradients of `above` that project the sum of `own` onto their dual cone.

    UPGrad's solver projects each of its gradients onto the dual cone of all. A projection is
    proportional to the length of what is projected, and does not depend on the constraints'
    lengths. With short constraints, UPGrad therefore gives the projection of the sum alone. The sum
    is one of the constraints too, but its projection never conflicts with it.
    """

    def reduced(entries: Sequence[Tensor]) -> list[Tensor]:
        last = torch.stack([entries[i] for i in own]).sum(0)
        return [*(entries[i] for i in above), last]

    rows = reduced(gramian.unbind(-2))
    products = torch.stack([torch.stack(reduced(row.unbind(-1)), -1) for row in rows], -2)
    norms = products.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scaled = torch.where(norms > 0, 1 / norms, 0.0)
    scaled = torch.cat([scaled[..., :-1] * _SHORT, scaled[..., -1:]], -1)
    products = products * scaled.unsqueeze(-1) * scaled.unsqueeze(-2)
    solved = torch.ops.cs_kernels.upgrad_weights(products) * (len(above) + 1)
    moved = solved[..., :-1] * scaled[..., :-1] * norms[..., -1:]
    # UPGrad also projects the short constraints, which leaves about `_SHORT`.
    moved = torch.where(solved[..., :-1] * _SHORT < _SHORT**0.5, 0.0, moved)
    return list(moved.unbind(-1))
