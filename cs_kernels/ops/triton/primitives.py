"""Parts of kernels: conversions, addresses, synchronization of programs, sums in a fixed order."""

import triton
import triton.language as tl

# The interpreter truncates to bfloat16 instead of rounding.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widened(x, WIDE: tl.constexpr):
    """Conversion of any type to float32 or float64; exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(WIDE)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Conversion to a type: round to nearest, ties to even."""
    if DTYPE == tl.bfloat16:
        x = x.to(tl.float32)
        if _INTERPRETED:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            bits = tl.where(x == x, rounded, 0x7FFF)
            x = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def pointer(address, DTYPE: tl.constexpr):
    """An address as a pointer."""
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def pointers(address, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """A tensor of addresses as pointers, aligned to 16 bytes where VECTOR > 1."""
    result = address.to(tl.pointer_type(DTYPE))
    if VECTOR > 1:
        result = tl.multiple_of(result, [16])
    return result


@triton.jit
def arrive(counter, expected):
    """Whether this program is the last to arrive; the others' writes are visible to it."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, 1, sem="acq_rel")
    tl.debug_barrier()
    return before == expected - 1


@triton.jit
def publish(flag):
    """Sets a flag; this program's writes are visible to programs that have waited for it."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release")


@triton.jit
def wait(flag):
    """Waits until a flag is published."""
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()


@triton.jit
def added_up(
    products,
    items,
    first_i,
    tasks,
    GROUPS: tl.constexpr,
    TASKS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Rows [first_i, first_i + GROUPS) of the sum of float64 [items, tasks, tasks] over items.

    The order is fixed. If SYMMETRIC, only entries with i <= j are read.
    """
    NUMBER: tl.constexpr = 1024 // (GROUPS * TASKS)
    pair = tl.arange(0, GROUPS * TASKS)
    i = first_i + pair // TASKS
    j = pair % TASKS
    mask = (i < tasks) & (j < tasks)
    slot = i * tasks + j
    if SYMMETRIC:
        slot = tl.minimum(i, j) * tasks + tl.maximum(i, j)
    total = tl.zeros([NUMBER, GROUPS * TASKS], tl.float64)
    for first in range(0, items, NUMBER):
        n = (first + tl.arange(0, NUMBER)).to(tl.int64)[:, None]
        offset = n * (tasks * tasks) + slot[None, :]
        total += tl.load(products + offset, (n < items) & mask[None, :], other=0.0)
    return tl.reshape(tl.sum(total, 0), [GROUPS, TASKS])
