"""Counts, for every shared parameter, the steps in which the gradients of two tasks conflict.

Counting reads the gradients once more per step, for a Gramian of each parameter. All other tensors
are small and stay on the gradients' device; the host synchronizes only when a number is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.options import is_finite_number
from cs_kernels.step import Step

_MOST_PATTERNS = 64
_MOST_LINES = 10


@dataclass(frozen=True, repr=False, eq=False)
class Conflicts:
    """The conflicts of each shared parameter, made by `MultiTaskOptimizer.conflicts`.

    P is the number of `names`, K the number of `tasks`. Tensors are symmetric in the tasks. They
    are copies that later steps do not change, and stay on the gradients' device: reading one
    synchronizes with the device. Gradients are computed from the weighted losses; on several ranks,
    they are means over the ranks.
    """

    threshold: float
    """Two gradients are in conflict if their cosine is below this value."""
    tasks: tuple[str, ...]
    names: tuple[str, ...]
    """The parameters, or after `by_module` the modules, in the trunk's order. Parameters that only
    one task reaches are left out."""
    gramians: Tensor
    """Float64 [P, K, K]; the dot products of the last joint step's gradients, without the loss
    scale of a scaler or of `backward=`; NaN where a task had no gradient or took no part."""
    counts: Tensor
    """Int64 [P, K, K]; the number of steps with a conflict, 0 on the diagonal."""
    steps: Tensor
    """Int64 [P, K, K]; the number of steps in which both tasks had a gradient. Neither `steps` nor
    `counts` includes a step with a non-finite gradient of any shared parameter, such as a step that
    a scaler skips."""
    _modules: "Conflicts | None" = None

    @cached_property
    def cosines(self) -> Tensor:
        """Float64 [P, K, K]; the cosines between the gradients of the last joint step.

        A zero gradient has cosine 0, and is thus in conflict if the threshold is positive. Entries
        are NaN where `gramians` is NaN and for non-finite gradients.
        """
        return cosines_of(self.gramians)

    @cached_property
    def share(self) -> Tensor:
        """Float64 [P, K, K]; `counts / steps`, NaN where `steps` is 0."""
        return self.counts / self.steps.double()

    def by_module(self) -> "Conflicts":
        """The conflicts of each module, with all its parameters' gradients as one vector.

        These counts are from the same steps, but do not follow from the counts per parameter.
        """
        return self if self._modules is None else self._modules

    def scores(self) -> dict[str, int]:
        """The sum of `counts` over all pairs of tasks, by name, highest first.

        Synchronizes with the device once. With `by_module`, these are the S-conflict scores of
        Recon (Shi et al., "Recon: Reducing Conflicting Gradients from the Root for Multi-Task
        Learning", 2023, https://arxiv.org/abs/2302.11289), with S as the threshold. Recon turns the
        layers with the highest scores into task-specific ones.
        """
        return {name: score for name, score, _ in self._ranked()}

    def _ranked(self) -> list[tuple[str, int, int]]:
        """(name, conflicts, steps) of each parameter, summed over pairs; most conflicts first."""
        sums = [numbers.triu(1).sum((1, 2)) for numbers in (self.counts, self.steps)]
        rows = torch.stack(sums, 1).tolist()
        entries = ((name, *row) for name, row in zip(self.names, rows, strict=True))
        return sorted(entries, key=lambda entry: -entry[1])

    def __str__(self) -> str:
        """The highest scores, one per line; synchronizes with the device."""
        ranked = self._ranked()
        first = ranked[:_MOST_LINES]
        head = f"cosines below {self.threshold:g}, over all steps and pairs of tasks"
        name_width = max((len(name) for name, *_ in first), default=0)
        width = max((len(str(steps)) for *_, steps in first), default=0)
        lines = [
            f"  {name:{name_width}}  {score:{width}} of {steps:{width}}"
            + (f", {100 * score / steps:5.1f} %" if steps else "")
            for name, score, steps in first
        ]
        if len(ranked) > len(first):
            lines.append(f"  and {len(ranked) - len(first)} more")
        return "\n".join([head, *lines])

    def __repr__(self) -> str:
        tasks, rows = list(self.tasks), len(self.names)
        return f"Conflicts(threshold={self.threshold!r}, tasks={tasks}, P={rows})"


class _Masks(NamedTuple):
    """Which tasks have gradients for which parameters."""

    reachable: Tensor
    """Int64; the indices of the parameters for which any task has a gradient."""
    pairs: Tensor
    """Bool [R, K, K]; whether both tasks have a gradient."""
    distinct_pairs: Tensor
    """`pairs` without the diagonal."""


class ConflictCounter:
    """Counts conflicts in R rows: one per shared parameter, then one per module."""

    def __init__(self, gradients: TaskGradients, threshold: float) -> None:
        if not (is_finite_number(threshold) and -1 <= threshold <= 1):
            raise ValueError(f"threshold must lie in [-1, 1], got {threshold!r}")
        self.threshold = float(threshold)
        self._gradients = gradients
        self._parameters = len(gradients.names)
        self._module_of, self._modules = gradients.layers(range(self._parameters))
        members: list[list[int]] = [[] for _ in self._modules]
        for parameter, module in enumerate(self._module_of):
            members[module].append(parameter)
        most = max(map(len, members), default=0)
        # The parameters of each module, padded with the index of an extra last row of zeros.
        padded = [indices + [self._parameters] * (most - len(indices)) for indices in members]
        tasks, device = len(gradients.tasks), gradients.parameters[0].device
        shape = (self._parameters + len(members), tasks, tasks)
        self._members = torch.tensor(padded, device=device)
        self._gramians = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._steps = torch.zeros(shape, dtype=torch.int64, device=device)
        self._is_captured = False
        """Whether a CUDA graph may read the tensors."""
        self._cached_masks: dict[tuple[bytes, ...], _Masks] = {}
        self._measurement: tuple[Step, Tensor | None, tuple[bytes, ...]] | None = None
        """The unfinished step, its Gramians, and its pattern of present gradients."""

    def measure(self, step: Step) -> None:
        """Computes the Gramians of a step's gradients, before its method consumes them."""
        gradients = self._gradients
        pattern = tuple(bytes(grad is not None for grad in row) for row in gradients.rows)
        reachable = gradients.reached()
        if not reachable:
            self._measurement = step, None, pattern
            return
        groups = list(range(len(reachable)))
        gramians: Tensor = torch.ops.cs_kernels.gramian(
            gradients.of(reachable), groups, len(groups), len(gradients.tasks)
        )
        gramians = gradients.sum_over_ranks(gramians)
        if step.loss_scale is not None:
            gramians = gramians / step.loss_scale.double() ** 2
        self._measurement = step, gramians, pattern

    def count(self, step: Step) -> Callable[[], None]:
        """Counts a joint step's conflicts; returns a function that commits them after the step."""
        measurement, self._measurement = self._measurement, None
        if measurement is None or measurement[0] is not step:
            return lambda: None
        _, gramians, pattern = measurement
        if gramians is None:
            nothing = torch.full_like(self._gramians, torch.nan)
            return partial(self._commit, (nothing, self._counts, self._steps))
        self._follow(gramians.device)
        reachable, pairs, distinct = self._masks(pattern, captured=step.counter is not None)
        tasks = gramians.shape[1:]
        by_parameter = gramians.new_zeros((self._parameters + 1, *tasks))
        by_parameter.index_copy_(0, reachable, gramians)
        by_member = by_parameter.index_select(0, self._members.flatten())
        by_module = by_member.view(*self._members.shape, *tasks).sum(1)
        products = torch.cat([by_parameter[:-1], by_module])
        finite = gramians.isfinite().all()
        counts = self._counts + ((cosines_of(products) < self.threshold) & distinct & finite)
        steps = self._steps + (pairs & finite)
        state = torch.where(pairs, products, torch.nan), counts, steps
        if step.counter is None:
            return partial(self._commit, state)
        for tensor, value in zip(self.captured_state(), state, strict=True):
            tensor.copy_(value)  # In place, for the replays of a CUDA graph.
        return lambda: None

    def _commit(self, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
        if not self._is_captured:  # Only assignments: nothing may fail after the optimizer's step.
            self._gramians, self._counts, self._steps = tensors
            return
        for tensor, value in zip(self.captured_state(), tensors, strict=True):
            tensor.copy_(value)

    def _follow(self, device: torch.device) -> None:
        """Moves the tensors to a device, in case the trunk was moved."""
        if self._counts.device != device:
            self._members, self._gramians, self._counts, self._steps = (
                tensor.to(device)
                for tensor in (self._members, self._gramians, self._counts, self._steps)
            )
            self._cached_masks.clear()

    def _masks(self, pattern: tuple[bytes, ...], *, captured: bool) -> _Masks:
        """The masks of a pattern; a capture gets new ones, because replays write to them."""
        if captured:
            return self._new_masks(pattern)
        if pattern not in self._cached_masks:
            if len(self._cached_masks) == _MOST_PATTERNS:
                self._cached_masks.clear()
            self._cached_masks[pattern] = self._new_masks(pattern)
        return self._cached_masks[pattern]

    def _new_masks(self, pattern: tuple[bytes, ...]) -> _Masks:
        """Builds the masks from ranges, without copies from the host, which a capture forbids."""
        device, tasks = self._counts.device, len(pattern)
        by_any = bytes(any(flags) for flags in zip(*pattern, strict=True))
        ranges = [torch.arange(first, last, device=device) for first, last in _runs(by_any)]
        # One extra row, for the padding of `_members`.
        shape = self._parameters + 1, tasks
        present = torch.zeros(shape, dtype=torch.bool, device=device)
        for task, row in enumerate(pattern):
            for first, last in _runs(row):
                present[first:last, task].fill_(True)
        by_member = present.index_select(0, self._members.flatten())
        by_module = by_member.view(*self._members.shape, tasks).any(1)
        present = torch.cat([present[:-1], by_module])
        pairs = present.unsqueeze(2) & present.unsqueeze(1)
        same = torch.ones((tasks, tasks), dtype=torch.bool, device=device).triu().tril()
        return _Masks(torch.cat(ranges), pairs, pairs & ~same)

    def conflicts(self) -> Conflicts:
        """Copies of the counts, without parameters that only one task reaches."""
        own = self._gradients.reach.owners()
        shared = [i for i in range(self._parameters) if i not in own]
        modules = sorted({self._parameters + self._module_of[i] for i in shared})
        return self._copied(shared, self._copied(modules, None))

    def _copied(self, rows: Sequence[int], by_module: Conflicts | None) -> Conflicts:
        names = [*self._gradients.names, *self._modules]
        selected = set(rows)
        runs = _runs(bytes(row in selected for row in range(len(names))))
        gramians, counts, steps = (
            torch.cat([tensor[:0], *(tensor[first:last] for first, last in runs)])
            for tensor in (self._gramians, self._counts, self._steps)
        )
        row_names = tuple(names[row] for row in rows)
        tasks = self._gradients.tasks
        return Conflicts(self.threshold, tasks, row_names, gramians, counts, steps, by_module)

    def captured_state(self) -> list[Tensor]:
        """The tensors that steps update, from now on in place."""
        self._is_captured = True
        return [self._gramians, self._counts, self._steps]

    def state_dict(self) -> dict[str, Any]:
        """The counts and the names of their rows, without the last step's Gramians."""
        return {
            "threshold": self.threshold,
            "parameters": list(self._gradients.names),
            "modules": list(self._modules),
            "counts": self._counts.clone(),
            "steps": self._steps.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a `state_dict`.

        Counts start at zero for parameters that the state lacks, and for all parameters if the
        state is None.

        Raises:
            ValueError: The state has another threshold, unknown parameters or wrong shapes.

        """
        counts, steps = torch.zeros_like(self._counts), torch.zeros_like(self._steps)
        if state is not None:
            if state["threshold"] != self.threshold:
                raise ValueError(
                    f"state must have conflicts counted with threshold {self.threshold}, got"
                    f" {state['threshold']!r}"
                )
            rows = self._rows_of(state["parameters"], state["modules"])
            shape = len(rows), *counts.shape[1:]
            for name, tensor in (("counts", counts), ("steps", steps)):
                saved = state[name]
                if saved.shape != shape:
                    raise ValueError(
                        f"state must have {name} of shape {shape}, got {tuple(saved.shape)}"
                    )
                tensor[rows] = saved.to(tensor)
        self._counts.copy_(counts)
        self._steps.copy_(steps)
        self._gramians.fill_(torch.nan)
        self._measurement = None

    def _rows_of(self, parameters: Sequence[str], modules: Sequence[str]) -> list[int]:
        parameter_rows = {name: row for row, name in enumerate(self._gradients.names)}
        module_rows = {name: self._parameters + row for row, name in enumerate(self._modules)}
        for kind, names, rows in (
            ("shared parameters", parameters, parameter_rows),
            ("modules", modules, module_rows),
        ):
            for name in names:
                if name not in rows:
                    raise ValueError(f"state must name {kind} of trunk, got {name!r}")
        return [parameter_rows[name] for name in parameters] + [module_rows[n] for n in modules]


def cosines_of(products: Tensor) -> Tensor:
    """Returns [..., K, K]: the cosines, 0 for zero gradients."""
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    # Rounding may take a cosine out of [-1, 1].
    return torch.where(scale == 0, 0.0, products / scale).clamp(-1.0, 1.0)


def _runs(flags: bytes) -> list[tuple[int, int]]:
    """The ranges of indices whose flags are set."""
    changes = enumerate(pairwise(b"\0" + flags + b"\0"))
    edges = [i for i, (before, after) in changes if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
