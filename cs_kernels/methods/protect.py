"""Protect: removes the conflicts of the other tasks' gradients with protected gradients."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups, nan_unless_finite
from cs_kernels.options import check_mapping, checked_integer
from cs_kernels.step import Keeping, Step

_SHORT = 1e-30
"""The length of the constraints in a quadratic program that projects a gradient of length 1."""
_DEPENDENT = 1e-12
"""Eigenvalues of the unit gradients' Gramian count as zero up to this fraction of the largest."""


class Protect(GramianMethod):
    """Protects the given tasks from the other tasks' gradients, but not the other way round.

    The other tasks' gradients are added, and their sum is projected onto the vectors that conflict
    with no protected task's gradient. Without conflict, the sum is unchanged; in a conflict with
    one protected task, it loses its component along that task's gradient. The protected gradients
    are added to the projection, unchanged, so a conflict between two protected tasks remains.

    This is the projection of GEM (Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual
    Learning", 2017), and, with one protected task, of A-GEM (Chaudhry et al., "Efficient Lifelong
    Learning with A-GEM", 2019) and SafeGrad (Yi et al., "Gradient Surgery for Safe LLM
    Fine-Tuning", 2025).

    **Kept gradients.** With `refresh_every` above 1, a protected task needs a pass only in some
    steps. In the steps between, `step(closure)` does not call the closure for this task, and
    `backward` needs no loss for it; `MultiTaskOptimizer.due_tasks` names the tasks that the next
    step computes. If `backward` gets a loss anyway, its gradient becomes the newest kept one. The
    kept gradients of each protected task take `rank` times the memory of the shared parameters, or
    of their shards after `fully_shard`. They are part of the state dict. A non-finite gradient is
    not kept. After parameters are frozen or unfrozen, the next step computes all protected
    gradients anew; with `rank`, older kept gradients have no entries for parameters that were
    frozen when these gradients were computed.

    Args:
        *tasks: The protected tasks, which have level 0.
        levels: A level per task, counted from 0, for more than two levels of priority. The sum of
            a level's gradients is projected onto the vectors that conflict with no gradient of a
            lower-numbered level. A task without a level comes after all given levels.
        constraint_only: Whether the gradients of level 0 only constrain the update, as in GEM and
            A-GEM, and are not added to it. Heads of these tasks still get their gradients.
        refresh_every: The interval, in steps of both phases, at which protected gradients are
            computed anew. In the steps between, a kept gradient only constrains the update. See
            "Kept gradients".
        rank: The number of gradients to keep per protected task, each from a different batch. The
            other tasks' sum then loses its whole component in the span of these gradients, whatever
            its sign, as in OGPSA (arXiv 2602.07892); gradients that agree to within 1e-6 count
            once. Default: the projection above.
        keep_on: "cpu" keeps gradients in page-locked host memory. Default: on their own device.
        groups: "all", or "layer" for separate projections in each layer.
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: No task is protected, a protected task is repeated, or an option has an invalid
            value. `MultiTaskOptimizer` and `GradientBalancer` raise it for unknown tasks, and if
            all tasks are protected.
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
        refresh_every: int = 1,
        rank: int | None = None,
        keep_on: Literal["cpu"] | None = None,
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        for task in tasks:
            if not isinstance(task, str):
                raise TypeError(f"tasks must be names, as in Protect('a', 'b'), got {task!r}")
            if tasks.count(task) > 1:
                raise ValueError(f"tasks must be distinct, got {task!r} twice in {list(tasks)}")
        self.levels = dict.fromkeys(tasks, 0)
        given = {} if levels is None else levels
        check_mapping("levels", given, "level")
        for task, level in given.items():
            if not isinstance(task, str):
                raise TypeError(f"levels must have names of tasks as keys, got {task!r}")
            if task in self.levels:
                raise ValueError(
                    f"levels must not contain {task!r}, which is already among the protected tasks,"
                    f" got level {level} for it"
                )
            self.levels[task] = checked_integer(f"levels[{task!r}]", level, 0)
        if 0 not in self.levels.values():
            raise ValueError(f"tasks must name a protected task, got {tasks} and levels={levels}")
        if constraint_only not in (True, False):
            raise ValueError(f"constraint_only must be True or False, got {constraint_only!r}")
        self.constraint_only = constraint_only
        if keep_on not in (None, "cpu"):
            raise ValueError(f"keep_on must be 'cpu' or None, got {keep_on!r}")
        self.rank = None if rank is None else checked_integer("rank", rank, 1)
        if rank is not None and any(self.levels.values()):
            raise ValueError(f"levels must be None with rank, got {levels} and rank={rank}")
        protected = tuple(task for task, level in self.levels.items() if level == 0)
        every = checked_integer("refresh_every", refresh_every, 1)
        if keep_on is not None and every == 1 and rank is None:
            raise ValueError(f"keep_on={keep_on!r} needs refresh_every above 1, or rank")
        if every > 1 or rank is not None:
            self.keeps = Keeping(protected, every, self.rank or 1, keep_on)
            if update_every > 1:
                raise ValueError(
                    f"update_every must be 1 if gradients are kept, got {update_every} with"
                    f" refresh_every={every} and rank={rank}"
                )

    def check(self, tasks: Sequence[str]) -> None:
        """Checks that all named tasks exist, and that at least one task is unprotected.

        Raises:
            ValueError: A named task does not exist, or all tasks are protected.

        """
        super().check(tasks)
        unknown = [task for task in self.levels if task not in tasks]
        if unknown:
            raise ValueError(f"method must name tasks among {list(tasks)}, got {unknown[0]!r}")
        if not any(self._level_of(tasks)):
            raise ValueError(
                f"method must leave at least one task unprotected, but {self!r} protects all of"
                f" {list(tasks)}"
            )

    def _level_of(self, tasks: Sequence[str]) -> list[int]:
        last = 1 + max(self.levels.values())
        return [self.levels.get(task, last) for task in tasks]

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights: initially 1, plus the multiples that the projections add.

        The weights of kept gradients, and of protected tasks with `constraint_only`, are initially
        0. With `rank`, the weights of protected tasks may be negative.

        Raises:
            ValueError: `step` is None.

        """
        if step is None:
            raise ValueError(f"step must be a Step with the tasks' names for {self!r}, got None")
        gramian = gramian.double()
        level_of = self._level_of(step.tasks)
        first = 0.0 if self.constraint_only else 1.0
        initial = [1.0 if level else first for level in level_of] + [0.0] * len(step.anchors)
        level_of += [0] * len(step.anchors)
        weights = [gramian.new_full(gramian.shape[:-2], weight) for weight in initial]
        project = _projection if self.rank is None else _complement
        for level in sorted({*level_of} - {0}):
            above = [i for i, other in enumerate(level_of) if other < level]
            own = [i for i, other in enumerate(level_of) if other == level]
            if above:
                for i, moved in zip(above, project(gramian, above, own), strict=True):
                    weights[i] = weights[i] + moved
        return nan_unless_finite(torch.stack(weights, -1), gramian)

    def __repr__(self) -> str:
        tasks = ", ".join(repr(task) for task, level in self.levels.items() if level == 0)
        lower = {task: level for task, level in self.levels.items() if level > 0}
        options: dict[str, object] = {"levels": lower} if lower else {}
        if self.constraint_only:
            options["constraint_only"] = True
        if self.keeps is not None:
            kept = {"refresh_every": self.keeps.refresh_every, "keep_on": self.keeps.device}
            options |= {name: value for name, value in kept.items() if value not in (1, None)}
        if self.rank is not None:
            options["rank"] = self.rank
        rest = self._repr(**options)[len("Protect(") : -1]
        return f"Protect({', '.join(filter(None, (tasks, rest)))})"


