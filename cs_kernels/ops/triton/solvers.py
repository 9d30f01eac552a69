"""Task weights from Gramians: one program per Gramian, with K x K numbers in registers.

The reference (`ops/reference/solvers.py`) describes the solvers. Most solvers use the correlations
C_ij = G_ij / (d_i d_j), where d_i = |g_i|, usually with a ridge on the diagonal. A non-finite
Gramian gives NaN weights.

Memory traffic: reads K * K numbers and writes K; the latency of dependent sums dominates.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from cs_kernels.ops import solvers as numbers
from cs_kernels.ops.triton.primitives import splitmix64, step_key, widened

_RIDGE = constexpr(numbers.RIDGE)
_LEAST_PIVOT = constexpr(numbers.RIDGE / 4)
_NASH_RIDGE = constexpr(numbers.NASH_RIDGE)
_NASH_STOP = constexpr(numbers.NASH_STOP)
_NASH_FULL = constexpr(numbers.NASH_FULL)
_SLOPE = constexpr(numbers.SLOPE)
_STATIONARY = constexpr(numbers.STATIONARY)
_ZERO_SUM = constexpr(numbers.ZERO_SUM)
_EPSILON = constexpr(numbers.EPSILON)
_NO_COSINE = constexpr(numbers.NO_COSINE)
_FAIR_STOP = constexpr(numbers.FAIR_STOP)
_FAIR_FULL = constexpr(numbers.FAIR_FULL)
_FAIR_LEAST = constexpr(numbers.FAIR_LEAST)
_FAIR_MOST = constexpr(numbers.FAIR_MOST)
_MOST_SIMILAR = constexpr(numbers.MOST_SIMILAR)
_VANISHED = constexpr(numbers.VANISHED)
_INFINITY = constexpr(float("inf"))


@triton.jit
def _gramian(data, tasks, TASKS: constexpr):
    """The program's Gramian, padded with zeros to [TASKS, TASKS], and whether it is finite."""
    i = tl.arange(0, TASKS)[:, None]
    j = tl.arange(0, TASKS)[None, :]
    data += tl.program_id(0).to(tl.int64) * tasks * tasks
    g = tl.load(data + i * tasks + j, (i < tasks) & (j < tasks), other=0.0)
    g = widened(g, tl.float64)
    return g, tl.sum(tl.sum(tl.where(g - g == 0, 0, 1), 1), 0) == 0


@triton.jit
def _write(out, weights, finite, tasks, TASKS: constexpr):
    task = tl.arange(0, TASKS)
    index = tl.program_id(0).to(tl.int64) * tasks + task
    tl.store(out + index, tl.where(finite, weights, float("nan")), task < tasks)


@triton.jit
def _identity(TASKS: constexpr):
    return tl.arange(0, TASKS)[:, None] == tl.arange(0, TASKS)[None, :]


@triton.jit
def _diagonal(m, TASKS: constexpr):
    return tl.sum(tl.where(_identity(TASKS), m, 0.0), 0)


@triton.jit
def _times(m, x):
    """M x for a symmetric m. Column sums leave fewer numbers per thread than row sums."""
    return tl.sum(m * x[:, None], 0)


@triton.jit
def _at(x, k, TASKS: constexpr):
    return tl.sum(tl.where(tl.arange(0, TASKS) == k, x, 0), 0)


@triton.jit
def _lengths(data, tasks, TASKS: constexpr):
    """Lengths and inverse lengths (1 and 0 for a zero gradient), and the nonzero mask."""
    task = tl.arange(0, TASKS)
    data += tl.program_id(0).to(tl.int64) * tasks * tasks
    # The diagonal is loaded again, so that a thread holds one of its numbers instead of many.
    d = widened(tl.load(data + task * (tasks + 1), task < tasks, other=0.0), tl.float64)
    nonzero = d > 0
    length = tl.where(nonzero, tl.sqrt(tl.where(nonzero, d, 1.0)), 1.0)
    return length, tl.where(nonzero, 1 / length, 0.0), nonzero


