"""The facts of one step, for methods and weightings."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cs_kernels.elapsed import Elapsed
from cs_kernels.trunk.layers import LayerLists


@dataclass
class Losses:
    """The losses of a group of passes, by task."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Surgery:
    """The tensors from which a method made its update, for `MultiTaskOptimizer.report`.

    They are on the gradients' device. The metadata "per" is for `merge`: whether a tensor has a row
    per layer or an element per channel.
    """

    rows: tuple[str, ...] = ()
    """The names of the rows: the tasks, then any anchors (`Step.rows`)."""
    layers: tuple[str, ...] = ()
    """The modules of the per-layer Gramians, with groups="layer"."""
    gramian: Tensor | None = field(default=None, metadata={"per": "layer"})
    """Float64 [K, K] or [layers, K, K], without the loss scale."""
    task_weights: Tensor | None = field(default=None, metadata={"per": "layer"})
    """[K] or [layers, K]."""
    prioritized: LayerLists | None = None
    """The prioritized layers, to which `priorities` and `products` belong."""
    priorities: Tensor | None = field(default=None, metadata={"per": "channel"})
    """Int64, each layer's [O] concatenated: the top-priority tasks."""
    products: Tensor | None = field(default=None, metadata={"per": "layer"})
    """Float64 [layers, K, K]: <G_i, g_j> over channel group CG_i, times the squared loss scale."""

    @property
    def energies(self) -> Tensor | None:
        """The squared norm of each row over all layers, 1-D; None without a Gramian."""
        if self.gramian is None:
            return None
        return self.gramian.diagonal(dim1=-2, dim2=-1).reshape(-1, len(self.rows)).sum(0)

    @classmethod
    def merge(cls, calls: Sequence["Surgery"], layers_of: Sequence[Set[int]]) -> "Surgery":
        """Merges the records of several calls of a method, each for its own layers, into one.

        Args:
            calls: The record of each call.
            layers_of: With per-layer Gramians, the indices into `layers` that each call handled;
                the call's tensors are zero elsewhere.

        """
        lists = [call.prioritized for call in calls if call.prioritized is not None]
        if lists:
            numbered = [enumerate(of.layers) for of in lists]
            layers = [(layer, c, n) for c, of in enumerate(numbered) for n, layer in of]
            layers.sort(key=lambda found: found[0].weight_index)
            merged = replace(calls[0], prioritized=LayerLists.of([layer for layer, *_ in layers]))
        else:
            merged = replace(calls[0])
        for name, per in ((f.name, f.metadata.get("per")) for f in fields(cls)):
            tensors = [getattr(call, name) for call in calls]
            if per is None or tensors[0] is None:
                continue
            if lists:
                sizes = [of.channels if per == "channel" else [1] * len(of.layers) for of in lists]
                pieces = list(map(torch.split, tensors, sizes))
                setattr(merged, name, torch.cat([pieces[c][n] for _, c, n in layers]))
            else:
                whole = torch.zeros_like(tensors[0])
                for tensor, numbers in zip(tensors, layers_of, strict=True):
                    for some in _ranges(numbers):
                        whole[some] = tensor[some]
                setattr(merged, name, whole)
        return merged


def _ranges(numbers: Set[int]) -> Iterator[slice]:
    """Converts indices to slices, because indexing with a list would synchronize with a GPU."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    stops = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return map(slice, starts, stops)


@dataclass(frozen=True)
class KeptWeights:
    """The task weights of a step, cached for later steps."""

    number: int
    """The number of the step that solved for the weights."""
    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    """The modules of per-layer Gramians."""
    at_features: bool
    weights: Tensor
    """[K] or [layers, K]."""
    trains: tuple[bool | None, ...]
    """`Step.trains`, but None for a parameter that a closure froze or unfroze within the step."""

    def surgery(self) -> Surgery:
        """The record of a step that reuses these weights."""
        return Surgery(self.tasks, self.layers, task_weights=self.weights)


@dataclass(frozen=True)
class Keeping:
    """The gradients that a method keeps between steps, and the device that holds them."""

    tasks: tuple[str, ...]
    refresh_every: int
    """The number of steps after which a task's gradient is computed again."""
    rank: int = 1
    """The number of gradients per task, each from a different step."""
    device: str | None = None
    """"cpu" for host memory; None for the gradients' device."""


