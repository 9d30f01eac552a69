"""Phase 2, connection strength and priority on a GPU: argument checks, address tables, launches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from cs_kernels.ops.gpu.device import (
    VECTOR_BYTES,
    aligned,
    host_buffer,
    keep,
    on_device,
    on_host,
    send,
)
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
from cs_kernels.ops.operands import (
    DTYPES,
    ChannelLayout,
    Operands,
    as_channels,
    check_device,
    check_energies,
    check_factors,
    check_tasks,
    check_type,
)


@dataclass(frozen=True)
class Phase2Launch:
    """The arguments of a Phase 2 kernel."""

    plan: Phase2Plan
    table: Tensor
    """int64 [tensors, CallField.GRADIENTS + tasks], addresses."""
    ticket: Tensor
    """int32, zero."""
    counters: Tensor
    """int32 [layers, counters], zeros."""
    energy: Tensor
    """float64 [rows of all layers], workspace."""
    gamma: Tensor
    """[K, O] of one layer after the other, flattened; unused if priorities are given."""
    variance: Tensor
    item_products: Tensor
    """float64 [SUM items of all layers, tasks, tasks], workspace."""
    products: Tensor
    """float64 [layers, tasks, tasks]: d_ij of the channel groups; written."""
    coefficients: Tensor
    """float64 [layers, tasks]: a_i; input of a launch of PROJECT items alone, else written."""
    tasks: int
    dtype: torch.dtype


class Phase2Operators(ABC):
    """Phase 2, connection strength and priority."""

    @abstractmethod
    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling:
        """The tiling of Phase 2."""

    def whole_vectors(self, layout: ChannelLayout, itemsize: int) -> bool:
        """Whether Phase 2 may read a tensor 16 bytes at a time, if its addresses allow."""
        del layout, itemsize
        return True

    @abstractmethod
    def launch_phase2(self, launch: Phase2Launch) -> None:
        """Writes the updates and, in ENERGY items, the priorities."""

    @abstractmethod
    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """Eq. (4) of every channel of one layer."""

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
        """Eq. (6), and Eq. (7) where `normalize`, of one layer."""

    @abstractmethod
    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """Eq. (10) of one layer."""

    def _phase2(
        self,
        operands: Operands,
        priorities: Sequence[int],
        weights: Sequence[Tensor] = (),
        gamma: Tensor | None = None,
        variance: Tensor | None = None,
        eps: Sequence[float] | None = None,
        kinds: tuple[ItemKind, ...] = tuple(ItemKind),
        products: Tensor | None = None,
        coefficients: Tensor | None = None,
    ) -> None:
        """Launches the items of some kinds, once for each dtype.

        Args:
            operands: Updates and gradients.
            priorities: Addresses, for the first tensors.
            weights: Weights of the first tensors, if priorities are computed.
            gamma: [K, O] of one layer after the other, flattened.
            variance: Likewise.
            eps: [layers, K].
            kinds: The kinds of items to launch.
            products: d_ij [layers, K, K], written.
            coefficients: a_i [layers, K], for PROJECT items alone.

        """
        tasks, native = operands.tasks, operands.native
        check_tasks(tasks)
        if not operands.outputs:
            return
        device = operands.outputs[0].device
        layers, tensors = len(priorities), len(operands.outputs)
        layouts = native.layouts[:layers]
        layouts += [(1, 1, 1, size) for size in native.sizes[layers:]]
        codes = native.types
        types = list(dict.fromkeys(codes))
        counters = len(types) + len(Counter) * layers
        width = CallField.GRADIENTS + tasks
        buffer = host_buffer(tensors * width - (-counters // 2), device).zero_()
        table = buffer[: tensors * width].view(tensors, width)
        table[:, CallField.UPDATE] = on_host(native.addresses)
        table[:, CallField.GRADIENTS :] = on_host(native.gradients).view(tensors, tasks)
        table[: len(weights), CallField.WEIGHT] = on_host([w.data_ptr() for w in weights])
        vectors = [
            self.whole_vectors(layout, DTYPES[code].itemsize)
            for layout, code in zip(layouts, codes, strict=True)
        ]
        table[:, CallField.ALIGNED] = aligned(table) & on_host(vectors)
        table[:layers, CallField.PRIORITY] = on_host(priorities)
        if coefficients is not None:  # PROJECT items do not wait.
            flags = buffer[table.numel() :].view(torch.int32)[len(types) : counters]
            flags.view(layers, len(Counter))[:, Counter.COEFFICIENTS_READY] = 1
        numbers = send(buffer, device)
        zeros = numbers[table.numel() :].view(torch.int32)
        for n, code in enumerate(types):
            dtype = DTYPES[code]
            plan = phase2_plan(
                tuple(layouts),
                tuple(native.kernel_sizes[:layers]),
                None if eps is None else tuple(eps),
                tuple(other == code for other in codes),
                self.tiling(tasks, dtype),
                device,
                kinds,
            )
            keep(plan, device)
            # Each part begins at 16 bytes: Triton compiles kernels anew for one that does not.
            sizes = (plan.rows, plan.sum_items * tasks**2, layers * tasks**2, layers * tasks)
            parts = [size + size % 2 for size in sizes]
            memory = torch.empty(sum(parts), dtype=torch.float64, device=device)
            scratch = torch.split(memory, parts)
            energy = scratch[0]
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
                        scratch[1],
                        scratch[2] if products is None else products,
                        scratch[3] if coefficients is None else coefficients,
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
        _kept, addresses = operands.priority_addresses(priorities)
        self._phase2(operands, addresses)

    def phase2_products_(
        self,
        updates: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        priorities: Sequence[Tensor],
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
        tasks: int,
    ) -> Tensor:
        """Reads K * N gradients once and writes N: the SUM items alone."""
        operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
        _kept, addresses = operands.priority_addresses(priorities)
        device = updates[0].device if updates else None
        products = torch.zeros((len(priorities), tasks, tasks), dtype=torch.float64, device=device)
        self._phase2(operands, addresses, kinds=(ItemKind.SUM,), products=products)
        return products

    def phase2_apply_(
        self,
        updates: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        priorities: Sequence[Tensor],
        products: Tensor,
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
        tasks: int,
    ) -> None:
        """Rows of channel groups in conflict: two reads and a write. The PROJECT items alone."""
        operands = Operands(updates, grads, tasks, out_channel_dims=out_channel_dims, groups=groups)
        operands.read_outputs()
        _kept, addresses = operands.priority_addresses(priorities)
        operands.check_products(products, len(priorities))
        own = products.diagonal(dim1=1, dim2=2)
        coefficients = products.new_zeros(own.shape)
        for j in range(tasks):
            d_j = products[:, :, j]
            coefficients -= torch.where((d_j < 0) & (own > 0), d_j / own, 0.0)
        self._phase2(operands, addresses, kinds=(ItemKind.PROJECT,), coefficients=coefficients)

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
        priorities, addresses = operands.new_priorities(channels)
        self._phase2(
            operands, addresses, weights, gamma.contiguous(), running_var.contiguous(), eps
        )
        return priorities

    def _energy(self, weight: Tensor, layout: ChannelLayout, window: int) -> Tensor:
        """Float64 [O] of one layer: sums of squares, divided by `window`."""
        energy = weight.new_zeros(layout[0] * layout[2], dtype=torch.float64)
        if weight.numel():
            plan = layer_plan(layout, window, self.tiling(1, weight.dtype), weight.device)
            keep(plan, weight.device)
            vectors = self.whole_vectors(layout, weight.itemsize)
            vectors = vectors and weight.data_ptr() % VECTOR_BYTES == 0
            with on_device(weight.device):
                self.launch_energies(plan, weight, energy, vectors=vectors)
        return energy

    def _strength(
        self,
        energy: Tensor,
        gamma: Tensor,
        running_var: Tensor,
        eps: Sequence[float],
        *,
        normalize: bool,
    ) -> Tensor:
        """Float64 [K, O] of one layer."""
        strength = energy.new_empty((len(eps), len(energy)), dtype=torch.float64)
        if len(energy):
            epsilon = layer_epsilon(tuple(eps), energy.device)
            keep(epsilon, energy.device)
            with on_device(energy.device):
                self.launch_strengths(
                    energy,
                    gamma.contiguous(),
                    running_var.contiguous(),
                    epsilon.on_device[0],
                    strength,
                    normalize=normalize,
                )
        return strength

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
        check_tasks(len(eps))
        weight, layout = as_channels(weight, out_channel_dim, groups)
        check_factors(gamma, running_var, len(eps) * layout[0] * layout[2], weight.device)
        energy = self._energy(weight, layout, prod(weight.shape[2:]))
        return self._strength(energy, gamma, running_var, eps, normalize=normalize)

    def channel_energies(
        self, weights: Sequence[Tensor], out_channel_dims: Sequence[int], groups: Sequence[int]
    ) -> Tensor:
        """Reads the weights once; one launch a layer."""
        for weight in weights:
            check_type(weight, "weights")
            check_device(weight, weights[0].device, "weights")
        layers = zip(weights, out_channel_dims, groups, strict=True)
        return torch.cat([self._energy(*as_channels(*layer), 1) for layer in layers])

    def energy_priority(
        self,
        energies: Tensor,
        gamma: Tensor,
        running_var: Tensor,
        eps: Sequence[float],
        channels: Sequence[int],
    ) -> Tensor:
        """Reads (2 K + 1) O numbers, writes O; two launches a layer."""
        tasks = check_energies(energies, gamma, running_var, eps, channels)
        gamma, running_var = gamma.flatten(), running_var.flatten()
        priorities = [energies.new_empty(0, dtype=torch.int64)]
        first = 0
        for layer, rows in enumerate(channels):
            of_layer = slice(tasks * first, tasks * (first + rows))
            strength = self._strength(
                energies[first : first + rows].double(),
                gamma[of_layer],
                running_var[of_layer],
                eps[layer * tasks : (layer + 1) * tasks],
                normalize=True,
            )
            priorities.append(self.task_priority(strength))
            first += rows
        return torch.cat(priorities)

    def task_priority(self, strength: Tensor) -> Tensor:
        """Reads K * O numbers, writes O."""
        tasks, channels = strength.shape
        check_tasks(tasks)
        check_type(strength, "strength")
        priority = torch.empty(channels, dtype=torch.int64, device=strength.device)
        if channels:
            with on_device(strength.device):
                self.launch_priority(strength.contiguous(), priority)
        return priority