@triton.jit
def _correlations(g, data, ridge, tasks, TASKS: constexpr):
    """C of tasks with a nonzero gradient, the identity elsewhere; and the results of `_lengths`."""
    length, inverse, nonzero = _lengths(data, tasks, TASKS)
    # The literal 1 + 1e-12 would be float32, which rounds it to 1.
    diagonal = 1 + nonzero.to(tl.float64) * ridge
    c = g * inverse[:, None] * inverse[None, :]
    # With 16-bit gradients, rounding errors of the products can exceed the ridge.
    c = tl.minimum(tl.maximum(c, -1.0), 1.0)
    return tl.where(_identity(TASKS), diagonal[None, :], c), length, inverse, nonzero


@triton.jit
def _solve(m, b, tasks, TASKS: constexpr):
    """Solves m x = b for a symmetric positive definite m, by eliminating one task at a time.

    This is Gauss-Jordan elimination, except that m stays symmetric: its row k equals its column k.
    Pivots are at least the ridge, up to rounding; an entry with a smaller pivot is set to zero.
    """
    task = tl.arange(0, TASKS)
    for k in range(tasks):
        row = tl.sum(tl.where(task[:, None] == k, m, 0.0), 0)
        pivot = _at(row, k, TASKS)
        inverse = tl.where(pivot > _LEAST_PIVOT, 1 / pivot, 0.0)
        scaled = row * inverse
        b_k = _at(b, k, TASKS)
        b = tl.where(task == k, b_k * inverse, b - scaled * b_k)
        m -= scaled[:, None] * row[None, :]
        m = tl.where(task[:, None] == k, scaled[None, :], m)
        m = tl.where(task[None, :] == k, scaled[:, None], m)
    return b


@triton.jit
def _among(c, free, TASKS: constexpr):
    """C restricted to the free tasks; the identity elsewhere."""
    both = (free[:, None] > 0) & (free[None, :] > 0)
    return tl.where(both, c, tl.where(_identity(TASKS), 1.0, 0.0))


@triton.jit
def _non_negative(c, f, nonzero, tasks, TASKS: constexpr):
    """The minimizer x of 1/2 x'Cx - f'x over x >= 0, by Lawson and Hanson's active-set method.

    Each iteration solves one linear system. Returns x, and an int32 mask of the free entries.
    """
    task = tl.arange(0, TASKS)
    x = tl.zeros([TASKS], tl.float64)
    free = tl.zeros([TASKS], tl.int32)
    tried = tl.zeros([TASKS], tl.int32)  # freed and immediately blocked since x last changed
    entered = 0
    blocked = 0
    moved = 0
    searching = 1
    turn = 0
    while searching > 0:
        slope = f - _times(c, x)
        scale = tl.abs(f) + _times(tl.abs(c), tl.abs(x))
        rises = nonzero & (slope > _SLOPE * scale) & (free == 0) & (tried == 0)
        candidate = tl.where(rises, slope, -_INFINITY)
        continues = (tl.max(candidate, 0) > -_INFINITY) | (blocked > 0)
        searching = tl.where(continues & (turn < 16 * TASKS + 64), 1, 0)
        # Frees a new entry, unless the last step was blocked.
        begins = tl.where(blocked > 0, 0, searching)
        entered = tl.where(begins > 0, tl.argmax(candidate, 0), entered)
        free = tl.where(task == entered, tl.maximum(free, begins), free)
        moved = tl.where(begins > 0, 0, moved)
        z = _solve(_among(c, free, TASKS), tl.where(free > 0, f, 0.0), tasks, TASKS)
        # The longest step toward z that leaves no entry negative.
        back = tl.where(x - z > 0, x - z, 1.0)
        reach = tl.where((free > 0) & (z <= 0), tl.where(x > 0, x / back, 0.0), _INFINITY)
        fraction = tl.min(reach, 0)
        blocked = tl.where(fraction < _INFINITY, searching, 0)
        hit = tl.where(task == tl.argmin(reach, 0), blocked, 0)
        fraction_taken = tl.where(blocked > 0, fraction, 0.0)
        next_x = tl.where(blocked > 0, x + fraction_taken * (z - x), z)
        next_x = tl.where((free > 0) & (hit == 0), next_x, 0.0)
        x = tl.where(searching > 0, next_x, x)
        free = tl.where(hit > 0, 0, free)
        moved = tl.where(fraction > 0, 1, moved)
        stays = tl.where(task == entered, 1, tried) * (1 - moved)
        tried = tl.where(blocked > 0, tried, stays)
        turn += 1
    return x, free


