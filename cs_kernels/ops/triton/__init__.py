"""The operators through Triton, on a GPU; or through Triton's interpreter, on the CPU.

Nothing waits for the device between the gradients and the update, and a step can be captured in a
CUDA graph after one that was not.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from struct import pack, unpack
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from cs_kernels.ops.operands import (
    DTYPES,
    Operands,
    as_channels,
    check_gramian,
    check_group_of,
    check_numel,
    check_scale,
    check_type,
    first_present,
)
from cs_kernels.ops.random import mixed, random_key
from cs_kernels.ops.triton import gradients, phase2, solvers
from cs_kernels.ops.triton.device import keep_if_captured, upload
from cs_kernels.ops.triton.plan import (
    MOST_TASKS,
    Variant,
    aligned,
    gradient_plan,
    phase2_plan,
    power_of_two,
    vector_accesses,
)

_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def _options(warps: int, registers: int) -> dict[str, Any]:
    """Of a launch. A product that is added at once is not rounded: no result is worse for it."""
    options = {"num_warps": warps, "enable_fp_fusion": True}
    # AMD's compiler has no such bound.
    return options if torch.version.hip else {**options, "maxnreg": registers}


OPTIONS = _options(4, 168)
"""Registers for three programs on a multiprocessor."""


def phase2_options(tasks: int) -> dict[str, Any]:
    """Of a Phase 2 launch: more than 4 tasks' products need more registers."""
    return OPTIONS if tasks <= 4 else _options(4, 255)