class Anchor(NamedTuple):
    """A kept gradient that constrains an update but is not added to it."""

    task: str
    number: int
    """The number of the step that computed it."""


@dataclass
class Step:
    """One training step, as methods and weightings see it."""

    number: int = 0
    """The number of earlier steps, in both phases."""
    tasks: tuple[str, ...] = ()
    """The tasks that take part, in the order of the rows of a Gramian."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The loss of each task, a detached scalar; the sum over micro-batches."""
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)
    """The losses after weighting. Backward passes start from them, times the loss scale."""
    known: dict[str, Tensor] = field(default_factory=dict)
    """The losses of this step that are known before a task's backward pass, detached: in `step`,
    only this task's loss; otherwise, all tasks'. Empty with more than one rank or micro-batch."""
    losses_after: dict[str, Tensor] = field(default_factory=dict)
    """The losses on the same batch after the step, for a weighting that `reevaluates`."""
    layers: tuple[str, ...] = ()
    """The modules of the per-layer Gramians, with groups="layer"."""
    at_features: bool = False
    """Whether gradients are with respect to features instead of shared parameters."""
    kept: KeptWeights | None = None
    """The task weights of an earlier step, if this step reuses them (`update_every` above 1)."""
    trains: tuple[bool, ...] = ()
    """Whether each parameter of the torch optimizers, then each shared one, needs a gradient; empty
    if `update_every` is 1."""
    loss_scale: Tensor | None = None
    """The factor of the weighted losses in their backward passes, such as a scaler's, or None."""
    counter: Tensor | None = None
    """Int64 [1] on the device; replaces `number` in a CUDA graph."""
    surgery: Surgery = field(default_factory=Surgery)
    """The tensors for a report; the method stores them here."""
    elapsed: Elapsed | None = None
    """The time of the surgery; None in a CUDA graph."""
    recent: Losses = field(default_factory=Losses)
    """The losses of the passes since the last `begin_passes`."""
    anchors: tuple[Anchor, ...] = ()
    """The kept gradients that constrain the update: the rows of a Gramian after the tasks' rows."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of a Gramian's rows: the tasks, then the anchors.

        The newest anchor of a task that takes no part has the task's name; older ones add the
        number of their step, as in "task@12".
        """
        rows = [*self.tasks]
        for task, number in self.anchors:
            rows.append(f"{task}@{number}" if task in rows else task)
        return tuple(rows)

    @property
    def draw(self) -> tuple[int, Tensor | None]:
        """The step for operators that draw random numbers: a number, and a counter to add to it."""
        return (self.number, None) if self.counter is None else (0, self.counter)

    def begin_passes(self) -> Losses:
        """Begins a group of passes; returns the losses of earlier passes."""
        self.recent = Losses()
        return Losses(dict(self.losses), dict(self.weighted_losses))

    def add_loss(self, task: str, loss: Tensor, weighted: Tensor) -> None:
        """Adds a task's loss in one micro-batch."""
        loss, weighted = loss.detach(), weighted.detach()
        for losses, value in (
            (self.losses, loss),
            (self.weighted_losses, weighted),
            (self.recent.losses, loss),
            (self.recent.weighted_losses, weighted),
        ):
            losses[task] = losses[task] + value if task in losses else value


class CapturedFacts(Step):
    """The facts of a captured step, whose number changes from replay to replay."""

    def __getattribute__(self, name: str) -> Any:
        """Reads an attribute other than `number`.

        Raises:
            RuntimeError: The attribute is `number`.

        """
        if name == "number":
            raise RuntimeError(
                "step.number changes from replay to replay of a captured step: use step.counter, or"
                " step.draw for an operator that draws random numbers"
            )
        return super().__getattribute__(name)