@triton.jit
def _rotated(m, partner, cosine, sine, ROWS: constexpr, TASKS: constexpr):
    """Rotates each column of m, or each row if ROWS, with its partner."""
    if ROWS:
        index = tl.broadcast_to(partner[:, None], [TASKS, TASKS])
        return cosine[:, None] * m + sine[:, None] * tl.gather(m, index, 0)
    index = tl.broadcast_to(partner[None, :], [TASKS, TASKS])
    return cosine[None, :] * m + sine[None, :] * tl.gather(m, index, 1)


@triton.jit
def _eigen(m, TASKS: constexpr):
    """Eigenvalues and eigenvectors (columns), by TASKS / 2 parallel disjoint Jacobi rotations."""
    task = tl.arange(0, TASKS)
    vectors = tl.where(_identity(TASKS), 1.0, 0.0).to(tl.float64)
    trace = tl.sum(tl.abs(_diagonal(m, TASKS)), 0)
    sweep = 0
    turning = True
    while turning:
        largest = 0.0
        for s in range(TASKS - 1):
            # A round-robin tournament: the last index is fixed, all other indices rotate.
            partner = (2 * s - task + 2 * (TASKS - 1)) % (TASKS - 1)
            partner = tl.where(task == s, TASKS - 1, partner)
            partner = tl.where(task == TASKS - 1, s, partner)
            pair = task[None, :] == partner[:, None]
            d = _diagonal(m, TASKS)
            off = tl.sum(tl.where(pair, m, 0.0), 1)
            d_partner = tl.sum(tl.where(pair, d[None, :], 0.0), 1)
            turns = tl.abs(off) > 1e-18 * trace
            difference = tl.where(task < partner, d_partner - d, d - d_partner)
            theta = difference / tl.where(turns, 2 * off, 1.0)
            # The bound only keeps theta^2 finite where nothing turns.
            bounded = tl.minimum(tl.abs(theta), 1e150)
            tangent = 1 / (bounded + tl.sqrt(bounded * bounded + 1))
            tangent = tl.where(turns, tl.where(theta < 0, -tangent, tangent), 0.0)
            cosine = 1 / tl.sqrt(tangent * tangent + 1)
            sine = tl.where(task < partner, -tangent, tangent) * cosine
            m = _rotated(m, partner, cosine, sine, False, TASKS)
            m = _rotated(m, partner, cosine, sine, True, TASKS)
            m = tl.where(pair & turns[:, None], 0.0, m)
            vectors = _rotated(vectors, partner, cosine, sine, False, TASKS)
            largest = tl.maximum(largest, tl.max(tl.where(turns, 1.0, 0.0), 0))
        sweep += 1
        turning = (largest > 0) & (sweep < 40)
    return _diagonal(m, TASKS), vectors


@triton.jit
def _components_of_ones(vectors, factor):
    """The sum over eigenvectors v of factor * (v'1) v."""
    return tl.sum(vectors * (factor * tl.sum(vectors, 0))[None, :], 1)


@triton.jit
def _begin_orders(drawn, TASKS: constexpr):
    """The key of the Gramian's random orders, and a matrix whose row i lists the tasks except i."""
    number = tl.program_id(0).to(tl.uint64)
    gramian_key = splitmix64(step_key(drawn) + number)
    position = tl.arange(0, TASKS)[None, :]
    others = position + tl.where(position >= tl.arange(0, TASKS)[:, None], 1, 0)
    return gramian_key, others


@triton.jit
def _draw_other(gramian_key, others, left, tasks, TASKS: constexpr):
    """Draws for each task i the next task j, from the `left` tasks that are not yet drawn.

    Returns j, [TASKS], and the updated `others`.
    """
    i = tl.arange(0, TASKS)
    position = i[None, :]
    index = splitmix64(gramian_key + (i * tasks + left).to(tl.uint64)) % left.to(tl.uint64)
    at_drawn = position == index.to(tl.int32)[:, None]
    j = tl.sum(tl.where(at_drawn, others, 0), 1)
    last = tl.sum(tl.where(position == left - 1, others, 0), 1)
    return j, tl.where(at_drawn, last[:, None], others)


