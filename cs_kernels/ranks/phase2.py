"""Phase 2 of sharded gradients: a few operators, with sums over the ranks between them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.ranks.pieces import Piece, pieces_of
from cs_kernels.torch_internals.fsdp import is_sharded, shards_of
from cs_kernels.trunk.layers import LayerLists

if TYPE_CHECKING:  # Avoids a circular import.
    from cs_kernels.ranks.distributed import Distributed


class _LayerPieces(NamedTuple):
    start: int
    """The index of the layer's first channel among the channels of all layers."""
    first: int
    """The index in the weight of this rank's first element."""
    pieces: list[Piece]


class Plan:
    """The local pieces of the layers, reused in every step: they do not depend on values."""

    def __init__(self, ranks: "Distributed", lists: LayerLists) -> None:
        self.lists = lists
        self.version = ranks.version
        self.channels = lists.channels
        spans = [ranks.span(i) for i in lists.weight_indices]
        kinds = zip(lists.weight_indices, lists.out_channel_dims, lists.groups, strict=True)
        arrays = [ranks.array(*kind) for kind in kinds]
        starts = accumulate(self.channels, initial=0)
        self.layers = [
            _LayerPieces(start, span[0], pieces_of(*span, array))
            for start, span, array in zip(starts, spans, arrays, strict=False)
        ]
        pieces = [piece for layer in self.layers for piece in layer.pieces]
        self.dims = [piece.out_channel_dim for piece in pieces]
        self.groups = [piece.groups for piece in pieces]
        counts = [len(layer.pieces) for layer in self.layers]
        width = max([1, *counts])
        ends = list(accumulate(counts))
        device = ranks.like().device
        self.layer_of = torch.tensor(
            [n for n, count in enumerate(counts) for _ in range(count)],
            dtype=torch.int64,
            device=device,
        )
        """The index of each piece's layer."""
        self.pieces_of = torch.tensor(
            [
                [*range(end - count, end), *[-1] * (width - count)]
                for end, count in zip(ends, counts, strict=True)
            ],
            dtype=torch.int64,
            device=device,
        ).view(-1, width)
        """The indices of each layer's pieces, padded with -1."""


def task_priorities(ranks: "Distributed", lists: LayerLists, *, averaged: bool) -> Tensor:
    """Int64, each layer's [O] concatenated: the priorities of all layers, on every rank.

    Args:
        ranks: The strategy of the ranks, on which weights are whole or sharded.
        lists: The layers.
        averaged: Whether the running variances are already equal on all ranks.

    """
    if not lists.layers:
        return ranks.like().new_empty(0, dtype=torch.int64)
    gamma = lists.gammas()
    if any(map(is_sharded, (*lists.weights, *gamma))):
        energies, scales = _gathered(ranks, ranks.phase2_plan(lists), gamma)
    else:
        weights = [weight.detach() for weight in lists.weights]
        energies = torch.ops.cs_kernels.channel_energies(
            weights, lists.out_channel_dims, lists.groups
        )
        scales = torch.cat([scale.detach() for scale in gamma])
    variances = torch.cat(lists.running_vars())
    if not averaged:
        variances = ranks.mean_over_ranks(variances)
    priorities: Tensor = torch.ops.cs_kernels.energy_priority(
        energies, scales, variances, lists.epsilons(), lists.channels
    )
    return priorities


def _gathered(ranks: "Distributed", plan: Plan, gamma: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gathers all shards' energies and gamma in one sum; each rank adds zeros for other shards."""
    of_layers = [scale.shape[0] for scale in gamma]
    total = sum(plan.channels)
    numbers = ranks.like().new_zeros(total + sum(of_layers), dtype=torch.float64)
    for layer, i in zip(plan.layers, plan.lists.weight_indices, strict=True):
        shard = ranks.weight_shard(i)
        assert shard is not None
        for piece in layer.pieces:
            energies = torch.ops.cs_kernels.channel_energies(
                [piece.of(shard, layer.first)], [piece.out_channel_dim], [piece.groups]
            )
            first = layer.start + piece.first_channel
            numbers[first : first + piece.channels] += energies
    starts = accumulate(of_layers, initial=total)
    for start, (first, values), scale in zip(starts, shards_of(gamma), gamma, strict=False):
        if is_sharded(scale) or ranks.holds_first():
            numbers[start + first : start + first + len(values)] = values
    summed = ranks.sum_over_shards(numbers)
    return summed[:total], summed[total:]


def phase2_of_shards(
    ranks: "Distributed",
    gradients: TaskGradients,
    lists: LayerLists,
    parameters: Sequence[int],
    tasks: Sequence[str],
) -> tuple[Tensor, Tensor]:
    """Writes this rank's shards of the updates; see `TaskGradients.phase2`."""
    number, plan = len(gradients.rows), ranks.phase2_plan(lists)
    priorities = task_priorities(ranks, lists, averaged=len(tasks) == number)
    grads, updates = gradients.of(parameters), gradients.updates(parameters)
    piece_grads: list[Tensor | None] = []
    piece_updates: list[Tensor] = []
    of_pieces: list[Tensor] = []
    for n, layer in enumerate(plan.layers):
        if not layer.pieces:
            continue
        update = updates[n].view(-1)
        rows = [None if g is None else g.view(-1) for g in grads[n * number : (n + 1) * number]]
        for piece in layer.pieces:
            first = layer.start + piece.first_channel
            of_pieces.append(priorities[first : first + piece.channels])
            piece_updates.append(piece.of(update, layer.first))
            piece_grads += [None if row is None else piece.of(row, layer.first) for row in rows]
    for n in range(len(lists.layers), len(parameters)):
        if updates[n].numel():
            piece_updates.append(updates[n])
            piece_grads += grads[n * number : (n + 1) * number]
    operands = piece_updates, piece_grads, of_pieces
    layouts = plan.dims, plan.groups, number
    products = ranks.like().new_zeros((1, number, number), dtype=torch.float64)
    if piece_updates:
        of_pieces_ = torch.ops.cs_kernels.phase2_products_(*operands, *layouts)
        products = torch.cat([of_pieces_, products])
    # Sums each layer's pieces. `index_add_` would add them in no fixed order on a GPU, so that the
    # sums' bits would differ from run to run.
    products = ranks.sum_over_shards(products[plan.pieces_of].sum(1))
    if of_pieces:
        torch.ops.cs_kernels.phase2_apply_(*operands, products[plan.layer_of], *layouts)
    return priorities, products
