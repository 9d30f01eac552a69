"""Gramian, weighted sum and sign dropping: one launch each for all tensors.

Memory traffic: the gradients are read once, K N, and where there is an update, N are written.
"""

import triton
import triton.language as tl

from cs_kernels.ops.gpu.combine import GradientCallField, GradientField
from cs_kernels.ops.triton.primitives import added_up, arrive, narrowed, pointer, pointers, widened

SIZE = tl.constexpr(GradientField.SIZE)
GROUP = tl.constexpr(GradientField.GROUP)
FIRST_ITEM = tl.constexpr(GradientField.FIRST_ITEM)
GROUP_ITEMS = tl.constexpr(GradientField.GROUP_ITEMS)
TILES = tl.constexpr(GradientField.TILES)
FIRST_INDEX = tl.constexpr(GradientField.FIRST_INDEX)
TENSOR_FIELDS = tl.constexpr(len(GradientField))

UPDATE = tl.constexpr(GradientCallField.UPDATE)
ALIGNED = tl.constexpr(GradientCallField.ALIGNED)
GRADIENTS = tl.constexpr(GradientCallField.GRADIENTS)


@triton.jit
def _gradients(
    addresses,
    first,
    task,
    size,
    tasks,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Elements of some tasks' gradients, [tasks, ELEMENTS]; with VECTOR > 1, all are inside."""
    offset = first + tl.arange(0, ELEMENTS)[None, :]
    address = tl.load(addresses + GRADIENTS + task, task < tasks, other=0)
    exists = (address != 0)[:, None]
    if VECTOR == 1:
        exists = exists & (offset < size)
    g = tl.load(pointers(address, DTYPE, VECTOR)[:, None] + offset, exists, other=0.0)
    return widened(g, WIDE)


@triton.jit
def _write(
    addresses,
    first,
    size,
    total,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    update = pointer(tl.load(addresses + UPDATE), DTYPE)
    offset = first + tl.arange(0, ELEMENTS)
    if VECTOR > 1:
        tl.store(tl.multiple_of(update, 16) + offset, narrowed(total, DTYPE))
    else:
        tl.store(update + offset, narrowed(total, DTYPE), offset < size)


@triton.jit
def _add_products(
    addresses,
    first,
    size,
    products,
    kept,
    before,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One tile's products: for K <= 8 returned, else added to `products` where i <= j."""
    BLOCK: tl.constexpr = min(TASKS, 8)
    task = tl.arange(0, BLOCK)
    if TASKS <= 8:
        g = _gradients(addresses, first, task, size, tasks, ELEMENTS, DTYPE, WIDE, VECTOR)
        for i in range(TASKS):
            g_i = tl.sum(tl.where(task[:, None] == i, g, 0.0), 0)
            dots = tl.sum(g_i[None, :] * g, 1).to(tl.float64)
            kept += tl.where(task[:, None] == i, dots[None, :], 0.0)
    else:
        for first_j in range(0, tasks, BLOCK):
            j = first_j + task
            g = _gradients(addresses, first, j, size, tasks, ELEMENTS, DTYPE, WIDE, VECTOR)
            for i in range(tl.minimum(first_j + BLOCK, tasks)):
                only = i + tl.arange(0, 1)
                g_i = _gradients(addresses, first, only, size, tasks, ELEMENTS, DTYPE, WIDE, VECTOR)
                dots = tl.sum(g_i * g, 1).to(tl.float64)
                slot = products + i * tasks + j
                earlier = tl.load(slot, j < tl.where(before, tasks, 0), other=0.0)
                tl.store(slot, earlier + dots, j < tasks)
        tl.debug_barrier()
    return kept


@triton.jit(do_not_specialize=["counters", "tasks"])
def gramian_kernel(
    items,
    tensors,
    table,
    counters,
    products,
    out,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One item; the last one of a group adds them up.

    Args:
        items: int32 [programs, 2]: tensor, index among its items. Items of a group are adjacent.
        tensors: int64 [tensors, TENSOR_FIELDS].
        table: int64 [tensors, GRADIENTS + tasks], addresses.
        counters: int32 [groups], zeros.
        products: float64 [programs, tasks, tasks], workspace.
        out: float64 [groups, tasks, tasks].
        tasks: K.
        TASKS: A power of two, K or greater; 64 stands for all K > 8.
        ELEMENTS: Of a tile.
        DTYPE: Of the gradients.
        WIDE: What a tile's products are added up in.
        VECTOR: Elements in 16 bytes.

    """
    item = tl.program_id(0).to(tl.int64)
    number = tl.load(items + item * 2).to(tl.int64)
    index = tl.load(items + item * 2 + 1).to(tl.int64)
    tensor = tensors + number * TENSOR_FIELDS
    addresses = table + number * (tasks + GRADIENTS)
    size = tl.load(tensor + SIZE)
    tiles = tl.load(tensor + TILES)
    aligned = tl.load(addresses + ALIGNED) != 0
    BLOCK: tl.constexpr = min(TASKS, 8)
    own = products + item * (tasks * tasks)
    kept = tl.zeros([BLOCK, BLOCK], tl.float64)
    for t in range(tiles):
        first = (index * tiles + t) * ELEMENTS
        if aligned & (first + ELEMENTS <= size):
            kept = _add_products(
                addresses,
                first,
                size,
                own,
                kept,
                t > 0,
                tasks,
                TASKS,
                ELEMENTS,
                DTYPE,
                WIDE,
                VECTOR,
            )
        else:
            kept = _add_products(
                addresses, first, size, own, kept, t > 0, tasks, TASKS, ELEMENTS, DTYPE, WIDE, 1
            )
    task = tl.arange(0, BLOCK)
    if TASKS <= 8:
        mask = (task < tasks)[:, None] & (task < tasks)[None, :]
        tl.store(own + task[:, None] * tasks + task[None, :], kept, mask)
    group = tl.load(tensor + GROUP)
    group_items = tl.load(tensor + GROUP_ITEMS)
    if arrive(counters + group, group_items):
        GROUPS: tl.constexpr = TASKS if TASKS <= 8 else 1
        of_group = products + tl.load(tensor + FIRST_ITEM) * (tasks * tasks)
        j = tl.arange(0, TASKS)[None, :]
        for first_i in range(0, tasks, GROUPS):
            i = (first_i + tl.arange(0, GROUPS))[:, None]
            total = added_up(of_group, group_items, first_i, tasks, GROUPS, TASKS, True)
            offset = (group * tasks + i) * tasks + j
            tl.store(out + offset, total, (i < tasks) & (j < tasks))


@triton.jit
def _combine_tile(
    addresses,
    first,
    size,
    weights,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    BLOCK: tl.constexpr = min(TASKS, 8)
    total = tl.zeros([ELEMENTS], WIDE)
    for first_j in range(0, tasks, BLOCK):
        j = first_j + tl.arange(0, BLOCK)
        g = _gradients(addresses, first, j, size, tasks, ELEMENTS, DTYPE, WIDE, VECTOR)
        weight = widened(tl.load(weights + j, j < tasks, other=0.0), WIDE)
        # A missing gradient counts as zero, whatever its weight.
        exists = tl.load(addresses + GRADIENTS + j, j < tasks, other=0) != 0
        total += tl.sum(tl.where(exists, weight, 0.0)[:, None] * g, 0)
    _write(addresses, first, size, total, ELEMENTS, DTYPE, VECTOR)


@triton.jit(do_not_specialize=["tasks"])
def combine_kernel(
    items,
    tensors,
    table,
    weights,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One tile of the weighted sum; weights [groups, tasks], the rest as in `gramian_kernel`."""
    item = tl.program_id(0).to(tl.int64)
    number = tl.load(items + item * 2).to(tl.int64)
    first = tl.load(items + item * 2 + 1).to(tl.int64) * ELEMENTS
    tensor = tensors + number * TENSOR_FIELDS
    addresses = table + number * (tasks + GRADIENTS)
    size = tl.load(tensor + SIZE)
    weights += tl.load(tensor + GROUP) * tasks
    if (tl.load(addresses + ALIGNED) != 0) & (first + ELEMENTS <= size):
        _combine_tile(addresses, first, size, weights, tasks, TASKS, ELEMENTS, DTYPE, WIDE, VECTOR)
    else:
        _combine_tile(addresses, first, size, weights, tasks, TASKS, ELEMENTS, DTYPE, WIDE, 1)


@triton.jit
def _lowbias32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform_numbers(keys, offset, WIDE: tl.constexpr):
    """In [0, 1), multiples of 2^-24, for the elements of a tile; keys for each 2^32 elements."""
    key = tl.load(keys + (offset >> 32)).to(tl.uint64, bitcast=True)
    bits = _lowbias32(offset.to(tl.uint32) ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32)
    return (_lowbias32(bits) >> 8).to(tl.int32).to(WIDE) * (2.0**-24)


@triton.jit
def _drop_tile(
    addresses,
    first,
    first_index,
    size,
    leaks,
    keys,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    BLOCK: tl.constexpr = min(TASKS, 8)
    positive = tl.zeros([ELEMENTS], WIDE)
    negative = tl.zeros([ELEMENTS], WIDE)
    kept_positive = tl.zeros([ELEMENTS], WIDE)
    kept_negative = tl.zeros([ELEMENTS], WIDE)
    leaked = tl.zeros([ELEMENTS], WIDE)
    for first_j in range(0, tasks, BLOCK):
        j = first_j + tl.arange(0, BLOCK)
        g = _gradients(addresses, first, j, size, tasks, ELEMENTS, DTYPE, WIDE, VECTOR)
        leak = tl.load(leaks + j, j < tasks, other=0.0).to(WIDE)[:, None]
        above = tl.where(g > 0, g, 0.0)
        below = tl.where(g > 0, 0.0, g)  # and NaN
        positive += tl.sum(above, 0)
        negative += tl.sum(below, 0)
        kept_positive += tl.sum((1 - leak) * above, 0)
        kept_negative += tl.sum((1 - leak) * below, 0)
        leaked += tl.sum(leak * g, 0)
    offset = first_index + first + tl.arange(0, ELEMENTS)
    # Beyond the tensor there may be no key.
    inside = tl.minimum(offset, first_index + size - 1)
    u = _uniform_numbers(keys, inside, WIDE)
    chosen = tl.where(u * (positive - negative) < positive, kept_positive, kept_negative)
    # Zero times the sum: infinities and NaN are not dropped.
    total = chosen + leaked + 0 * (positive + negative)
    _write(addresses, first, size, total, ELEMENTS, DTYPE, VECTOR)


@triton.jit(do_not_specialize=["leaks", "keys", "tasks"])
def drop_signs_kernel(
    items,
    tensors,
    table,
    leaks,
    keys,
    tasks,
    TASKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One tile; leaks float64 [tasks], keys int64, one for each 2^32 elements."""
    item = tl.program_id(0).to(tl.int64)
    number = tl.load(items + item * 2).to(tl.int64)
    first = tl.load(items + item * 2 + 1).to(tl.int64) * ELEMENTS
    tensor = tensors + number * TENSOR_FIELDS
    addresses = table + number * (tasks + GRADIENTS)
    size = tl.load(tensor + SIZE)
    offset = tl.load(tensor + FIRST_INDEX)
    if (tl.load(addresses + ALIGNED) != 0) & (first + ELEMENTS <= size):
        _drop_tile(
            addresses,
            first,
            offset,
            size,
            leaks,
            keys,
            tasks,
            TASKS,
            ELEMENTS,
            DTYPE,
            WIDE,
            VECTOR,
        )
    else:
        _drop_tile(
            addresses, first, offset, size, leaks, keys, tasks, TASKS, ELEMENTS, DTYPE, WIDE, 1
        )
