"""Linear sketches in plain torch."""

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors
from cs_kernels.ops.checks import check_sketch, check_weighting
from cs_kernels.ops.random import random_key, splitmix64, words


def sketch_(sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
    """Adds one element of each block to every bin, block by block."""
    check_sketch(sketch, tensors, offsets, wide=True)
    key, size = random_key(seed, 0), len(sketch)
    bins = torch.arange(size, device=sketch.device)
    for tensor, offset in zip(tensors, offsets, strict=True):
        elements, end = tensor.flatten(), offset + tensor.numel()
        for block in range(offset // size, -(-end // size) if tensor.numel() else 0):
            rotation = splitmix64(~key + block)
            index = block * size + (bins - rotation % size) % size
            present = (index >= offset) & (index < end)
            index = index[present]
            signs = words(key, index >> 5) >> (index & 31) & 1
            some = elements[index - offset].to(sketch.dtype)
            sketch[present] += torch.where(signs == 1, -some, some)


def sketch_and_weight_(
    sketch: Tensor,
    updates: Tensors,
    tensors: Tensors,
    offsets: Ints,
    seed: int,
    weight: Tensor,
    add: bool,
) -> None:
    """Adds the tensors to the sketch, then to the updates, in float64."""
    check_weighting(updates, tensors, weight)
    sketch_(sketch, tensors, offsets, seed)
    for update, tensor in zip(updates, tensors, strict=True):
        product = tensor.double() * weight
        update.copy_(update + product if add else product)
