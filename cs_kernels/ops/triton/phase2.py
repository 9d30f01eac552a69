"""Phase 2 of a whole trunk, one launch per dtype; `ops/gpu/phase2_plan.py` describes the items.

Memory traffic: reads weights and gradients once and writes the update once, (K + 2) N elements in
total. Rows in conflict are revisited with two reads and a write, in the L2 cache if the layer fits.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from cs_kernels.ops.gpu.phase2_plan import CallField, Counter, ItemKind, TensorField
from cs_kernels.ops.triton.primitives import (
    SEGMENT,
    added_up,
    arrive,
    narrowed,
    pointers,
    publish,
    selected,
    traits,
    unaligned,
    wait,
    widened,
)

ENERGY_ROWS = constexpr(4)
ENERGY_COLUMNS = constexpr(256)

ENERGY, SUM, PROJECT = map(constexpr, ItemKind)

ROWS = constexpr(TensorField.ROWS)
LENGTH = constexpr(TensorField.LENGTH)
CHANNELS = constexpr(TensorField.CHANNELS)
INNER = constexpr(TensorField.INNER)
ROW_SEGMENTS = constexpr(TensorField.ROW_SEGMENTS)
SIZE = constexpr(TensorField.SIZE)
KERNEL_SIZE = constexpr(TensorField.KERNEL_SIZE)
LAYER = constexpr(TensorField.LAYER)
FIRST_ROW = constexpr(TensorField.FIRST_ROW)
FIRST_SUM = constexpr(TensorField.FIRST_SUM)
SUM_ITEMS = constexpr(TensorField.SUM_ITEMS)
TILES = constexpr(TensorField.TILES)
ENERGY_ITEMS = constexpr(TensorField.ENERGY_ITEMS)
TENSOR_FIELDS = constexpr(len(TensorField))

UPDATE, WEIGHT, PRIORITY, ALIGNED, GRADIENTS = map(constexpr, CallField)

ENERGIES_DONE, PRIORITY_READY, SUMS_DONE, COEFFICIENTS_READY = map(constexpr, Counter)
LAYER_COUNTERS = constexpr(len(Counter))


@triton.jit
def _shape(tensor):
    """Rows, row length, segments per row, channels per group, and contiguous elements of a row."""
    length, segments = tl.load(tensor + LENGTH), tl.load(tensor + ROW_SEGMENTS).to(tl.int32)
    channels, inner = tl.load(tensor + CHANNELS), tl.load(tensor + INNER)
    return tl.load(tensor + ROWS), length, segments, channels, inner


@triton.jit
def _offset(shape, row, column):
    """The offsets of a row's elements, for the layout [groups, outer, channels, inner]."""
    _, length, _, channels, inner = shape
    block = (row // channels) * (length // inner) + column // inner
    return (block * channels + row % channels) * inner + column % inner


@triton.jit
def _tile(shape, first, T: constexpr):
    """Rows [segments], offsets and mask [segments, SEGMENT] of the segments that start at `first`.

    A row's last segment may be shorter. If T.vector > 1, rows are contiguous and their lengths are
    multiples of T.vector.
    """
    rows, length, row_segments, _, _ = shape
    segment = first + tl.arange(0, T.elements // SEGMENT)
    row = segment // row_segments
    column = (segment - row * row_segments).to(tl.int64) * SEGMENT
    count = tl.minimum(tl.where(row < rows, length - column, 0), SEGMENT).to(tl.int32)
    lane = tl.arange(0, SEGMENT)[None, :]
    if T.vector > 1:
        count = tl.multiple_of(count, [T.vector])
        start = tl.multiple_of(row.to(tl.int64) * length + column, [T.vector])
        offset = start[:, None] + lane
    else:
        offset = _offset(shape, row.to(tl.int64)[:, None], column[:, None] + lane)
    return row, offset, lane < count[:, None]


@triton.jit
def row_energies(tensor, weight, first, VECTOR: constexpr):
    """Eq. (4) of the ENERGY_ROWS rows from `first` on, the row indices, and whether they exist."""
    row = first + tl.arange(0, ENERGY_ROWS)
    shape = _shape(tensor)
    rows, length, _, _, _ = shape
    inside = row < rows
    energy = tl.zeros([ENERGY_ROWS, ENERGY_COLUMNS], tl.float64)
    # Squares of 16-bit numbers are exact in float32, unless they overflow or underflow.
    EXACT: constexpr = weight.dtype.element_ty.primitive_bitwidth <= 16
    WIDE: constexpr = tl.float32 if EXACT else tl.float64
    UNROLL: constexpr = 4 if VECTOR > 1 else 1  # loads in flight
    for start in range(0, length, UNROLL * ENERGY_COLUMNS):
        squares = tl.zeros([ENERGY_ROWS, ENERGY_COLUMNS], WIDE) if EXACT else energy
        for n in tl.static_range(UNROLL):
            column = start + n * ENERGY_COLUMNS
            left = length - column
            lane = tl.arange(0, ENERGY_COLUMNS)
            if VECTOR > 1:
                left = tl.multiple_of(left, VECTOR)
                begin = tl.multiple_of(row.to(tl.int64) * length + column, [VECTOR])
                offset = begin[:, None] + lane[None, :]
            else:
                wide = (column + lane).to(tl.int64)
                offset = _offset(shape, row.to(tl.int64)[:, None], wide[None, :])
            mask = inside[:, None] & (lane < left)[None, :]
            pointer = weight + offset
            if VECTOR > 1:
                pointer = tl.multiple_of(pointer, [1, 16])
            w = tl.load(pointer, mask, other=0.0, eviction_policy="evict_first")
            w = widened(w, WIDE)
            squares += w * w
        energy = energy + squares if EXACT else squares
    return tl.sum(energy, 1) / tl.load(tensor + KERNEL_SIZE).to(tl.float64), row, inside


@triton.jit
def strengths(energy, gamma, variance, epsilon, rows, first, tasks, TASKS: constexpr):
    """Eq. (6), [TASKS, 512 / TASKS], for the rows from `first` on; zero out of bounds."""
    row = first + tl.arange(0, 512 // TASKS)
    task = tl.arange(0, TASKS)
    mask = (row < rows)[None, :] & (task < tasks)[:, None]
    offset = task.to(tl.int64)[:, None] * rows + row[None, :]
    scale = widened(tl.load(gamma + offset, mask, other=0.0), tl.float64)
    eps = tl.load(epsilon + task, task < tasks, other=1.0)
    spread = widened(tl.load(variance + offset, mask, other=1.0), tl.float64) + eps[:, None]
    # In Phase 2, other programs of this launch wrote the energies; `arrive` made them visible.
    e = tl.load(energy + row, row < rows, other=0.0)
    return tl.where(mask, scale * scale / spread * e[None, :], 0.0), row


@triton.jit
def normalized(strength, total):
    """Eq. (7)."""
    safe = tl.where(total == 0, 1.0, total)
    return tl.where(total[:, None] == 0, 0.0, strength / safe[:, None])


@triton.jit
def top_task(strength, tasks, TASKS: constexpr):
    """Eq. (10). A NaN never wins; ties go to the lowest task."""
    lowest = -float("inf")
    task = tl.arange(0, TASKS)[:, None]
    number = tl.where((strength == strength) & (task < tasks), strength, lowest)
    return tl.argmax(number, 0, tie_break_left=True).to(tl.int64)


@triton.jit
def strength_totals(energy, gamma, variance, epsilon, rows, tasks, TASKS: constexpr):
    """Eq. (6) summed over rows, [TASKS]."""
    NUMBER: constexpr = 512 // TASKS
    total = tl.zeros([TASKS, NUMBER], tl.float64)
    for first in range(0, rows, NUMBER):
        strength, _ = strengths(energy, gamma, variance, epsilon, rows, first, tasks, TASKS)
        total += strength
    return tl.sum(total, 1)


@triton.jit
def _priorities(addresses):
    return tl.load(addresses + PRIORITY).to(tl.pointer_type(tl.int64))


@triton.jit
def _find_priorities(tensor, addresses, energy, gamma, variance, epsilon, tasks, TASKS: constexpr):
    rows = tl.load(tensor + ROWS)
    first_row = tl.load(tensor + FIRST_ROW)
    energy += first_row
    gamma += first_row * tasks
    variance += first_row * tasks
    epsilon += tl.load(tensor + LAYER) * tasks
    priority = _priorities(addresses)
    total = strength_totals(energy, gamma, variance, epsilon, rows, tasks, TASKS)
    for first in range(0, rows, 512 // TASKS):
        strength, row = strengths(energy, gamma, variance, epsilon, rows, first, tasks, TASKS)
        tl.store(priority + row, top_task(normalized(strength, total), tasks, TASKS), row < rows)


@triton.jit
def _addresses(addresses, task, tasks):
    """The addresses of several tasks' gradients; 0 if the task or its gradient does not exist."""
    return tl.load(addresses + GRADIENTS + task, (task >= 0) & (task < tasks), other=0)


@triton.jit
def _reference_gradient(address, offset, mask, T: constexpr):
    """Elements of each segment's reference gradient, [segments, SEGMENT]."""
    pointer = pointers(address, T)[:, None] + offset
    return widened(tl.load(pointer, (address != 0)[:, None] & mask, other=0.0), T.wide)


@triton.jit
def _gradients(address, offset, mask, T: constexpr):
    """Elements of several tasks' gradients, [tasks, segments, SEGMENT]."""
    pointer = pointers(address, T)[:, None, None] + offset[None, :, :]
    g = tl.load(pointer, (address != 0)[:, None, None] & mask[None, :, :], other=0.0)
    return widened(g, T.wide)


@triton.jit
def _sum_and_products(tensor, addresses, index, tiles, products, tasks, T: constexpr):
    """Computes a SUM item: the plain sum and products[i, j] = <G_i, G_j> over channel group i."""
    NUMBER: constexpr = T.elements // SEGMENT
    shape = _shape(tensor)
    # A tensor without prioritized channels has no channel groups.
    layer = tl.load(tensor + LAYER)
    groups, prioritized = tl.where(layer >= 0, tasks, 0), tl.where(layer >= 0, shape[0], 0)
    priorities = _priorities(addresses)
    update = pointers(tl.load(addresses + UPDATE), T)
    task = tl.arange(0, T.block)
    address = _addresses(addresses, task, tasks)
    dots_sum = tl.zeros([T.block, T.block, NUMBER], tl.float64)
    begin = index * tiles * NUMBER
    end = tl.minimum(begin + tiles * NUMBER, tl.load(tensor + SIZE).to(tl.int32))
    for start in range(begin, end, NUMBER):
        row, offset, mask = _tile(shape, start, T)
        priority = tl.load(priorities + row, row < prioritized, other=-1).to(tl.int32)
        if T.tasks <= 8:
            g = _gradients(address, offset, mask, T)
            total = tl.sum(g, 0)
            reference = selected(g, task[:, None, None] == priority[None, :, None])
            dots = tl.sum(reference[None, :, :] * g, 2).to(tl.float64)
            in_group = task[:, None, None] == priority[None, None, :]
            dots_sum += tl.where(in_group, dots[None, :, :], 0.0)
        else:
            address_i = _addresses(addresses, priority, tasks)
            reference = _reference_gradient(address_i, offset, mask, T)
            total = tl.zeros([NUMBER, SEGMENT], T.wide)
            for first in range(0, tasks, T.block):
                j = first + task
                g = _gradients(_addresses(addresses, j, tasks), offset, mask, T)
                total += tl.sum(g, 0)
                dots = tl.sum(reference[None, :, :] * g, 2).to(tl.float64)
                for i in range(tasks):
                    group_dots = tl.sum(tl.where(priority[None, :] == i, dots, 0.0), 1)
                    slot = products + i * tasks + j
                    before = tl.load(slot, j < tl.where(start > begin, groups, 0), other=0.0)
                    tl.store(slot, before + group_dots, j < groups)
            tl.debug_barrier()
        tl.store(update + offset, narrowed(total, T.dtype), mask)
    if T.tasks <= 8:
        i = task[:, None]
        j = task[None, :]
        tl.store(products + i * tasks + j, tl.sum(dots_sum, 2), (i < groups) & (j < groups))


@triton.jit
def _find_coefficients(tensor, item_products, products, coefficients, tasks, T: constexpr):
    """Adds up d_ij and derives a_i.

    a_i is the sum of -d_ij / d_ii over the j != i with d_ij < 0; it is 0 unless d_ii > 0.
    """
    items = tl.load(tensor + SUM_ITEMS)
    for first_i in range(0, tasks, T.rows):
        d_i = added_up(item_products, items, first_i, tasks, T, False)
        group = first_i + tl.arange(0, T.rows)
        j = tl.arange(0, T.tasks)
        mask = (group < tasks)[:, None] & (j < tasks)[None, :]
        tl.store(products + group[:, None] * tasks + j[None, :], d_i, mask)
        itself = group[:, None] == j[None, :]
        d_ii = tl.sum(tl.where(itself, d_i, 0.0), 1)[:, None]
        rivals = (~itself) & (d_i < 0) & (d_ii > 0)
        share = tl.where(rivals, -d_i / tl.where(d_ii > 0, d_ii, 1.0) + 0 * d_ii, 0.0)
        tl.store(coefficients + group, tl.sum(share, 1), group < tasks)


@triton.jit
def _project(tensor, addresses, index, tiles, coefficients, tasks, T: constexpr):
    """Computes a PROJECT item; a_i is rounded to T.wide."""
    NUMBER: constexpr = T.elements // SEGMENT
    task = tl.arange(0, T.tasks)
    task_coefficients = tl.load(coefficients + task, task < tasks, other=0.0)
    conflicts = tl.max((task_coefficients != 0).to(tl.int32), 0) > 0  # also if one is NaN
    shape = _shape(tensor)
    priorities = _priorities(addresses)
    update = pointers(tl.load(addresses + UPDATE), T)
    begin = index * tiles * NUMBER
    end = tl.minimum(begin + tiles * NUMBER, tl.load(tensor + SIZE).to(tl.int32))
    for start in range(begin, tl.where(conflicts, end, begin), NUMBER):
        row, offset, mask = _tile(shape, start, T)
        priority = tl.load(priorities + row, row < shape[0], other=-1).to(tl.int32)
        address = _addresses(addresses, priority, tasks)
        valid = (priority >= 0) & (priority < tasks)
        coefficient = tl.load(coefficients + priority, valid, other=0.0).to(T.wide)
        mask = mask & (coefficient != 0)[:, None]
        reference = _reference_gradient(address, offset, mask, T)
        total = widened(tl.load(update + offset, mask, other=0.0), T.wide)
        tl.store(update + offset, narrowed(total + coefficient[:, None] * reference, T.dtype), mask)


@triton.jit(do_not_specialize=["ticket", "counters", "tasks"])
def phase2_kernel(
    items,
    tensors,
    table,
    ticket,
    counters,
    energy,
    gamma,
    variance,
    epsilon,
    item_products,
    products,
    coefficients,
    tasks,
    TASKS: constexpr,
    ELEMENTS: constexpr,
    DTYPE: constexpr,
):
    """Computes one item.

    Args:
        items: int32 [programs, 3]: kind, tensor, index among the tensor's items of this kind.
        tensors: int64 [tensors, TENSOR_FIELDS].
        table: int64 [tensors, GRADIENTS + tasks], addresses.
        ticket: int32 [1], zero.
        counters: int32 [layers, LAYER_COUNTERS], zeros.
        energy: float64 [rows of all layers], workspace.
        gamma: [K, O] per layer, flattened and concatenated.
        variance: Likewise.
        epsilon: float64 [layers, tasks].
        item_products: float64 [SUM items of all layers, tasks, tasks], workspace.
        products: float64 [layers, tasks, tasks], d_ij of the channel groups.
        coefficients: float64 [layers, tasks], a_i; input if there are only PROJECT items.
        tasks: K.
        TASKS: See `Traits`.
        ELEMENTS: See `Traits`.
        DTYPE: See `Traits`.

    """
    T: constexpr = traits(TASKS, ELEMENTS, DTYPE)
    ANY: constexpr = unaligned(T, 4)
    item = items + tl.atomic_add(ticket, 1, sem="relaxed").to(tl.int64) * 3
    kind = tl.load(item)
    number = tl.load(item + 1).to(tl.int64)
    index = tl.load(item + 2)
    tensor = tensors + number * TENSOR_FIELDS
    addresses = table + number * (tasks + GRADIENTS)
    layer = tl.load(tensor + LAYER)
    counters += layer * LAYER_COUNTERS
    aligned = tl.load(addresses + ALIGNED) != 0
    item_products += (tl.load(tensor + FIRST_SUM) + index) * (tasks * tasks)
    products += layer * (tasks * tasks)
    coefficients += layer * tasks
    if kind == ENERGY:
        weight = pointers(tl.load(addresses + WEIGHT), ANY)
        first = index * ENERGY_ROWS
        if aligned:
            e, row, inside = row_energies(tensor, weight, first, T.vector)
        else:
            e, row, inside = row_energies(tensor, weight, first, 1)
        tl.store(energy + tl.load(tensor + FIRST_ROW) + row, e, inside)
        if arrive(counters + ENERGIES_DONE, tl.load(tensor + ENERGY_ITEMS)):
            _find_priorities(tensor, addresses, energy, gamma, variance, epsilon, tasks, TASKS)
            publish(counters + PRIORITY_READY)
    elif kind == SUM:
        tiles = tl.load(tensor + TILES).to(tl.int32)
        if (layer >= 0) & (tl.load(tensor + ENERGY_ITEMS) > 0):
            wait(counters + PRIORITY_READY)
        if aligned:
            _sum_and_products(tensor, addresses, index, tiles, item_products, tasks, T)
        else:
            _sum_and_products(tensor, addresses, index, tiles * 4, item_products, tasks, ANY)
        if layer >= 0:
            if arrive(counters + SUMS_DONE, tl.load(tensor + SUM_ITEMS)):
                first = item_products - index * (tasks * tasks)
                _find_coefficients(tensor, first, products, coefficients, tasks, T)
                publish(counters + COEFFICIENTS_READY)
    else:
        tiles = tl.load(tensor + TILES).to(tl.int32)
        wait(counters + COEFFICIENTS_READY)
        if aligned:
            _project(tensor, addresses, index, tiles, coefficients, tasks, T)
        else:
            _project(tensor, addresses, index, tiles * 4, coefficients, tasks, ANY)


@triton.jit
def energy_kernel(tensor, weight, energy, VECTOR: constexpr):
    """Eq. (4) of one layer, ENERGY_ROWS rows per program. Reads the weight once."""
    first = tl.program_id(0) * ENERGY_ROWS
    e, row, inside = row_energies(tensor, weight, first, VECTOR)
    tl.store(energy + row, e, inside)


@triton.jit(do_not_specialize=["rows", "tasks"])
def strength_kernel(
    energy, gamma, variance, epsilon, out, rows, tasks, NORMALIZE: constexpr, TASKS: constexpr
):
    """Eq. (6) of one layer, then Eq. (7) if NORMALIZE, in one program.

    Reads (2 K + 1) O numbers, twice if NORMALIZE, and writes K * O.
    """
    task = tl.arange(0, TASKS)
    total = tl.zeros([TASKS], tl.float64)
    if NORMALIZE:
        total = strength_totals(energy, gamma, variance, epsilon, rows, tasks, TASKS)
    for first in range(0, rows, 512 // TASKS):
        strength, row = strengths(energy, gamma, variance, epsilon, rows, first, tasks, TASKS)
        if NORMALIZE:
            strength = normalized(strength, total)
        offset = task.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(out + offset, strength, (task < tasks)[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "tasks"])
def priority_kernel(strength, out, rows, tasks, TASKS: constexpr):
    """Eq. (10), for 512 / TASKS rows per program. Reads K * O numbers and writes O."""
    NUMBER: constexpr = 512 // TASKS
    row = tl.program_id(0) * NUMBER + tl.arange(0, NUMBER)
    task = tl.arange(0, TASKS)
    offset = task.to(tl.int64)[:, None] * rows + row[None, :]
    mask = (task < tasks)[:, None] & (row < rows)[None, :]
    number = widened(tl.load(strength + offset, mask, other=0.0), tl.float64)
    tl.store(out + row, top_task(number, tasks, TASKS), row < rows)
