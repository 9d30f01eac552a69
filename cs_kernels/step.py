"""The facts of one step, for methods and weightings."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from cs_kernels.elapsed import Elapsed
from cs_kernels.trunk.layers import LayerLists


@dataclass
class Losses:
    """The losses of some passes, by task."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Surgery:
    """The numbers from which a method made its update; tensors on the gradients' device.

    They are kept for `MultiTaskOptimizer.report`, which says what they mean. A tensor has a row
    "per" layer, or the elements of a layer "per" channel: `merge` needs to know.
    """

    rows: tuple[str, ...] = ()
    """The tasks, in the order of the rows."""
    layers: tuple[str, ...] = ()
    """The modules of per-layer Gramians, with groups="layer"."""
    gramian: Tensor | None = field(default=None, metadata={"per": "layer"})
    """Float64 [K, K] or [layers, K, K], without the loss scale."""
    task_weights: Tensor | None = field(default=None, metadata={"per": "layer"})
    """[K] or [layers, K]."""
    prioritized: LayerLists | None = None
    """The layers of the priorities and the products."""
    priorities: Tensor | None = field(default=None, metadata={"per": "channel"})
    """int64, each layer's [O] concatenated."""
    products: Tensor | None = field(default=None, metadata={"per": "layer"})
    """Float64 [layers, K, K], d_ij of the channel groups, with the square of the loss scale."""

    @classmethod
    def merge(cls, calls: Sequence["Surgery"], layers_of: Sequence[Set[int]]) -> "Surgery":
        """Merges the records of several calls, each for some of the layers, into one.

        Args:
            calls: What the method recorded in each call.
            layers_of: With per-layer Gramians, the indices into `layers` that each call handled;
                its tensors are zero elsewhere.

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
    """Numbers as slices, because indexing with them would make the host wait for a GPU."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    stops = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return map(slice, starts, stops)


@dataclass(frozen=True)
class KeptWeights:
    """The task weights of a step, cached for later steps."""

    number: int
    """The number of steps made before it."""
    tasks: tuple[str, ...]
    layers: tuple[str, ...]
    """The modules of per-layer Gramians."""
    at_features: bool
    weights: Tensor
    """[K] or [layers, K]."""
    trains: tuple[bool | None, ...]
    """As `Step.trains`; None where that has changed within a step, as closures may switch it."""

    def surgery(self) -> Surgery:
        """The numbers for the report of a step that uses these weights."""
        return Surgery(self.tasks, self.layers, task_weights=self.weights)


@dataclass
class Step:
    """One training step, as methods and weightings see it."""

    number: int = 0
    """The number of steps made before, in both phases."""
    tasks: tuple[str, ...] = ()
    """The tasks that take part, in the order of the rows of a Gramian."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """The loss of each task, detached, a scalar; micro-batches added up."""
    weighted_losses: dict[str, Tensor] = field(default_factory=dict)
    """The same after weighting; the gradients are theirs, times the loss scale."""
    known: dict[str, Tensor] = field(default_factory=dict)
    """The losses of this step that are known before a task's backward pass, detached: in `backward`
    those of all tasks, in `step` the task's own. None on many ranks and with micro-batches."""
    losses_after: dict[str, Tensor] = field(default_factory=dict)
    """The losses on the same batch after the step, for a weighting that `reevaluates`."""
    layers: tuple[str, ...] = ()
    """The modules of the per-layer Gramians, with groups="layer"."""
    at_features: bool = False
    """Whether the gradients are those of features, not of the shared parameters."""
    kept: KeptWeights | None = None
    """The task weights of an earlier step that this one uses, with `update_every` above 1."""
    trains: tuple[bool, ...] = ()
    """Which parameters of the torch optimizers and of the trunk train; empty with `update_every`
    of 1."""
    loss_scale: Tensor | None = None
    """The factor of the weighted losses in their backward passes, if there is one."""
    counter: Tensor | None = None
    """In a CUDA graph in place of the number: int64 [1] in device memory."""
    surgery: Surgery = field(default_factory=Surgery)
    """What the method did, for a report; methods fill it in."""
    elapsed: Elapsed | None = None
    """The time of the surgery; None in a CUDA graph."""
    recent: Losses = field(default_factory=Losses)
    """The losses since the last `begin_passes`."""

    @property
    def draw(self) -> tuple[int, Tensor | None]:
        """The step for operators that draw: a number, and a counter that adds to it."""
        return (self.number, None) if self.counter is None else (0, self.counter)

    def begin_passes(self) -> Losses:
        """Returns the losses of earlier passes."""
        self.recent = Losses()
        return Losses(dict(self.losses), dict(self.weighted_losses))

    def add_loss(self, task: str, loss: Tensor, weighted: Tensor) -> None:
        """Adds the loss of one micro-batch."""
        for losses, value in (
            (self.losses, loss),
            (self.weighted_losses, weighted),
            (self.recent.losses, loss),
            (self.recent.weighted_losses, weighted),
        ):
            value = value.detach()
            losses[task] = losses[task] + value if task in losses else value


class CapturedFacts(Step):
    """The facts of a step in a CUDA graph: one number does not fit all replays."""

    def __getattribute__(self, name: str) -> Any:
        """Reads any other attribute.

        Raises:
            RuntimeError: The attribute is `number`.

        """
        if name == "number":
            raise RuntimeError(
                "step.number changes from replay to replay of a captured step: use step.counter, or"
                " step.draw for an operator that draws"
            )
        return super().__getattribute__(name)
