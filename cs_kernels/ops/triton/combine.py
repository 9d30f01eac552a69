"""Gramian, weighted sum and sign dropping: one launch per operator and dtype for all tensors.

Memory traffic: reads K * N gradient elements once (for K > 8, the Gramian rereads each tile in
cache); writes N update elements, if there are updates.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from cs_kernels.ops.gpu.combine import GradientCallField, GradientField
from cs_kernels.ops.triton.primitives import (
    SEGMENT,
    added_up,
    arrive,
    narrowed,
    pointers,
    random_words,
    selected,
    step_key,
    traits,
    unaligned,
    widened,
)

SIZE, GROUP, FIRST_ITEM, GROUP_ITEMS, TILES, FIRST_INDEX = map(constexpr, GradientField)
TENSOR_FIELDS = constexpr(len(GradientField))

UPDATE, ALIGNED, GRADIENTS = map(constexpr, GradientCallField)


@triton.jit
def _item(items, tensors, table, tasks, STEP: constexpr):
    """The program's tensor, its addresses, its size, and STEP times the item's index."""
    item = items + tl.program_id(0).to(tl.int64) * 2
    number = tl.load(item).to(tl.int64)
    first = tl.load(item + 1).to(tl.int64) * STEP
    tensor = tensors + number * TENSOR_FIELDS
    return tensor, table + number * (tasks + GRADIENTS), tl.load(tensor + SIZE), first


@triton.jit
def _gradients(addresses, first, task, size, tasks, T: constexpr):
    """Elements of several tasks' gradients, [tasks, T.elements]; checks bounds if T.vector is 1."""
    offset = first + tl.arange(0, T.elements)[None, :]
    address = tl.load(addresses + GRADIENTS + task, task < tasks, other=0)
    exists = (address != 0)[:, None]
    if T.vector == 1:
        exists = exists & (offset < size)
    g = tl.load(pointers(address, T)[:, None] + offset, exists, other=0.0)
    return widened(g, T.wide)


@triton.jit
def _write(addresses, first, size, total, T: constexpr):
    update = pointers(tl.load(addresses + UPDATE), T)
    offset = first + tl.arange(0, T.elements)
    if T.vector > 1:
        tl.store(update + offset, narrowed(total, T.dtype))
    else:
        tl.store(update + offset, narrowed(total, T.dtype), offset < size)


