"""Phase 2, connection strength and priority on a GPU: address tables and launches."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Ints
from cs_kernels.ops.checks import DTYPES, check_strength, check_tasks
from cs_kernels.ops.compiled.phase2 import Factors, Phase2Operators
from cs_kernels.ops.gpu.device import VECTOR_BYTES, host_buffer, keep, on_device, on_host, send
from cs_kernels.ops.gpu.phase2_plan import (
    CallField,
    Counter,
    ItemKind,
    Phase2Plan,
    Tiling,
    layer_epsilon,
    layer_plan,
    phase2_plan,
)
from cs_kernels.ops.operands import ChannelLayout, Operands, Shapes, dense


@dataclass(frozen=True)
class Phase2Launch:
    """The arguments of a Phase 2 kernel."""

    plan: Phase2Plan
    table: Tensor
    """int64 [tensors, CallField.GRADIENTS + tasks], addresses."""
    ticket: Tensor
    """int32, initially zero."""
    counters: Tensor
    """int32 [layers, counters], initially zero."""
    energy: Tensor
    """float64 [rows of all layers], workspace."""
    gamma: Tensor
    """[K, O] per layer, flattened and concatenated; unused if priorities are given."""
    variance: Tensor
    item_products: Tensor
    """float64 [SUM items of all layers, tasks, tasks], workspace."""
    products: Tensor
    """float64 [layers, tasks, tasks]: d_ij of the channel groups; output."""
    coefficients: Tensor
    """float64 [layers, tasks]: a_i; input if there are only PROJECT items, else output."""
    tasks: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StrengthLaunch:
    """The arguments of the kernel that computes the strengths of one layer."""

    energy: Tensor
    gamma: Tensor
    variance: Tensor
    epsilon: Tensor
    strength: Tensor
    """float64 [tasks, rows]; output."""
    normalize: bool


@lru_cache(maxsize=64)
def _plan(
    shapes: Shapes,
    code: int,
    layers: int,
    eps: tuple[float, ...] | None,
    tiling: Tiling,
    device: torch.device,
    kinds: tuple[ItemKind, ...],
) -> Phase2Plan:
    """The plan for the operands of one dtype; the first tensors are layers."""
    native = shapes.native
    layouts = native.layouts[:layers] + [(1, 1, 1, size) for size in native.sizes[layers:]]
    kernel_sizes = tuple(native.kernel_sizes[:layers])
    mask = tuple(other == code for other in native.types)
    return phase2_plan(tuple(layouts), kernel_sizes, eps, mask, tiling, device, kinds)


class GpuPhase2(Phase2Operators):
    """Subclasses define the tiling and the launches."""

    @abstractmethod
    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling: ...

    whole_rows: ClassVar[bool] = False
    """Whether 16-byte accesses need rows whose length is a multiple of 16 bytes."""

    @abstractmethod
    def launch_phase2(self, launch: Phase2Launch) -> None:
        """Writes the updates and, if the plan has ENERGY items, the priorities."""

    @abstractmethod
    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """Computes Eq. (4) for every channel of one layer."""

    @abstractmethod
    def launch_strengths(self, launch: StrengthLaunch) -> None:
        """Computes Eq. (6), and Eq. (7) if `normalize`, for one layer."""

    @abstractmethod
    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """Computes Eq. (10) for one layer."""

    def _run(
        self,
        operands: Operands,
        priorities: Ints,
        factors: Factors | None = None,
        kinds: tuple[ItemKind, ...] = tuple(ItemKind),
        products: Tensor | None = None,
        coefficients: Tensor | None = None,
    ) -> None:
        """Launches the items of these kinds, once per dtype.

        Args:
            operands: Updates and gradients.
            priorities: Addresses of the first tensors' priorities, which are written if there are
                factors, and otherwise read.
            factors: The operands of connection strength, or None if priorities are given.
            kinds: The kinds of items to launch.
            products: d_ij [layers, K, K]; output.
            coefficients: a_i [layers, K]; input for PROJECT items without SUM items.

        """
        tasks, native = operands.tasks, operands.native
        check_tasks(tasks)
        if not operands.outputs:
            return
        weights, gamma, variance, eps = factors or ((), None, None, None)
        device = operands.outputs[0].device
        layers, tensors = len(priorities), len(operands.outputs)
        types = list(dict.fromkeys(native.types))
        counters = len(types) + len(Counter) * layers
        width = CallField.GRADIENTS + tasks
        buffer = host_buffer(tensors * width - (-counters // 2), device).zero_()
        table = buffer[: tensors * width].view(tensors, width)
        table[: len(weights), CallField.WEIGHT] = on_host([w.data_ptr() for w in weights])
        native.write_table(buffer.data_ptr(), width, CallField.ALIGNED, layers, self.whole_rows)
        table[:layers, CallField.PRIORITY] = on_host(priorities)
        if coefficients is not None:  # PROJECT items need not wait.
            flags = buffer[table.numel() :].view(torch.int32)[len(types) : counters]
            flags.view(layers, len(Counter))[:, Counter.COEFFICIENTS_READY] = 1
        numbers = send(buffer, device)
        zeros = numbers[table.numel() :].view(torch.int32)
        shapes = operands.shapes
        for n, code in enumerate(types):
            dtype = DTYPES[code]
            tiling = self.tiling(tasks, dtype)
            plan = _plan(
                shapes, code, layers, None if eps is None else tuple(eps), tiling, device, kinds
            )
            keep(plan, device)
            # Workspaces are aligned to 16 bytes: Triton compiles a separate kernel for unaligned
            # ones.
            sizes = (
                plan.rows,
                plan.sum_items * tasks**2,
                layers * tasks**2,
                layers * tasks,
            )
            padded = [size + size % 2 for size in sizes]
            memory = torch.empty(sum(padded), dtype=torch.float64, device=device)
            energy, item_products, own_products, own_coefficients = torch.split(memory, padded)
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
                        item_products,
                        own_products if products is None else products,
                        own_coefficients if coefficients is None else coefficients,
                        tasks,
                        dtype,
                    )
                )

    def run_phase2(
        self,
        operands: Operands,
        priorities: Ints,
        factors: Factors | None,
        products: Tensor | None = None,
    ) -> None:
        if products is not None and 0 in operands.native.sizes[: len(priorities)]:
            products.zero_()  # Kernels skip a layer without elements.
        self._run(operands, priorities, factors, products=products)

    def run_products(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        """Launches only the SUM items."""
        self._run(operands, priorities, kinds=(ItemKind.SUM,), products=products)

    def run_apply(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        """Derives a_i from d_ij and launches only the PROJECT items."""
        d_ii = products.diagonal(dim1=1, dim2=2)
        coefficients = products.new_zeros(d_ii.shape)
        for j in range(operands.tasks):
            d_ij = products[:, :, j]
            coefficients -= torch.where((d_ij < 0) & (d_ii > 0), d_ij / d_ii + 0 * d_ii, 0.0)
        self._run(operands, priorities, kinds=(ItemKind.PROJECT,), coefficients=coefficients)

    def energies(self, weight: Tensor, layout: ChannelLayout, window: int) -> Tensor:
        energy = weight.new_zeros(layout[0] * layout[2], dtype=torch.float64)
        if weight.numel():
            plan = layer_plan(layout, window, self.tiling(1, weight.dtype), weight.device)
            keep(plan, weight.device)
            _, outer, _, inner = layout
            whole = outer == 1 and (inner * weight.itemsize) % VECTOR_BYTES == 0
            vectors = (whole or not self.whole_rows) and weight.data_ptr() % VECTOR_BYTES == 0
            with on_device(weight.device):
                self.launch_energies(plan, weight, energy, vectors=vectors)
        return energy

    def strengths(
        self, energy: Tensor, gamma: Tensor, variance: Tensor, eps: Floats, *, normalize: bool
    ) -> Tensor:
        check_tasks(len(eps))
        strength = energy.new_empty((len(eps), len(energy)), dtype=torch.float64)
        if len(energy):
            epsilon = layer_epsilon(tuple(eps), energy.device)
            keep(epsilon, energy.device)
            gamma, variance = dense(gamma), dense(variance)
            with on_device(energy.device):
                self.launch_strengths(
                    StrengthLaunch(
                        energy, gamma, variance, epsilon.on_device[0], strength, normalize
                    )
                )
        return strength

    def task_priority(self, strength: Tensor) -> Tensor:
        check_strength(strength)
        tasks, channels = strength.shape
        check_tasks(tasks)
        priority = torch.empty(channels, dtype=torch.int64, device=strength.device)
        if channels:
            with on_device(strength.device):
                self.launch_priority(dense(strength), priority)
        return priority