@triton.jit(do_not_specialize=["tasks"])
def pcgrad_kernel(gramian, out, drawn, tasks, TASKS: constexpr):
    """PCGrad: row i projects gradient i off the gradients that conflict with it, in random order.

    `drawn` is as in `step_key`.
    """
    g, finite = _gramian(gramian, tasks, TASKS)
    i = tl.arange(0, TASKS)
    position = tl.arange(0, TASKS)[None, :]
    own = tl.where(_identity(TASKS), 1.0, 0.0).to(tl.float64)
    gramian_key, others = _begin_orders(drawn, TASKS)
    for done in range(tasks - 1):
        j, others = _draw_other(gramian_key, others, tasks - 1 - done, tasks, TASKS)
        met = position == j[:, None]
        # For every i, row j of the Gramian.
        index = tl.broadcast_to(tl.minimum(j, TASKS - 1)[:, None], [TASKS, TASKS])
        g_j = tl.gather(g, index, 0)
        square = tl.sum(tl.where(met, g_j, 0.0), 1)
        conflict = tl.sum(own * g_j, 1)
        projects = (conflict < 0) & (square > 0)
        share = tl.where(projects, conflict / tl.where(square > 0, square, 1.0), 0.0)
        own -= tl.where(met, share[:, None], 0.0)
    weights = tl.sum(tl.where(i[:, None] < tasks, own, 0.0), 0)
    _write(out, weights, finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def gradvac_kernel(gramian, out, similarities, drawn, tasks, TASKS: constexpr):
    """GradVac, with one row per task; `drawn` is as in `step_key`, followed by the rate's bits."""
    g, finite = _gramian(gramian, tasks, TASKS)
    length, inverse, nonzero = _lengths(gramian, tasks, TASKS)
    i = tl.arange(0, TASKS)
    position = tl.arange(0, TASKS)[None, :]
    rate = tl.load(drawn + 2).to(tl.float64, bitcast=True)
    at = similarities + tl.program_id(0).to(tl.int64) * tasks * tasks + i * tasks
    own = tl.where(_identity(TASKS), 1.0, 0.0).to(tl.float64)
    current = tl.where(nonzero, length, 0.0)
    usable = tl.where(finite, tasks, 0)
    gramian_key, others = _begin_orders(drawn, TASKS)
    for done in range(tasks - 1):
        j, others = _draw_other(gramian_key, others, tasks - 1 - done, tasks, TASKS)
        j = tl.minimum(j, TASKS - 1)
        g_j = tl.gather(g, tl.broadcast_to(j[:, None], [TASKS, TASKS]), 0)
        inverse_j = tl.gather(inverse, j, 0)
        turns = (i < usable) & (inverse_j > 0) & (current > _VANISHED * length)
        divisor = tl.where(current > 0, current, 1.0)
        cosine = tl.sum(own * g_j, 1) / divisor * inverse_j
        cosine = tl.minimum(tl.maximum(cosine, -1.0), 1.0)
        target = tl.load(at + j, turns, other=0.0)
        wanted = tl.minimum(target, _MOST_SIMILAR)
        # Keeps the component orthogonal to g_j and adjusts the parallel one to reach
        # the target angle.
        across = tl.sqrt((1 - cosine) * (1 + cosine))
        ratio = across / tl.sqrt((1 - wanted) * (1 + wanted))
        changes = turns & (cosine < wanted)
        added = tl.where(changes, current * inverse_j * (wanted * ratio - cosine), 0.0)
        own += tl.where(position == j[:, None], added[:, None], 0.0)
        current *= tl.where(changes, ratio, 1.0)
        tl.store(at + j, target + rate * (cosine - target), turns)
    weights = tl.sum(tl.where(i[:, None] < tasks, own, 0.0), 0)
    _write(out, weights, finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def mgda_kernel(gramian, out, tasks, TASKS: constexpr):
    """MGDA: the min-norm point is x / sum x, where x >= 0 minimizes 1/2 x'Gx - 1'x."""
    g, finite = _gramian(gramian, tasks, TASKS)
    task = tl.arange(0, TASKS)
    c, length, inverse, nonzero = _correlations(g, gramian, _RIDGE, tasks, TASKS)
    shortest = tl.min(tl.where(nonzero, length, _INFINITY), 0)
    relative = shortest * inverse
    x, _ = _non_negative(c, relative, nonzero, tasks, TASKS)
    x *= relative
    absent = (nonzero == 0) & (task < tasks)
    number = tl.sum(tl.where(absent, 1.0, 0.0), 0)
    equal = tl.where(absent, 1 / tl.maximum(number, 1.0), 0.0)
    total = tl.sum(x, 0)
    min_norm = x * (1 / tl.where(total > 0, total, 1.0))
    _write(out, tl.where(number > 0, equal, min_norm), finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def upgrad_kernel(gramian, out, tasks, TASKS: constexpr):
    """UPGrad: the mean of the gradients, each projected onto the dual cone of all."""
    g, finite = _gramian(gramian, tasks, TASKS)
    c, length, inverse, nonzero = _correlations(g, gramian, _RIDGE, tasks, TASKS)
    total = tl.zeros([TASKS], tl.float64) + 1
    for i in range(tasks):
        if _at(tl.where(nonzero, 1, 0), i, TASKS) > 0:
            row = tl.sum(tl.where(tl.arange(0, TASKS)[:, None] == i, c, 0.0), 0)
            f = tl.where(nonzero, -row, 0.0)
            x, _ = _non_negative(c, f, nonzero, tasks, TASKS)
            total += x * _at(length, i, TASKS) * inverse
    _write(out, total / tasks, finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def cagrad_kernel(gramian, out, factor, tasks, TASKS: constexpr):
    """CAGrad: the largest mu such that all g_i.d >= mu for some d with |d - g_0| <= c |g_0|.

    At this mu, the shortest correction d - g_0 has length c |g_0|. `factor` is float64 [1]: c.
    """
    g, finite = _gramian(gramian, tasks, TASKS)
    share = 1 / tasks.to(tl.float64)
    along = tl.sum(g, 0) * share
    square = tl.sum(along, 0) * share
    radius = tl.load(factor) * tl.sqrt(tl.maximum(square, 0.0))
    c, length, inverse, nonzero = _correlations(g, gramian, _RIDGE, tasks, TASKS)
    present = tl.sum(tl.where(nonzero, 1, 0), 0)
    correction = tl.zeros([TASKS], tl.float64)
    # With non-finite numbers, the search would run through all iterations.
    if finite & (radius > 0) & (present > 0):
        ones = tl.where(nonzero, 1.0, 0.0).to(tl.float64)
        unit, _ = _non_negative(c, ones, nonzero, tasks, TASKS)
        stationary = (present < tasks) | (tl.sum(unit, 0) > _STATIONARY)
        low = tl.min(tl.where(nonzero, along, _INFINITY), 0)
        high = tl.min(tl.where(nonzero, along + radius * length, _INFINITY), 0)
        high = tl.where(stationary, tl.minimum(high, 0.0), high)
        mu = high
        turn = 0
        searching = True
        while searching:
            f = (mu - along) * inverse
            x, free = _non_negative(c, f, nonzero, tasks, TASKS)
            correction = x
            size = tl.sqrt(tl.maximum(tl.sum(f * x, 0), 0.0))
            longer = size > radius
            high = tl.where(longer, mu, high)
            low = tl.where(longer, low, mu)
            done = tl.abs(size - radius) <= 1e-12 * radius
            done = done | ((turn == 0) & (longer == 0))
            done = done | (high - low <= 1e-15 * (tl.abs(high) + tl.abs(low)))
            # With the same free entries, size^2 is quadratic in mu, with leading coefficient pp.
            free_p = tl.where(free > 0, inverse, 0.0)
            pp = tl.sum(_solve(_among(c, free, TASKS), free_p, tasks, TASKS) * free_p, 0)
            px = tl.sum(inverse * x, 0)
            missing = radius * radius - size * size
            slope = px + tl.sqrt(tl.maximum(px * px + pp * missing, 0.0))
            root = mu + missing / tl.where(slope > 0, slope, 1.0)
            usable = (slope > 0) & (root > low) & (root < high)
            mu = tl.where(usable, root, 0.5 * (low + high))
            turn += 1
            searching = (done == 0) & (turn < 64)
    equal = (tl.zeros([TASKS], tl.float64) + 1) / tasks
    weights = equal + correction * inverse
    _write(out, weights, finite, tasks, TASKS)


@triton.jit
def _nash_length(shares, decrement):
    """The length of a Newton step, `shares * v`, that roughly minimizes Nash-MTL's objective.

    Uses a damped Newton method in one dimension, which keeps every 1 - length * shares positive.
    """
    # step'C v and step'C step, because (C + diag(v^-2)) step = slope = C v - 1 / v.
    linear = decrement * decrement + tl.sum(shares, 0)
    quadratic = tl.maximum(decrement * decrement - tl.sum(shares * shares, 0), 0.0)
    full = decrement < _NASH_FULL
    length = tl.where(full, 1.0, 1 / (1 + decrement))
    searching = ~full
    turn = 0
    while searching:
        terms = shares / (1 - length * shares)
        slope = tl.sum(terms, 0) + length * quadratic - linear
        curvature = tl.sum(terms * terms, 0) + quadratic
        remainder = tl.abs(slope) / tl.sqrt(curvature)
        length -= slope / curvature * tl.where(remainder < _NASH_FULL, 1.0, 1 / (1 + remainder))
        turn += 1
        searching = (remainder >= _NASH_FULL) & (turn < 8)
    return length


@triton.jit
def _bargain(c, nonzero, finite, tasks, TASKS: constexpr):
    """Solves C v = 1 / v, i.e. minimizes 1/2 v'Cv - sum log v_i, by a damped Newton method."""
    v = tl.zeros([TASKS], tl.float64) + 1
    before = tl.max(v, 0)
    turn = 0
    searching = finite
    while searching:
        inverse_v = 1 / v
        slope = tl.where(nonzero, _times(c, v) - inverse_v, 0.0)
        curvature = tl.where(nonzero, inverse_v * inverse_v, 0.0)
        hessian = c + tl.where(_identity(TASKS), curvature[None, :], 0.0)
        step = _solve(hessian, slope, tasks, TASKS)
        decrement = tl.sqrt(tl.maximum(tl.sum(slope * step, 0), 0.0))
        v -= step * _nash_length(step * inverse_v, decrement)
        turn += 1
        # Full Newton steps roughly square the decrement. When it no longer halves, only rounding
        # error is left: stop.
        falls = (before >= _NASH_FULL) | (decrement < before / 2)
        searching = (decrement >= _NASH_STOP) & falls & (turn < 100)
        before = decrement
    return v


@triton.jit(do_not_specialize=["tasks"])
def nash_mtl_kernel(gramian, out, tasks, TASKS: constexpr):
    """NashMTL: the a > 0 with G a = 1 / a."""
    g, finite = _gramian(gramian, tasks, TASKS)
    c, _, inverse, nonzero = _correlations(g, gramian, _NASH_RIDGE, tasks, TASKS)
    v = _bargain(c, nonzero, finite, tasks, TASKS)
    _write(out, v * inverse, finite, tasks, TASKS)


@triton.jit
def _power(x, exponent):
    """x^exponent for positive x."""
    return tl.exp(exponent * tl.log(x))


@triton.jit
def _fair_length(shares, products, power, linear, quadratic, searching):
    """The length of a Newton step that roughly minimizes FairGrad's objective along the step.

    At the minimum, 0 = -linear + length * quadratic + sum products * shares * left^-power, where
    left = 1 - length * shares.
    """
    greatest = tl.max(shares, 0)
    low = linear * 0
    high = tl.where(greatest > 0, 1 / tl.where(greatest > 0, greatest, 1.0), _INFINITY)
    length = tl.where(searching, tl.minimum(0.9 * high, 1.0), 1.0)
    turn = 0
    while searching:
        left = 1 - length * shares
        terms = products * shares * _power(left, -power)
        slope = tl.sum(terms, 0) + length * quadratic - linear
        curvature = power * tl.sum(terms * shares / left, 0) + quadratic
        converged = tl.abs(slope) <= 0.1 * linear
        high = tl.where(slope > 0, length, high)
        low = tl.where(slope > 0, low, length)
        newton = length - slope / curvature
        within = (newton > low) & (newton < high)
        bisection = tl.where(high < _INFINITY, 0.5 * (low + high), 2 * low)
        length = tl.where(converged, length, tl.where(within, newton, bisection))
        turn += 1
        searching = (converged == 0) & (turn < 30)
    return length


@triton.jit(do_not_specialize=["tasks"])
def fair_grad_kernel(gramian, out, fairness, tasks, SOLVES_S: constexpr, TASKS: constexpr):
    """FairGrad: the w > 0 with G w = w^-p, p = 1 / alpha; the reference explains the method.

    `fairness` is float64 [1]: alpha. SOLVES_S is set if alpha > 1: the unknown is then s = C v.
    """
    g, finite = _gramian(gramian, tasks, TASKS)
    c, length, inverse, nonzero = _correlations(g, gramian, _NASH_RIDGE, tasks, TASKS)
    alpha = tl.load(fairness)
    v = _bargain(c, nonzero, finite, tasks, TASKS)
    s = 1 / v
    # Lengths are relative to the length with the greatest b.
    if SOLVES_S:
        power = alpha
        unit = tl.min(tl.where(nonzero, length, _INFINITY), 0)
        unit = tl.where(unit < _INFINITY, unit, 1.0)
        b = _power(tl.where(nonzero, length / unit, 1.0), 1 - alpha)
        begin = _power(s, 1 - power)
    else:
        power = 1 / alpha
        unit = tl.max(tl.where(nonzero, length, 0.0), 0)
        unit = tl.where(unit > 0, unit, 1.0)
        b = _power(tl.where(nonzero, length / unit, 1.0), power - 1)
        begin = _power(v, 1 - power)
    b = tl.maximum(b, _FAIR_LEAST)
    present = tl.sum(tl.where(nonzero, 1.0, 0.0), 0)
    mean = tl.sum(tl.where(nonzero, b * begin, 0.0), 0) / tl.maximum(present, 1.0)
    # Starts at the best multiple of NashMTL's solution.
    scale = _power(tl.where(present > 0, mean, 1.0), 1 / (1 + power))
    v *= scale
    s *= scale
    before = tl.max(b, 0) * 0 + _INFINITY
    turn = 0
    searching = finite & (present > 0)
    while searching:
        if SOLVES_S:
            target = b * _power(s, -power)
            diagonal = tl.minimum(s / (power * target), _FAIR_MOST)
            slope = (target - v) * diagonal
        else:
            target = b * _power(v, -power)
            diagonal = power * target / v
            slope = target - s
        slope = tl.where(nonzero, slope, 0.0)
        diagonal = tl.where(nonzero, diagonal, 0.0)
        hessian = c + tl.where(_identity(TASKS), diagonal[None, :], 0.0)
        step = _solve(hessian, slope, tasks, TASKS)
        image = _times(c, step)
        if SOLVES_S:
            shares = -image / s
            products = target * s
        else:
            shares = -step / v
            products = target * v
        products = tl.where(nonzero, products, 0.0)
        shares = tl.where(nonzero, shares, 0.0)
        largest = power * tl.max(tl.abs(shares), 0)
        linear = -tl.sum(s * step, 0)
        quadratic = tl.sum(image * step, 0)
        stride = _fair_length(shares, products, power, linear, quadratic, largest >= _FAIR_FULL)
        v += stride * step
        s += stride * image
        turn += 1
        falls = (before >= _FAIR_FULL) | (largest < before / 2)
        searching = (largest >= _FAIR_STOP) & falls & (turn < 100)
        before = largest
    if SOLVES_S:
        v = b * _power(s, -power)
    rescaling = _power(unit, (1 / alpha - 1) / (1 / alpha + 1))
    _write(out, tl.where(nonzero, rescaling * v * inverse, 0.0), finite, tasks, TASKS)


@triton.jit
def _equal_cosines(g, gramian, finite, tasks, TASKS: constexpr):
    """Returns y = C^+ 1, C y (all ones if C is regular), and the results of `_lengths`."""
    length, inverse, nonzero = _lengths(gramian, tasks, TASKS)
    c = tl.where(finite, g, 0.0) * inverse[:, None] * inverse[None, :]
    c = tl.where(_identity(TASKS), nonzero.to(tl.float64)[None, :], c)
    present = tl.sum(tl.where(nonzero, 1.0, 0.0), 0)
    values, vectors = _eigen(c, TASKS)
    significant = values > 8 * tl.max(values, 0) * present * _EPSILON
    inverse_values = tl.where(significant, 1 / tl.where(significant, values, 1.0), 0.0)
    y = _components_of_ones(vectors, inverse_values)
    cosines = _components_of_ones(vectors, tl.where(significant, 1.0, 0.0))
    return y, cosines, length, inverse, nonzero


@triton.jit(do_not_specialize=["tasks"])
def config_kernel(gramian, out, tasks, TASKS: constexpr):
    """ConFIG: the update has the same cosine to every gradient.

    The update's length is the sum of the gradients' components along it.
    """
    g, finite = _gramian(gramian, tasks, TASKS)
    y, cosines, length, inverse, nonzero = _equal_cosines(g, gramian, finite, tasks, TASKS)
    present = tl.sum(tl.where(nonzero, 1.0, 0.0), 0)
    exists = tl.sum(cosines * cosines, 0) > _NO_COSINE * present
    along = tl.sum(tl.where(nonzero, length * cosines, 0.0), 0)
    square = tl.sum(y * cosines, 0)
    scale = tl.where(exists, along / tl.where(exists, square, 1.0), 0.0)
    _write(out, scale * y * inverse, finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def imtl_g_kernel(gramian, out, tasks, TASKS: constexpr):
    """IMTL-G: the update has equal components along all gradients; the weights sum to one."""
    g, finite = _gramian(gramian, tasks, TASKS)
    y, _, length, inverse, nonzero = _equal_cosines(g, gramian, finite, tasks, TASKS)
    # In units of the first length, which cancel because the weights are scaled to sum to one.
    first = tl.argmax(tl.where(nonzero, 1, 0), 0)
    y *= _at(length, first, TASKS) * inverse
    total = tl.sum(y, 0)
    solvable = tl.abs(total) > _ZERO_SUM * tl.sum(tl.abs(y), 0)
    weights = tl.where(solvable, y / tl.where(solvable, total, 1.0), 0.0)
    _write(out, weights, finite, tasks, TASKS)


@triton.jit(do_not_specialize=["tasks"])
def aligned_mtl_kernel(gramian, out, tasks, SCALE: constexpr, TASKS: constexpr):
    """Aligned-MTL: the sum of the gradients after their principal components get equal lengths."""
    g, finite = _gramian(gramian, tasks, TASKS)
    values, vectors = _eigen(tl.where(finite, g, 0.0), TASKS)
    significant = values > tl.max(values, 0) * tasks * _EPSILON
    rank = tl.sum(tl.where(significant, 1, 0), 0)
    if SCALE == "min":
        length = tl.min(tl.where(significant, values, _INFINITY), 0)
    elif SCALE == "median":
        # The lower median.
        task = tl.arange(0, TASKS)
        equal_before = (values[None, :] == values[:, None]) & (task[None, :] < task[:, None])
        before = significant[None, :] & ((values[None, :] < values[:, None]) | equal_before)
        position = tl.sum(tl.where(before, 1, 0), 1)
        length = tl.sum(tl.where(significant & (position == (rank - 1) // 2), values, 0.0), 0)
    else:
        length = tl.sum(tl.where(significant, values, 0.0), 0) / tl.maximum(rank, 1)
    relative = tl.where(significant, length, 0.0) / tl.where(significant, values, 1.0)
    weights = tl.where(rank > 0, _components_of_ones(vectors, tl.sqrt(relative)), 1.0)
    _write(out, weights, finite, tasks, TASKS)