@triton.jit
def _segments(addresses, first, task, size, tasks, T: constexpr):
    """The elements from `_gradients`, as [tasks, segments, SEGMENT]."""
    g = _gradients(addresses, first, task, size, tasks, T)
    return tl.reshape(g, [g.shape[0], T.elements // SEGMENT, SEGMENT])


@triton.jit
def _add_products(addresses, first, size, products, dots_sum, before, tasks, T: constexpr):
    """Adds one tile's products to `dots_sum` if K <= 8, else to `products` where i <= j."""
    task = tl.arange(0, T.block)
    if T.tasks <= 8:
        g = _segments(addresses, first, task, size, tasks, T)
        for i in tl.static_range(T.tasks):
            is_i = task[:, None, None] == i
            dots = tl.sum(selected(g, is_i)[None, :, :] * g, 2).to(tl.float64)
            dots_sum += tl.where(is_i, dots[None, :, :], 0.0)
    else:
        for first_j in range(0, tasks, T.block):
            j = first_j + task
            g = _segments(addresses, first, j, size, tasks, T)
            for i in range(tl.minimum(first_j + T.block, tasks)):
                g_i = _segments(addresses, first, i + tl.arange(0, 1), size, tasks, T)
                dots = tl.sum(tl.sum(g_i * g, 2).to(tl.float64), 1)
                slot = products + i * tasks + j
                earlier = tl.load(slot, j < tl.where(before, tasks, 0), other=0.0)
                tl.store(slot, earlier + dots, j < tasks)
        tl.debug_barrier()
    return dots_sum


@triton.jit(do_not_specialize=["counters", "tasks"])
def gramian_kernel(
    items,
    tensors,
    table,
    counters,
    products,
    out,
    tasks,
    TASKS: constexpr,
    ELEMENTS: constexpr,
    DTYPE: constexpr,
):
    """Computes one item; the last program of a group to finish adds up the group's products.

    Args:
        items: int32 [programs, 2]: tensor, index among the tensor's items; adjacent per group.
        tensors: int64 [tensors, TENSOR_FIELDS].
        table: int64 [tensors, GRADIENTS + tasks], addresses.
        counters: int32 [groups], zeros.
        products: float64 [programs, tasks, tasks], workspace.
        out: float64 [groups, tasks, tasks].
        tasks: K.
        TASKS: See `Traits`.
        ELEMENTS: See `Traits`.
        DTYPE: See `Traits`.

    """
    T: constexpr = traits(TASKS, ELEMENTS, DTYPE)
    tensor, addresses, size, index = _item(items, tensors, table, tasks, 1)
    tiles = tl.load(tensor + TILES)
    aligned = tl.load(addresses + ALIGNED) != 0
    own = products + tl.program_id(0).to(tl.int64) * (tasks * tasks)
    dots_sum = tl.zeros([T.block, T.block, ELEMENTS // SEGMENT], tl.float64)
    for t in range(tiles):
        first = (index * tiles + t) * ELEMENTS
        if aligned & (first + ELEMENTS <= size):
            dots_sum = _add_products(addresses, first, size, own, dots_sum, t > 0, tasks, T)
        else:
            dots_sum = _add_products(
                addresses, first, size, own, dots_sum, t > 0, tasks, unaligned(T)
            )
    task = tl.arange(0, T.block)
    if TASKS <= 8:
        mask = (task < tasks)[:, None] & (task < tasks)[None, :]
        tl.store(own + task[:, None] * tasks + task[None, :], tl.sum(dots_sum, 2), mask)
    group = tl.load(tensor + GROUP)
    group_items = tl.load(tensor + GROUP_ITEMS)
    if arrive(counters + group, group_items):
        group_products = products + tl.load(tensor + FIRST_ITEM) * (tasks * tasks)
        j = tl.arange(0, TASKS)[None, :]
        for first_i in range(0, tasks, T.rows):
            i = (first_i + tl.arange(0, T.rows))[:, None]
            total = added_up(group_products, group_items, first_i, tasks, T, True)
            offset = (group * tasks + i) * tasks + j
            tl.store(out + offset, total, (i < tasks) & (j < tasks))


@triton.jit
def _combine_tile(addresses, first, size, weights, tasks, PROTECTED: constexpr, T: constexpr):
    total = tl.zeros([T.elements], T.wide)
    # For K <= 8 the compiler sees a single iteration, and can move loads out of the loop.
    for first_j in range(0, tasks if T.tasks > T.block else 1, T.block):
        j = first_j + tl.arange(0, T.block)
        g = _gradients(addresses, first, j, size, tasks, T)
        weight = widened(tl.load(weights + j, j < tasks, other=0.0), T.wide)
        # A missing gradient counts as zero, whatever its weight.
        exists = tl.load(addresses + GRADIENTS + j, j < tasks, other=0) != 0
        total += tl.sum(tl.where(exists, weight, 0.0)[:, None] * g, 0)
    if PROTECTED is not None:
        guide = tl.sum(_gradients(addresses, first, PROTECTED + tl.arange(0, 1), size, tasks, T), 0)
        # Adding zero times the other number keeps infinities and NaN from being dropped.
        guide += 0.0 * total
        differs = ((guide > 0) & (total <= 0)) | ((guide < 0) & (total >= 0))
        total = tl.where(differs, guide, total + 0.0 * guide)
    _write(addresses, first, size, total, T)


@triton.jit(do_not_specialize=["tasks"])
def combine_kernel(
    items,
    tensors,
    table,
    weights,
    tasks,
    TASKS: constexpr,
    ELEMENTS: constexpr,
    DTYPE: constexpr,
    PROTECTED: constexpr,
):
    """Computes one tile of the weighted sum; `weights` is [groups, tasks].

    PROTECTED is the index of the protected task, or None. See `gramian_kernel` for the other
    arguments.
    """
    tensor, addresses, size, first = _item(items, tensors, table, tasks, ELEMENTS)
    weights += tl.load(tensor + GROUP) * tasks
    T: constexpr = traits(TASKS, ELEMENTS, DTYPE)
    if (tl.load(addresses + ALIGNED) != 0) & (first + ELEMENTS <= size):
        _combine_tile(addresses, first, size, weights, tasks, PROTECTED, T)
    else:
        _combine_tile(addresses, first, size, weights, tasks, PROTECTED, unaligned(T))


@triton.jit
def _uniform_numbers(drawn, first, T: constexpr):
    """Multiples of 2^-24 in [0, 1) for the tile that starts at element `first`."""
    index = first.to(tl.uint32) + tl.arange(0, T.elements).to(tl.uint32)
    bits = random_words(step_key(drawn), index, first)
    return (bits >> 8).to(tl.int32).to(T.wide) * (2.0**-24)


@triton.jit
def _drop_tile(addresses, first, first_index, size, leaks, drawn, tasks, T: constexpr):
    zeros = tl.zeros([T.elements], T.wide)
    positive, negative, leaked_positive, leaked_negative = zeros, zeros, zeros, zeros
    for first_j in range(0, tasks if T.tasks > T.block else 1, T.block):
        for n in tl.static_range(T.block):
            j = first_j + n + tl.arange(0, 1)
            g = tl.sum(_gradients(addresses, first, j, size, tasks, T), 0)
            leak = tl.load(leaks + j, j < tasks, other=0.0).to(T.wide)
            above = tl.where(g > 0, g, 0.0)
            below = tl.where(g > 0, 0.0, g)  # includes NaN
            positive += above
            negative += below
            leaked_positive += leak * above
            leaked_negative += leak * below
    u = _uniform_numbers(drawn, first_index + first, T)
    # Infinities and NaN are never lost: they make this condition false, and the sum it then selects
    # contains them. NaN and -inf are in `negative`; inf becomes leak * inf (NaN if leak is 0).
    chosen = u * (positive - negative) < positive
    total = tl.where(chosen, positive + leaked_negative, negative + leaked_positive)
    _write(addresses, first, size, total, T)


@triton.jit(do_not_specialize=["leaks", "drawn", "tasks"])
def drop_signs_kernel(
    items,
    tensors,
    table,
    leaks,
    drawn,
    tasks,
    TASKS: constexpr,
    ELEMENTS: constexpr,
    DTYPE: constexpr,
):
    """Computes one tile; `leaks` is float64 [tasks]. See `step_key` for `drawn`."""
    tensor, addresses, size, first = _item(items, tensors, table, tasks, ELEMENTS)
    offset = tl.load(tensor + FIRST_INDEX)
    T: constexpr = traits(TASKS, ELEMENTS, DTYPE)
    if (tl.load(addresses + ALIGNED) != 0) & (first + ELEMENTS <= size):
        _drop_tile(addresses, first, offset, size, leaks, drawn, tasks, T)
    else:
        _drop_tile(addresses, first, offset, size, leaks, drawn, tasks, unaligned(T))