def _complement(gramian: Tensor, above: Sequence[int], own: Sequence[int]) -> list[Tensor]:
    """The multiples of `above` that cancel the sum of `own` within the span of `above`."""
    norms = gramian.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()[..., above]
    scaled = torch.where(norms > 0, 1 / norms, 0.0)
    rows = gramian[..., above, :] * scaled.unsqueeze(-1)
    products = (rows[..., above] * scaled.unsqueeze(-2)).nan_to_num()  # pinv refuses NaN.
    inverse = torch.linalg.pinv(products, rtol=_DEPENDENT, hermitian=True)
    moved = -scaled * (inverse @ rows[..., own].sum(-1, keepdim=True)).squeeze(-1)
    return list(moved.unbind(-1))


def _projection(gramian: Tensor, above: Sequence[int], own: Sequence[int]) -> list[Tensor]:
    """The multiples of `above` that project the sum of `own` onto the dual cone of `above`.

    UPGrad's solver projects each gradient onto the dual cone of all gradients, and returns the mean
    of the projections. A projection is proportional to the length of the projected gradient, and
    independent of the constraints' lengths. Here, the sum has length 1 and the constraints have
    length `_SHORT`, so only the projection of the sum is significant. The sum is itself a
    constraint, but never conflicts with its own projection.
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
    # UPGrad also projects the short constraints, which adds residues of about `_SHORT`.
    moved = torch.where(solved[..., :-1] * _SHORT < _SHORT**0.5, 0.0, moved)
    return list(moved.unbind(-1))
