"""The operators on a GPU, whatever its kernels are written in: checks, tables, room, launches.

Nothing waits for the device between the gradients and the update, and a step can be captured in a
CUDA graph after one that was not.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from struct import pack, unpack

import torch
from torch import Tensor

from cs_kernels.ops.gpu.device import keep, on_host, room_here, send, upload
from cs_kernels.ops.gpu.plan import (
    CallField,
    Counter,
    GradientCallField,
    Phase2Plan,
    Tiling,
    gradient_plan,
    layer_plan,
    phase2_plan,
)
from cs_kernels.ops.operands import (
    DTYPES,
    MOST_TASKS,
    ChannelLayout,
    Operands,
    as_channels,
    check_device,
    check_gramian,
    check_group_of,
    check_numel,
    check_scale,
    check_type,
    first_present,
)
from cs_kernels.ops.random import mixed, random_key


@dataclass(frozen=True)
class Phase2Launch:
    """What a Phase 2 kernel is given."""

    plan: Phase2Plan
    table: Tensor
    """int64 [tensors, CallField.GRADIENTS + tasks], addresses."""
    ticket: Tensor
    """int32, zero."""
    counters: Tensor
    """int32 [layers, counters], zeros."""
    energy: Tensor
    """float64 [rows of all layers], room."""
    gamma: Tensor
    """[K, O] of one layer after the other, flattened; anything where priorities are given."""
    variance: Tensor
    products: Tensor
    """float64 [SUM items of all layers, tasks, tasks], room."""
    factors: Tensor
    """float64 [layers, tasks], room."""
    tasks: int
    dtype: torch.dtype


@dataclass(frozen=True)
class GradientLaunch:
    """What every kernel over all gradients of a dtype is given."""

    items: Tensor
    empty_groups: tuple[int, ...]
    tensors: Tensor
    table: Tensor
    """int64 [tensors, GradientCallField.GRADIENTS + tasks], addresses."""
    extra: Tensor
    """Numbers that went to the device with the table."""
    tasks: int
    dtype: torch.dtype


VECTOR_BYTES = 16
"""Of one access."""


def _check_tasks(tasks: int) -> None:
    if not 1 <= tasks <= MOST_TASKS:
        raise ValueError(f"tasks must be in [1, {MOST_TASKS}], got {tasks}")


def aligned(addresses: Tensor) -> Tensor:
    """Whether 16 bytes can be read at once at all addresses of a row."""
    return (addresses % VECTOR_BYTES == 0).all(1)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """In force while kernels are launched there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class GpuOperators(ABC):
    """All operators, by way of the kernels of a subclass."""

    @abstractmethod
    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling:
        """Of Phase 2."""

    @abstractmethod
    def gradient_tile(self, tasks: int, dtype: torch.dtype, *, drop: bool) -> int:
        """Elements of a tile of the kernels over all gradients, or of sign dropping's."""

    def whole_vectors(self, layout: ChannelLayout, itemsize: int) -> bool:
        """Whether Phase 2 may read a tensor 16 bytes at a time, if its addresses allow."""
        del layout, itemsize
        return True

    @abstractmethod
    def launch_phase2(self, launch: Phase2Launch) -> None:
        """Writes updates and, with gamma, priorities."""

    @abstractmethod
    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """eq:eq1 of every channel of one layer."""

    @abstractmethod
    def launch_strengths(
        self,
        energy: Tensor,
        gamma: Tensor,
        variance: Tensor,
        epsilon: Tensor,
        strength: Tensor,
        *,
        normalize: bool,
    ) -> None:
        """eq:eq3 and eq:eq5 of one layer."""

    @abstractmethod
    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """eq:eq6 of one layer."""

    @abstractmethod
    def launch_gramian(
        self, launch: GradientLaunch, counters: Tensor, products: Tensor, out: Tensor
    ) -> None:
        """Counters int32 [groups], zeros; products float64 [items, tasks, tasks], room."""

    @abstractmethod
    def launch_combine(self, launch: GradientLaunch, weights: Tensor) -> None:
        """Weights [groups, tasks]."""

    @abstractmethod
    def launch_drop_signs(self, launch: GradientLaunch, leaks: Tensor, keys: Tensor) -> None:
        """Leaks float64 [tasks]; keys int64, one for each 2^32 places."""

    @abstractmethod
    def launch_solver(
        self, name: str, gramian: Tensor, weights: Tensor, *arguments: Tensor, **options: str
    ) -> None:
        """Gramians [count, K, K] to float64 weights [count, K]."""

    def _phase2(
        self,
        operands: Operands,
        priorities: Sequence[int],
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
        layers, tensors = len(priorities), len(operands.outputs)
        layouts = operands.layouts[:layers]
        layouts += [(1, 1, 1, size) for size in operands.sizes[layers:]]
        types = list(dict.fromkeys(operands.types))
        counters = len(types) + len(Counter) * layers
        width = CallField.GRADIENTS + tasks
        here = room_here(tensors * width - (-counters // 2), device).zero_()
        table = here[: tensors * width].view(tensors, width)
        table[:, CallField.UPDATE] = on_host(operands.addresses)
        table[:, CallField.GRADIENTS :] = on_host(operands.gradients).view(tensors, tasks)
        table[: len(weights), CallField.WEIGHT] = on_host([w.data_ptr() for w in weights])
        vectors = [
            self.whole_vectors(layout, DTYPES[code].itemsize)
            for layout, code in zip(layouts, operands.types, strict=True)
        ]
        table[:, CallField.ALIGNED] = aligned(table) & on_host(vectors)
        table[:layers, CallField.PRIORITY] = on_host(priorities)
        numbers = send(here, device)
        zeros = numbers[table.numel() :].view(torch.int32)
        for n, code in enumerate(types):
            dtype = DTYPES[code]
            plan = phase2_plan(
                tuple(layouts),
                tuple(operands.kernel_sizes[:layers]),
                None if eps is None else tuple(eps),
                tuple(other == code for other in operands.types),
                self.tiling(tasks, dtype),
                device,
            )
            keep(plan, device)
            # Each part begins at 16 bytes: Triton compiles kernels anew for one that does not.
            products = plan.rows + plan.rows % 2
            factors = products + plan.sum_items * tasks * tasks
            factors += factors % 2
            room = factors + layers * tasks
            scratch = torch.empty(room, dtype=torch.float64, device=device)
            energy = scratch[: plan.rows]
            if not len(plan.items):
                continue
            with on_device(device):
                self.launch_phase2(
                    Phase2Launch(
                        plan,
                        numbers,
                        zeros[n:],
                        zeros[len(types) :],
                        energy,
                        energy if gamma is None else gamma,
                        energy if variance is None else variance,
                        scratch[products:factors],
                        scratch[factors:],
                        tasks,
                        dtype,
                    )
                )
        operands.finish()

    def project_conflicts_(
        self,
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
        priorities = [priority.contiguous() for priority in priorities]
        self._phase2(operands, [priority.data_ptr() for priority in priorities])

    def phase2_update_(
        self,
        updates: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        weights: Sequence[Tensor],
        gamma: Tensor,
        running_var: Tensor,
        eps: Sequence[float],
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
        tasks: int,
    ) -> Tensor:
        """Reads N weights and K * N gradients once and writes N; conflicts again in cache."""
        operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
        weights = operands.weights(weights)
        channels = operands.check_statistics(weights, gamma, running_var, eps)
        priorities, addresses = operands.priorities(channels)
        self._phase2(
            operands, addresses, weights, gamma.contiguous(), running_var.contiguous(), eps
        )
        return priorities

    def connection_strength(
        self,
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
        for name, tensor in (("gamma", gamma), ("running_var", running_var)):
            check_type(tensor, name)
            check_device(tensor, weight.device, name)
            check_numel(tensor, len(eps) * channels, name)
        strength = weight.new_empty((len(eps), channels), dtype=torch.float64)
        energy = weight.new_zeros(channels, dtype=torch.float64)
        tiling = self.tiling(len(eps), weight.dtype)
        plan = layer_plan(layout, prod(weight.shape[2:]), tuple(eps), tiling, weight.device)
        keep(plan, weight.device)
        with on_device(weight.device):
            if weight.numel():
                vectors = self.whole_vectors(layout, weight.itemsize)
                vectors = vectors and weight.data_ptr() % VECTOR_BYTES == 0
                self.launch_energies(plan, weight, energy, vectors=vectors)
            if channels:
                self.launch_strengths(
                    energy,
                    gamma.contiguous(),
                    running_var.contiguous(),
                    plan.epsilon,
                    strength,
                    normalize=normalize,
                )
        return strength

    def task_priority(self, strength: Tensor) -> Tensor:
        """Reads K * O numbers, writes O."""
        tasks, channels = strength.shape
        _check_tasks(tasks)
        check_type(strength, "strength")
        priority = torch.empty(channels, dtype=torch.int64, device=strength.device)
        if channels:
            with on_device(strength.device):
                self.launch_priority(strength.contiguous(), priority)
        return priority

    def _gradient_launches(
        self,
        operands: Operands,
        group_of: Sequence[int],
        groups: int,
        extra: Sequence[int] = (),
        *,
        most_tiles: int = 1,
        drop: bool = False,
    ) -> Iterator[GradientLaunch]:
        tasks = operands.tasks
        _check_tasks(tasks)
        if not operands.outputs:
            return
        device = operands.outputs[0].device
        tensors = len(operands.outputs)
        width = GradientCallField.GRADIENTS + tasks
        here = room_here(tensors * width + len(extra), device)
        table = here[: tensors * width].view(tensors, width)
        table[:, GradientCallField.UPDATE] = on_host(operands.addresses)
        table[:, GradientCallField.GRADIENTS :] = on_host(operands.gradients).view(tensors, tasks)
        table[:, GradientCallField.ALIGNED] = 0
        table[:, GradientCallField.ALIGNED] = aligned(table)
        here[table.numel() :] = on_host(extra)
        numbers = send(here, device)
        for code in dict.fromkeys(operands.types):
            dtype = DTYPES[code]
            plan = gradient_plan(
                tuple(operands.sizes),
                tuple(group_of),
                groups,
                tuple(other == code for other in operands.types),
                self.gradient_tile(tasks, dtype, drop=drop),
                most_tiles,
                device,
            )
            keep(plan, device)
            with on_device(device):
                yield GradientLaunch(
                    plan.items,
                    plan.empty_groups,
                    plan.tensors,
                    numbers,
                    numbers[table.numel() :],
                    tasks,
                    dtype,
                )

    def gramian(
        self, grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
    ) -> Tensor:
        """Reads K * N gradients once."""
        likes = first_present(grads, len(group_of), tasks)
        operands = Operands(likes, grads, tasks, name="grads")
        check_group_of(group_of, groups)
        results: list[Tensor] = []
        zeros = [0] * -(-groups // 2)
        for launch in self._gradient_launches(
            operands, group_of, groups, zeros * len(DTYPES), most_tiles=16
        ):
            result = torch.empty(
                (groups, tasks, tasks), dtype=torch.float64, device=likes[0].device
            )
            for group in launch.empty_groups:
                result[group] = 0
            counters = launch.extra[len(results) * len(zeros) :].view(torch.int32)
            products = result.new_empty((len(launch.items), tasks, tasks))
            if len(launch.items):
                self.launch_gramian(launch, counters, products, result)
            results.append(result)
        return results[0] if len(results) == 1 else torch.stack(results).sum(0)

    def combine_(
        self,
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
        operands.check_here(weights, "weights")
        weights = weights.contiguous()
        for launch in self._gradient_launches(operands, group_of, groups):
            if len(launch.items):
                self.launch_combine(launch, weights)
        operands.finish()

    def drop_signs_(
        self,
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
        for launch in self._gradient_launches(operands, [0] * len(updates), 1, extra, drop=True):
            if len(launch.items):
                of_tasks = launch.extra[:tasks].view(torch.float64)
                self.launch_drop_signs(launch, of_tasks, launch.extra[tasks:])
        operands.finish()

    def _solve(self, name: str, gramian: Tensor, *arguments: Tensor, **options: str) -> Tensor:
        check_gramian(gramian, MOST_TASKS)
        weights = gramian.new_empty(gramian.shape[:-1], dtype=torch.float64)
        if weights.numel():
            with on_device(gramian.device):
                self.launch_solver(name, gramian.contiguous(), weights, *arguments, **options)
        return weights

    def pcgrad_weights(self, gramian: Tensor, seed: int, step: int) -> Tensor:
        """K - 1 projections of each of K tasks."""
        (key,) = unpack("q", pack("Q", random_key(seed, step)))
        return self._solve("pcgrad", gramian, upload([key], gramian.device))

    def cagrad_weights(self, gramian: Tensor, c: float) -> Tensor:
        """A few non-negative quadratic programs, K or more eliminations each."""
        (number,) = unpack("q", pack("d", c))
        factor = upload([number], gramian.device).view(torch.float64)
        return self._solve("cagrad", gramian, factor)

    def mgda_weights(self, gramian: Tensor) -> Tensor:
        """One non-negative quadratic program."""
        return self._solve("mgda", gramian)

    def aligned_mtl_weights(self, gramian: Tensor, scale: str) -> Tensor:
        """One eigendecomposition."""
        return self._solve("aligned_mtl", gramian, scale=check_scale(scale))

    def nash_mtl_weights(self, gramian: Tensor) -> Tensor:
        """At most 100 eliminations, usually below 10."""
        return self._solve("nash_mtl", gramian)

    def imtl_g_weights(self, gramian: Tensor) -> Tensor:
        """One eigendecomposition."""
        return self._solve("imtl_g", gramian)

    def upgrad_weights(self, gramian: Tensor) -> Tensor:
        """K non-negative quadratic programs."""
        return self._solve("upgrad", gramian)
