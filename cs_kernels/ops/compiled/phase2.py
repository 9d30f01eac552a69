"""Connection strength, priority and Phase 2: argument checks and kernel operands."""

from abc import ABC, abstractmethod
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
from cs_kernels.ops.checks import (
    check_energies,
    check_layer,
    check_products,
    check_statistics,
    check_weights,
)
from cs_kernels.ops.operands import ChannelLayout, Operands, as_channels, dense


class Factors(NamedTuple):
    """The operands of connection strength for the layers, which are the first tensors."""

    weights: Tensors
    gamma: Tensor
    """[K, O] per layer, flattened and concatenated; `variance` likewise."""
    variance: Tensor
    eps: Floats


class Phase2Operators(ABC):
    @abstractmethod
    def run_phase2(
        self,
        operands: Operands,
        priorities: Ints,
        factors: Factors | None,
        products: Tensor | None = None,
    ) -> None:
        """Writes the outputs and the products; with factors, writes the priorities first."""

    @abstractmethod
    def run_products(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        """Writes the plain sums and the products, float64 [layers, K, K]."""

    @abstractmethod
    def run_apply(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        """Adds a_i * G_i to the outputs."""

    @abstractmethod
    def energies(self, weight: Tensor, layout: ChannelLayout, window: int) -> Tensor:
        """Returns one layer's sums of squares / `window`, float64 [O]; reads the weight once."""

    @abstractmethod
    def strengths(
        self, energy: Tensor, gamma: Tensor, variance: Tensor, eps: Floats, *, normalize: bool
    ) -> Tensor:
        """Returns one layer's strengths, float64 [K, O]; reads (2 K + 1) O numbers."""

    @abstractmethod
    def task_priority(self, strength: Tensor) -> Tensor:
        """Reads K * O numbers and writes O."""

    def project_conflicts_(
        self,
        updates: Tensors,
        grads: Grads,
        priorities: Tensors,
        dims: Ints,
        groups: Ints,
        tasks: int,
    ) -> None:
        """Reads K * N gradient elements once and writes N; revisits conflicting rows in cache."""
        operands = Operands(updates, grads, tasks, dims, groups)
        _dense_priorities, addresses = operands.priority_addresses(priorities)
        self.run_phase2(operands, addresses, None)
        operands.finish()

    def phase2_update_(
        self,
        updates: Tensors,
        grads: Grads,
        weights: Tensors,
        gamma: Tensor,
        running_var: Tensor,
        eps: Floats,
        dims: Ints,
        groups: Ints,
        tasks: int,
        products: Tensor | None = None,
    ) -> Tensor:
        """Reads N weights and K * N gradient elements once and writes N.

        Rows in conflict are revisited while they are in cache.
        """
        operands = Operands(updates, grads, tasks, dims, groups)
        weights, channels = operands.weights(weights)
        check_statistics(gamma, running_var, eps, channels, tasks, operands.device)
        if products is not None:
            check_products(products, len(weights), tasks, operands.device, written=True)
        priorities, addresses = operands.new_priorities(channels)
        factors = Factors(weights, dense(gamma), dense(running_var), eps)
        self.run_phase2(operands, addresses, factors, products)
        operands.finish()
        return priorities

    def phase2_products_(
        self,
        updates: Tensors,
        grads: Grads,
        priorities: Tensors,
        dims: Ints,
        groups: Ints,
        tasks: int,
    ) -> Tensor:
        """Reads K * N gradient elements once and writes N."""
        operands = Operands(updates, grads, tasks, dims, groups)
        _dense_priorities, addresses = operands.priority_addresses(priorities)
        products = torch.zeros(
            (len(priorities), tasks, tasks), dtype=torch.float64, device=operands.device
        )
        self.run_products(operands, addresses, products)
        operands.finish()
        return products

    def phase2_apply_(
        self,
        updates: Tensors,
        grads: Grads,
        priorities: Tensors,
        products: Tensor,
        dims: Ints,
        groups: Ints,
        tasks: int,
    ) -> None:
        """Reads two numbers and writes one for each element of a row in conflict."""
        operands = Operands(updates, grads, tasks, dims, groups)
        operands.read_outputs()
        _dense_priorities, addresses = operands.priority_addresses(priorities)
        check_products(products, len(priorities), tasks, operands.device)
        self.run_apply(operands, addresses, dense(products))
        operands.finish()

    def connection_strength(
        self,
        weight: Tensor,
        gamma: Tensor,
        running_var: Tensor,
        eps: Floats,
        normalize: bool,
        dim: int,
        groups: int,
    ) -> Tensor:
        """Reads the weight once."""
        check_layer(weight, gamma, running_var, eps, dim, groups)
        weight, layout = as_channels(weight, dim, groups)
        energy = self.energies(weight, layout, prod(weight.shape[2:]))
        return self.strengths(energy, gamma, running_var, eps, normalize=normalize)

    def channel_energies(self, weights: Tensors, dims: Ints, groups: Ints) -> Tensor:
        """Reads the weights once."""
        check_weights(weights, dims, groups)
        layers = zip(weights, dims, groups, strict=True)
        return torch.cat([self.energies(*as_channels(*layer), 1) for layer in layers])

    def energy_priority(
        self, energies: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, channels: Ints
    ) -> Tensor:
        """Reads (2 K + 1) O numbers and writes O."""
        tasks = check_energies(energies, gamma, running_var, eps, channels)
        statistics = [tasks * rows for rows in channels]
        layers = zip(
            torch.split(energies.double().contiguous(), list(channels)),
            torch.split(gamma.flatten().double(), statistics),
            torch.split(running_var.flatten().double(), statistics),
            [eps[i : i + tasks] for i in range(0, len(eps), max(tasks, 1))],
            strict=True,
        )
        strengths = [self.strengths(*layer, normalize=True) for layer in layers]
        empty = energies.new_empty(0, dtype=torch.int64)
        return torch.cat([empty, *map(self.task_priority, strengths)])
