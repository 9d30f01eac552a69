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
from cs_kernels.ops import out_channels


class _LayerPieces(NamedTuple):
    start: int
    """The index of the layer's first channel among those of all layers."""
    first: int
    """The index in the weight of this rank's first element."""
    pieces: list[Piece]


def _layer_pieces(gradients: PartialGradients, lists: LayerLists) -> list[_LayerPieces]:
    starts = accumulate(_channels(lists), initial=0)
    layers = zip(starts, lists.weight_indices, lists.out_channel_dims, lists.groups, strict=False)
    return [
        _LayerPieces(
            start, gradients.span(i)[0], pieces_of(*gradients.span(i), gradients.array(i, dim, n))
        )
        for start, i, dim, n in layers
    ]


def _channels(lists: LayerLists) -> list[int]:
    return list(map(out_channels, lists.weights, lists.out_channel_dims, lists.groups))


def task_priorities(gradients: PartialGradients, lists: LayerLists) -> Tensor:
    """The priorities, int64 [O] of one layer after the other, on every rank."""
    channels = _channels(lists)
    if not channels:
        return gradients.like().new_empty(0, dtype=torch.int64)
    gamma = gammas(lists.layers)
    if any(map(is_sharded, (*lists.weights, *gamma))):
        energies, scales = _gathered(gradients, lists, channels, gamma)
    else:
        weights = [weight.detach() for weight in lists.weights]
        energies = torch.ops.cs_kernels.channel_energies(
            weights, lists.out_channel_dims, lists.groups
        )
        scales = torch.cat([scale.detach() for scale in gamma])
    variances = torch.cat(running_vars(lists.layers))
    priorities: Tensor = torch.ops.cs_kernels.energy_priority(
        energies, scales, variances, epsilons(lists.layers), channels
    )
    return priorities


def _gathered(
    gradients: PartialGradients, lists: LayerLists, channels: Sequence[int], gamma: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Energies and gamma of all ranks' shards: one sum, in which each has zeros for the others."""
    of_layers = [scale.shape[0] for scale in gamma]
    total = sum(channels)
    numbers = gradients.like().new_zeros(total + sum(of_layers), dtype=torch.float64)
    for layer, i in zip(_layer_pieces(gradients, lists), lists.weight_indices, strict=True):
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
    gradients: PartialGradients, lists: LayerLists, parameters: Sequence[int]
) -> None:
    """Writes this rank's parts of the updates of some parameters, those of the layers first."""
    tasks = len(gradients.rows)
    priorities = task_priorities(gradients, lists)
    grads, updates = gradients.of(parameters), gradients.updates(parameters)
    part_grads: list[Tensor | None] = []
    part_updates: list[Tensor] = []
    of_pieces: list[Tensor] = []
    layer_of, dims, groups = [], [], []
    of_layers: list[list[int]] = []
    for n, layer in enumerate(_layer_pieces(gradients, lists)):
        update = updates[n].view(-1)
        rows = [None if g is None else g.view(-1) for g in grads[n * tasks : (n + 1) * tasks]]
        of_layers.append([*range(len(of_pieces), len(of_pieces) + len(layer.pieces))])
        for piece in layer.pieces:
            first = layer.start + piece.first_channel
            of_pieces.append(priorities[first : first + piece.channels])
            part_updates.append(piece.of(update, layer.first))
            part_grads += [None if row is None else piece.of(row, layer.first) for row in rows]
            layer_of.append(n)
            dims.append(piece.out_channel_dim)
            groups.append(piece.groups)
    for n in range(len(lists.layers), len(parameters)):
        if updates[n].numel():
            part_updates.append(updates[n])
            part_grads += grads[n * tasks : (n + 1) * tasks]
    operands = part_updates, part_grads, of_pieces
    products = gradients.like().new_zeros((1, tasks, tasks), dtype=torch.float64)
    if part_updates:
        of_parts = torch.ops.cs_kernels.phase2_products_(*operands, dims, groups, tasks)
        products = torch.cat([of_parts, products])
    # Not `index_add_`, whose order on a GPU, and so its bits, differ from run to run.
    width = max(1, *map(len, of_layers)) if of_layers else 1
    padded = [[*pieces, *[-1] * (width - len(pieces))] for pieces in of_layers]
    index = torch.tensor(padded, dtype=torch.int64, device=products.device).view(-1, width)
    products = gradients.sum_over_ranks(products[index].sum(1))
    if of_pieces:
        index = torch.tensor(layer_of, device=products.device)
        torch.ops.cs_kernels.phase2_apply_(*operands, products[index], dims, groups, tasks)
