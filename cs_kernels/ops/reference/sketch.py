"""Linear sketches in plain torch."""

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors
from cs_kernels.ops.checks import LEAST_SKETCH, check_sketch
from cs_kernels.ops.random import lowbias32, random_key, splitmix64, words

_RUN = LEAST_SKETCH


def sketch_(sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
    """Adds, block by block, the element that goes to each bin."""
    check_sketch(sketch, tensors, offsets, wide=True)
    key, size = random_key(seed, 0), len(sketch)
    for tensor, offset in zip(tensors, offsets, strict=True):
        elements, end = tensor.flatten(), offset + tensor.numel()
        for block in range(offset // size, -(-end // size) if tensor.numel() else 0):
            index = block * size + _elements(key, block, size, sketch.device)
            present = (index >= offset) & (index < end)
            index = index[present]
            signs = words(key, index >> 5) >> (index & 31) & 1
            some = elements[index - offset].to(sketch.dtype)
            sketch[present] += torch.where(signs == 1, -some, some)


def _elements(key: int, block: int, size: int, device: torch.device) -> Tensor:
    """The number in a block of the element that goes to each bin."""
    bits = splitmix64((~key & (1 << 64) - 1) + block & (1 << 64) - 1)
    first = bits >> 32 | 1
    second = int(lowbias32(torch.tensor(first))) | 1
    rotated = torch.arange(size, device=device) - bits & size - 1
    runs = size // _RUN
    shift = runs.bit_length() // 2
    run = (rotated // _RUN * first) & runs - 1
    run = run ^ (run >> shift)
    return (run * second & runs - 1) * _RUN + rotated % _RUN
