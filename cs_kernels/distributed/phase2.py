"""Phase 2 of gradients of which a rank holds a part: stages, and sums over the ranks in between."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cs_kernels.distributed.partial import PartialGradients
from cs_kernels.distributed.pieces import Piece, pieces_of
from cs_kernels.distributed.sharded import is_sharded, shards_of
from cs_kernels.layout import LayerLists, epsilons, gammas, running_vars
from cs_kernels.step import Step


class _LayerPieces(NamedTuple):
    start: int
    """The index of the layer's first channel among those of all layers."""
    first: int
    """The index in the weight of this rank's first element."""
    pieces: list[Piece]


class Plan:
    """The pieces of layers on this rank; it depends on no values, so a step makes none anew."""

    def __init__(self, gradients: PartialGradients, lists: LayerLists) -> None:
        self.lists = lists
        self.version = gradients.version
        self.channels = lists.channels
        spans = [gradients.span(i) for i in lists.weight_indices]
        kinds = zip(lists.weight_indices, lists.out_channel_dims, lists.groups, strict=True)
        arrays = [gradients.array(*kind) for kind in kinds]
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
        device = gradients.like().device
        self.layer_of = torch.tensor(
            [n for n, count in enumerate(counts) for _ in range(count)],
            dtype=torch.int64,
            device=device,
        )
        """The layer of each piece."""
        self.pieces_of = torch.tensor(
            [
                [*range(end - count, end), *[-1] * (width - count)]
                for end, count in zip(ends, counts, strict=True)
            ],
            dtype=torch.int64,
            device=device,
        ).view(-1, width)
        """The pieces of each layer; -1 for none."""


def _planned(gradients: PartialGradients, lists: LayerLists) -> Plan:
    plan = gradients.phase2_plan
    same = isinstance(plan, Plan) and plan.lists is lists and plan.version == gradients.version
    if not same:
        plan = gradients.phase2_plan = Plan(gradients, lists)
    assert isinstance(plan, Plan)
    return plan


def task_priorities(
    gradients: PartialGradients, lists: LayerLists, *, averaged: bool = False
) -> Tensor:
    """The priorities, int64 [O] of one layer after the other, on every rank.

    Args:
        gradients: This rank's part.
        lists: The layers.
        averaged: Whether the running variances are the same on all ranks already.

    """
    if not lists.layers:
        return gradients.like().new_empty(0, dtype=torch.int64)
    gamma = gammas(lists.layers)
    if any(map(is_sharded, (*lists.weights, *gamma))):
        energies, scales = _gathered(gradients, _planned(gradients, lists), gamma)
    else:
        weights = [weight.detach() for weight in lists.weights]
        energies = torch.ops.cs_kernels.channel_energies(
            weights, lists.out_channel_dims, lists.groups
        )
        scales = torch.cat([scale.detach() for scale in gamma])
    variances = torch.cat(running_vars(lists.layers))
    if not averaged:
        variances = gradients.mean_over_ranks(variances)
    priorities: Tensor = torch.ops.cs_kernels.energy_priority(
        energies, scales, variances, epsilons(lists.layers), lists.channels
    )
    return priorities


def _gathered(
    gradients: PartialGradients, plan: Plan, gamma: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Energies and gamma of all ranks' shards: one sum, in which each has zeros for the others."""
    of_layers = [scale.shape[0] for scale in gamma]
    total = sum(plan.channels)
    numbers = gradients.like().new_zeros(total + sum(of_layers), dtype=torch.float64)
    for layer, i in zip(plan.layers, plan.lists.weight_indices, strict=True):
        part = gradients.weight_part(i)
        assert part is not None
        for piece in layer.pieces:
            energies = torch.ops.cs_kernels.channel_energies(
                [piece.of(part, layer.first)], [piece.out_channel_dim], [piece.groups]
            )
            first = layer.start + piece.first_channel
            numbers[first : first + piece.channels] += energies
    starts = accumulate(of_layers, initial=total)
    for start, (first, shard), scale in zip(starts, shards_of(gamma), gamma, strict=False):
        if is_sharded(scale) or gradients.holds_first():
            numbers[start + first : start + first + len(shard)] = shard
    summed = gradients.sum_over_ranks(numbers)
    return summed[:total], summed[total:]


def phase2_of_parts(
    gradients: PartialGradients, lists: LayerLists, parameters: Sequence[int], step: Step
) -> tuple[Tensor, Tensor]:
    """Writes this rank's parts of the updates of some parameters, those of the layers first.

    Returns:
        The priorities, int64 [O] of one layer after the other, and the products of all ranks,
        float64 [layers, K, K].

    """
    tasks = len(gradients.rows)
    priorities = task_priorities(gradients, lists, averaged=len(step.tasks) == tasks)
    grads, updates = gradients.of(parameters), gradients.updates(parameters)
    plan = _planned(gradients, lists)
    part_grads: list[Tensor | None] = []
    part_updates: list[Tensor] = []
    of_pieces: list[Tensor] = []
    for n, layer in enumerate(plan.layers):
        if not layer.pieces:
            continue
        update = updates[n].view(-1)
        rows = [None if g is None else g.view(-1) for g in grads[n * tasks : (n + 1) * tasks]]
        for piece in layer.pieces:
            first = layer.start + piece.first_channel
            of_pieces.append(priorities[first : first + piece.channels])
            part_updates.append(piece.of(update, layer.first))
            part_grads += [None if row is None else piece.of(row, layer.first) for row in rows]
    for n in range(len(lists.layers), len(parameters)):
        if updates[n].numel():
            part_updates.append(updates[n])
            part_grads += grads[n * tasks : (n + 1) * tasks]
    operands = part_updates, part_grads, of_pieces
    layouts = plan.dims, plan.groups, tasks
    products = gradients.like().new_zeros((1, tasks, tasks), dtype=torch.float64)
    if part_updates:
        of_parts = torch.ops.cs_kernels.phase2_products_(*operands, *layouts)
        products = torch.cat([of_parts, products])
    # Not `index_add_`, whose order on a GPU, and so its bits, differ from run to run.
    products = gradients.sum_over_ranks(products[plan.pieces_of].sum(1))
    if of_pieces:
        torch.ops.cs_kernels.phase2_apply_(*operands, products[plan.layer_of], *layouts)
    return priorities, products