def solver_options(tasks: int) -> dict[str, Any]:
    """Of a solver's launch: a thread holds 2 numbers of a matrix [tasks, tasks], 16 if K > 32."""
    warps = min(8, max(1, tasks * tasks // 64))
    # As many as there are: by itself the assembler spills some to leave room for other programs.
    return _options(warps, min(255, 65536 // (32 * warps)))


def _launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    if programs:
        on_gpu = device.type == "cuda"
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            kernel[(programs,)](*arguments, **{**OPTIONS, **constants})


def _check_tasks(tasks: int) -> None:
    if not 1 <= tasks <= MOST_TASKS:
        raise ValueError(f"tasks must be in [1, {MOST_TASKS}], got {tasks}")


def _constants(variant: Variant, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "TASKS": variant.tasks,
        "DTYPE": _DTYPES[dtype],
        "WIDE": tl.float64 if dtype.itemsize > 2 else tl.float32,
        "VECTOR": variant.vector,
    }


def phase2_constants(variant: Variant, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of Phase 2."""
    return {"NUMBER": variant.segments, **_constants(variant, dtype)}


def gradient_constants(variant: Variant, dtype: torch.dtype, parts: int = 1) -> dict[str, Any]:
    """The compile-time arguments of Gramian and weighted sum, on a part of the elements."""
    return {"ELEMENTS": variant.elements // parts, **_constants(variant, dtype)}


DROP_PARTS = 4
"""Sign dropping holds five sums, so its tiles are smaller."""


def _phase2(
    operands: Operands,
    priorities: Sequence[Tensor],
    weights: Sequence[Tensor] = (),
    gamma: Tensor | None = None,
    variance: Tensor | None = None,
    eps: Sequence[float] | None = None,
) -> None:
    tasks = operands.tasks
    _check_tasks(tasks)
    if not operands.outputs:
        return
    device = operands.outputs[0].device
    layers = len(priorities)
    layouts = operands.layouts[:layers]
    layouts += [(1, 1, 1, output.numel()) for output in operands.outputs[layers:]]
    rows: list[int] = []
    for t, (output, layout) in enumerate(zip(operands.outputs, layouts, strict=True)):
        grads = operands.gradients[t * tasks : (t + 1) * tasks]
        weight = weights[t].data_ptr() if t < len(weights) else 0
        priority = priorities[t].data_ptr() if t < layers else 0
        addresses = [output.data_ptr(), weight, *grads]
        vectors = vector_accesses(layout, output.element_size(), addresses)
        rows += [output.data_ptr(), weight, priority, vectors, *grads]
    dtypes = list(dict.fromkeys(output.dtype for output in operands.outputs))
    counters = len(dtypes) + phase2.LAYER_COUNTERS.value * layers
    numbers = upload(rows + [0] * -(-counters // 2), device)
    zeros = numbers[len(rows) :].view(torch.int32)
    for n, dtype in enumerate(dtypes):
        variant = Variant.of(tasks, dtype)
        plan = phase2_plan(
            tuple(layouts),
            tuple(prod(output.shape[2:]) for output in operands.outputs[:layers]),
            None if eps is None else tuple(eps),
            tuple(output.dtype is dtype for output in operands.outputs),
            tasks,
            variant,
            device,
        )
        keep_if_captured(plan, device)
        rows_end = plan.rows
        products_end = rows_end + plan.sum_items * tasks * tasks
        room = products_end + layers * tasks
        scratch = torch.empty(room, dtype=torch.float64, device=device)
        energy = scratch[:rows_end]
        _launch(
            phase2.phase2_kernel,
            len(plan.items),
            device,
            plan.items,
            plan.tensors,
            numbers,
            zeros[n:],
            zeros[len(dtypes) :],
            energy,
            energy if gamma is None else gamma,
            energy if variance is None else variance,
            plan.epsilon,
            scratch[rows_end:products_end],
            scratch[products_end:],
            tasks,
            **phase2_constants(variant, dtype),
            **phase2_options(variant.tasks),
        )
    operands.finish()


def project_conflicts_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N; rows in conflict are visited again in cache."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    operands.check_priorities(priorities)
    _phase2(operands, [priority.contiguous() for priority in priorities])


def phase2_update_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> list[Tensor]:
    """Reads N weights and K * N gradients once and writes N; conflicts again in cache."""
    operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
    weights = operands.weights(weights)
    channels = operands.check_statistics(weights, gamma, running_var, eps)
    room = torch.empty(sum(channels), dtype=torch.int64, device=gamma.device)
    priorities = list(torch.split(room, channels))
    for weight, priority in zip(weights, priorities, strict=True):
        if not weight.numel():  # No strength and no address: the first task's.
            priority.zero_()
    _phase2(operands, priorities, weights, gamma.contiguous(), running_var.contiguous(), eps)
    return priorities


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """Reads the weight once."""
    check_type(weight, "weight")
    _check_tasks(len(eps))
    weight, layout = as_channels(weight, out_channel_dim, groups)
    channels = layout[0] * layout[2]
    check_numel(gamma, len(eps) * channels, "gamma")
    check_numel(running_var, len(eps) * channels, "running_var")
    strength = weight.new_empty((len(eps), channels), dtype=torch.float64)
    energy = weight.new_zeros(channels, dtype=torch.float64)
    variant = Variant.of(len(eps), weight.dtype)
    sizes = (prod(weight.shape[2:]),)
    plan = phase2_plan((layout,), sizes, tuple(eps), (True,), len(eps), variant, weight.device)
    if weight.numel():
        vectors = vector_accesses(layout, weight.element_size(), [weight.data_ptr()])
        _launch(
            phase2.energy_kernel,
            -(-channels // phase2.ENERGY_ROWS.value),
            weight.device,
            plan.tensors,
            weight,
            energy,
            VECTOR=variant.vector if vectors else 1,
        )
    _launch(
        phase2.strength_kernel,
        min(channels, 1),
        weight.device,
        energy,
        gamma.contiguous(),
        running_var.contiguous(),
        plan.epsilon,
        strength,
        channels,
        len(eps),
        NORMALIZE=normalize,
        TASKS=variant.tasks,
    )
    return strength


def task_priority(strength: Tensor) -> Tensor:
    """Reads K * O numbers, writes O."""
    tasks, channels = strength.shape
    _check_tasks(tasks)
    priority = torch.empty(channels, dtype=torch.int64, device=strength.device)
    check_type(strength, "strength")
    rounded = Variant.of(tasks, strength.dtype).tasks
    _launch(
        phase2.priority_kernel,
        -(-channels * rounded // 512),
        strength.device,
        strength.contiguous(),
        priority,
        channels,
        tasks,
        TASKS=rounded,
    )
    return priority


@dataclass(frozen=True)
class _GradientLaunch:
    """What every kernel over the gradients of a dtype is given."""

    items: Tensor
    empty_groups: tuple[int, ...]
    tensors: Tensor
    table: Tensor
    extra: Tensor
    """Numbers that went to the device with the table."""
    tasks: int
    constants: dict[str, Any]

    def run(self, kernel: Any, *arguments: Tensor) -> None:
        """With the arguments of its own."""
        common = self.items, self.tensors, self.table
        device = self.items.device
        _launch(kernel, len(self.items), device, *common, *arguments, self.tasks, **self.constants)


def _gradient_launches(
    operands: Operands,
    group_of: Sequence[int],
    groups: int,
    extra: Sequence[int] = (),
    *,
    most_tiles: int = 1,
    parts: int = 1,
) -> Iterator[_GradientLaunch]:
    tasks = operands.tasks
    _check_tasks(tasks)
    if not operands.outputs:
        return
    device = operands.outputs[0].device
    rows: list[int] = []
    for t, output in enumerate(operands.outputs):
        grads = operands.gradients[t * tasks : (t + 1) * tasks]
        rows += [output.data_ptr(), aligned([output.data_ptr(), *grads]), *grads]
    numbers = upload([*rows, *extra], device)
    for dtype in dict.fromkeys(output.dtype for output in operands.outputs):
        variant = Variant.of(tasks, dtype)
        plan = gradient_plan(
            tuple(output.numel() for output in operands.outputs),
            tuple(group_of),
            groups,
            tuple(output.dtype is dtype for output in operands.outputs),
            variant.elements // parts,
            most_tiles,
            device,
        )
        keep_if_captured(plan, device)
        yield _GradientLaunch(
            plan.items,
            plan.empty_groups,
            plan.tensors,
            numbers,
            numbers[len(rows) :],
            tasks,
            gradient_constants(variant, dtype, parts),
        )


def gramian(
    grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
) -> Tensor:
    """Reads K * N gradients once."""
    likes = first_present(grads, len(group_of), tasks)
    operands = Operands(likes, grads, tasks, name="grads")
    check_group_of(group_of, groups)
    results: list[Tensor] = []
    zeros = [0] * -(-groups // 2)
    for launch in _gradient_launches(
        operands, group_of, groups, zeros * len(DTYPES), most_tiles=16
    ):
        result = torch.empty((groups, tasks, tasks), dtype=torch.float64, device=likes[0].device)
        for group in launch.empty_groups:
            result[group] = 0
        counters = launch.extra[len(results) * len(zeros) :].view(torch.int32)
        products = result.new_empty((len(launch.items), tasks, tasks))
        launch.run(gradients.gramian_kernel, counters, products, result)
        results.append(result)
    return results[0] if len(results) == 1 else torch.stack(results).sum(0)


def combine_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Tensor,
    group_of: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    operands = Operands(updates, grads, tasks)
    groups = len(weights)
    check_group_of(group_of, groups)
    check_numel(weights, groups * tasks, "weights")
    weights = weights.contiguous()
    for launch in _gradient_launches(operands, group_of, groups):
        launch.run(gradients.combine_kernel, weights)
    operands.finish()


def drop_signs_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaks: Sequence[float],
    seed: int,
    step: int,
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    operands = Operands(updates, grads, tasks)
    key = random_key(seed, step)
    ranges = (sum(output.numel() for output in operands.outputs) >> 32) + 1
    keys = [mixed((key + high) % (1 << 64)) for high in range(ranges)]
    extra = unpack(f"{tasks + ranges}q", pack(f"{tasks}d{ranges}Q", *leaks, *keys))
    for launch in _gradient_launches(operands, [0] * len(updates), 1, extra, parts=DROP_PARTS):
        launch.run(
            gradients.drop_signs_kernel,
            launch.extra[:tasks].view(torch.float64),
            launch.extra[tasks:],
        )
    operands.finish()


def _solve(kernel: Any, gramian: Tensor, *arguments: Tensor, **constants: Any) -> Tensor:
    check_gramian(gramian, MOST_TASKS)
    tasks = gramian.shape[-1]
    weights = gramian.new_empty(gramian.shape[:-1], dtype=torch.float64)
    rounded = max(2, power_of_two(tasks))
    _launch(
        kernel,
        weights.numel() // tasks,
        gramian.device,
        gramian.contiguous(),
        weights,
        *arguments,
        tasks,
        TASKS=rounded,
        **solver_options(rounded),
        **constants,
    )
    return weights


def pcgrad_weights(gramian: Tensor, seed: int, step: int) -> Tensor:
    """All solvers are one program a Gramian; this one K - 1 projections of K tasks at once."""
    (key,) = unpack("q", pack("Q", random_key(seed, step)))
    return _solve(solvers.pcgrad_kernel, gramian, upload([key], gramian.device))


def cagrad_weights(gramian: Tensor, c: float) -> Tensor:
    """A few non-negative quadratic programs, K or more eliminations each."""
    (number,) = unpack("q", pack("d", c))
    factor = upload([number], gramian.device).view(torch.float64)
    return _solve(solvers.cagrad_kernel, gramian, factor)


def mgda_weights(gramian: Tensor) -> Tensor:
    """One non-negative quadratic program."""
    return _solve(solvers.mgda_kernel, gramian)


def aligned_mtl_weights(gramian: Tensor, scale: str) -> Tensor:
    """One eigendecomposition."""
    return _solve(solvers.aligned_mtl_kernel, gramian, SCALE=check_scale(scale))


def nash_mtl_weights(gramian: Tensor) -> Tensor:
    """At most 100 eliminations, usually below 10."""
    return _solve(solvers.nash_mtl_kernel, gramian)


def imtl_g_weights(gramian: Tensor) -> Tensor:
    """One eigendecomposition."""
    return _solve(solvers.imtl_g_kernel, gramian)


def upgrad_weights(gramian: Tensor) -> Tensor:
    """K non-negative quadratic programs."""
    return _solve(solvers.upgrad_kernel, gramian)
