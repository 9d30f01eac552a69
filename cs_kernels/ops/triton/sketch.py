"""Linear sketches: one launch per tensor.

Memory traffic: reads N elements once; reads and writes d bins of the sketch; if UPDATES, writes N
update elements, and reads them first if ADDS.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from cs_kernels.ops.triton.primitives import narrowed, random_words, splitmix64, widened

BINS = constexpr(256)
"""Bins per program."""
_BLOCKS = constexpr(4)
"""Elements per bin that a thread has in flight."""


@triton.jit
def sketch_kernel(
    sketch,
    data,
    words,
    update,
    weight,
    SIZE: constexpr,
    DTYPE: constexpr,
    UPDATES: constexpr,
    ADDS: constexpr,
):
    """Adds a tensor's elements, with pseudorandom signs, to the sketch; weights them if UPDATES.

    Args:
        sketch: float32 [SIZE].
        data: The elements.
        words: int64 [3]: the key, the index of the first element, the number of elements.
        update: The output for the elements times the weight; may be `data`.
        weight: float64 [1].
        SIZE: The number of bins, a power of two.
        DTYPE: The type of the elements.
        UPDATES: Whether there are an update and a weight.
        ADDS: Whether to add to the update rather than overwrite it.

    """
    WIDE: constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if UPDATES:
        scale = tl.load(weight).to(WIDE)
    key = tl.load(words).to(tl.uint64, bitcast=True)
    offset = tl.load(words + 1)
    size = tl.load(words + 2)
    number = tl.program_id(0).to(tl.uint32) * BINS + tl.arange(0, BINS).to(tl.uint32)
    total = tl.load(sketch + number)
    first = offset // SIZE
    for start in range(0, (offset + size - 1) // SIZE + 1 - first, _BLOCKS):
        for n in tl.static_range(_BLOCKS):
            block = first + start + n
            rotation = splitmix64(~key + block.to(tl.uint64)).to(tl.uint32)
            index = block * SIZE + ((number - rotation) & (SIZE - 1)).to(tl.int64)
            exists = (index >= offset) & (index < offset + size)
            wide = widened(tl.load(data + (index - offset), exists, other=0.0), WIDE)
            if UPDATES:
                result = scale * wide
                if ADDS:
                    before = tl.load(update + (index - offset), exists, other=0.0)
                    result += widened(before, WIDE)
                tl.store(update + (index - offset), narrowed(result, DTYPE), exists)
            x = wide.to(tl.float32)
            word = random_words(key, (index >> 5).to(tl.uint32), offset >> 5)
            minus = (word >> (index & 31).to(tl.uint32)) & 1
            total += tl.where(minus == 1, -x, x)
    tl.store(sketch + number, total)
