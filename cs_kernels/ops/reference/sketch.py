"""Linear sketches in plain torch."""

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors
from cs_kernels.ops.checks import check_sketch, check_weighting, fits_sketch
from cs_kernels.ops.random import random_key, splitmix64, words


def _add(
    sketch: Tensor,
    tensor: Tensor,
    offset: int,
    key: int,
    update: Tensor | None = None,
    weight: Tensor | float = 1.0,
    add: bool = False,
) -> None:
    """Adds one element of each block to every bin; then weights the tensor, in float64."""
    elements, end, size = tensor.flatten(), offset + tensor.numel(), len(sketch)
    bins = torch.arange(size, device=sketch.device)
    for block in range(offset // size, -(-end // size) if tensor.numel() else 0):
        rotation = splitmix64(~key + block)
        index = block * size + (bins - rotation % size) % size
        present = (index >= offset) & (index < end)
        index = index[present]
        signs = words(key, index >> 5) >> (index & 31) & 1
        some = elements[index - offset].to(sketch.dtype)
        sketch[present] += torch.where(signs == 1, -some, some)
    if update is not None:
        product = tensor.double() * weight
        update.copy_(update + product if add else product)


def run_sketch(
    sketch: Tensor,
    tensor: Tensor,
    offset: int,
    key: int,
    update: Tensor | None = None,
    weight: Tensor | float = 1.0,
    add: bool = False,
) -> bool:
    fits = fits_sketch(sketch, tensor, update)
    if fits:
        _add(sketch, tensor.detach(), offset, key, update, weight, add)
    return fits


def sketch_(sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
    check_sketch(sketch, tensors, offsets, wide=True)
    for tensor, offset in zip(tensors, offsets, strict=True):
        _add(sketch, tensor, offset, random_key(seed, 0))


def sketch_and_weight_(
    sketch: Tensor,
    updates: Tensors,
    tensors: Tensors,
    offsets: Ints,
    seed: int,
    weight: Tensor,
    add: bool,
) -> None:
    check_sketch(sketch, tensors, offsets, wide=True)
    check_weighting(updates, tensors, weight)
    for update, tensor, offset in zip(updates, tensors, offsets, strict=True):
        _add(sketch, tensor, offset, random_key(seed, 0), update, weight, add)
