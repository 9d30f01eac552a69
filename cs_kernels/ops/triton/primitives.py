"""Device functions: conversions, addresses, program synchronization, sums in a fixed order."""

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language import constexpr

SEGMENT = constexpr(32)
"""Row elements that are processed together. Products are summed in `Traits.wide`; in float32, the
sum of 32 squares is finite for elements up to 1e18. Segments' sums are added up in float64."""

# The interpreter truncates to bfloat16 instead of rounding.
_INTERPRETED = constexpr(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Traits:
    """The compile-time constants of a kernel."""

    tasks: constexpr
    """A power of two, at least K; 64 stands for all K > 8."""
    elements: constexpr
    """Elements per tile."""
    dtype: constexpr
    """The type of weights, gradients and updates."""
    wide: constexpr
    """The type of sums and products within a tile: float64 for float64 gradients, else float32."""
    vector: constexpr
    """Elements per 16 bytes; 1 if addresses are not aligned."""
    block: constexpr
    """The number of tasks whose gradients are in registers at the same time."""
    rows: constexpr
    """The number of rows of the products [tasks, tasks] that are added up together."""


@triton.constexpr_function
def traits(TASKS, ELEMENTS, DTYPE, ALIGNED=True):
    """The traits of a kernel with these arguments; ALIGNED means aligned to 16 bytes."""
    bits = DTYPE.primitive_bitwidth
    wide = tl.float64 if bits > 32 else tl.float32
    vector = 128 // bits if ALIGNED else 1
    rows = TASKS if TASKS <= 8 else 1
    return Traits(*map(constexpr, (TASKS, ELEMENTS, DTYPE, wide, vector, min(TASKS, 8), rows)))


@triton.constexpr_function
def unaligned(T, PARTS=1):
    """The traits for unaligned addresses, with 1 / PARTS of the elements per tile."""
    return traits(T.tasks, T.elements // PARTS, T.dtype, False)


@triton.jit
def widened(x, WIDE: constexpr):
    """Converts any type to float32 or float64."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(WIDE)


@triton.jit
def narrowed(x, DTYPE: constexpr):
    """Converts to DTYPE, rounding to nearest with ties to even."""
    if DTYPE == tl.bfloat16:
        x = x.to(tl.float32)
        if _INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            bits = tl.where(x == x, rounded, 0x7FFF)
            x = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def selected(x, mask):
    """The entry along the first axis that the mask selects; zero if it selects none."""
    # A floating-point sum would have additions of zero that the compiler cannot remove.
    INTEGER: constexpr = tl.uint64 if x.dtype == tl.float64 else tl.uint32
    bits = tl.where(mask, x.to(INTEGER, bitcast=True), 0)
    return tl.max(bits, 0).to(x.dtype, bitcast=True)


@triton.jit
def splitmix64(x):
    """SplitMix64: one increment of the state, then the finalizer."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def lowbias32(x):
    """The mixer "lowbias32"."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_words(key, low, first):
    """Returns 32 bits per index; `low` has the low 32 bits of indices in [first, first + 2^32)."""
    key += (first >> 32).to(tl.uint64)
    of_range = tl.where(low >= first.to(tl.uint32), splitmix64(key), splitmix64(key + 1))
    bits = lowbias32(low ^ of_range.to(tl.uint32)) + (of_range >> 32).to(tl.uint32)
    return lowbias32(bits)


@triton.jit
def step_key(drawn):
    """The key of a step; `drawn` is int64 [2]: the random state, and a counter's address or 0."""
    address = tl.load(drawn + 1)
    counter = tl.load(address.to(tl.pointer_type(tl.int64)), address != 0, other=0)
    state = tl.load(drawn).to(tl.uint64, bitcast=True) + counter.to(tl.uint64, bitcast=True)
    return splitmix64(state)


@triton.jit
def pointers(address, T: constexpr):
    """Addresses as pointers, hinted to be aligned to 16 bytes if T.vector > 1."""
    result = address.to(tl.pointer_type(T.dtype))
    if T.vector > 1:
        result = tl.multiple_of(result, [16])
    return result


@triton.jit
def arrive(counter, expected):
    """Counts this program; returns whether it is the last, which sees all programs' writes."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    return before == expected - 1


@triton.jit
def publish(flag):
    """Sets a flag and makes this program's writes visible to programs that wait for the flag."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def wait(flag):
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def added_up(products, items, first_i, tasks, T: constexpr, SYMMETRIC: constexpr):
    """Rows [first_i, first_i + T.rows) of the sum of all items' products, [items, tasks, tasks].

    The sum has a fixed order. If SYMMETRIC, only entries with i <= j are read.
    """
    NUMBER: constexpr = 1024 // (T.rows * T.tasks)
    pair = tl.arange(0, T.rows * T.tasks)
    i = first_i + pair // T.tasks
    j = pair % T.tasks
    mask = (i < tasks) & (j < tasks)
    slot = i * tasks + j
    if SYMMETRIC:
        slot = tl.minimum(i, j) * tasks + tl.maximum(i, j)
    total = tl.zeros([NUMBER, T.rows * T.tasks], tl.float64)
    for first in range(0, items, NUMBER):
        n = (first + tl.arange(0, NUMBER)).to(tl.int64)[:, None]
        offset = n * (tasks * tasks) + slot[None, :]
        total += tl.load(products + offset, (n < items) & mask[None, :], other=0.0)
    return tl.reshape(tl.sum(total, 0), [T.rows, T.tasks])
