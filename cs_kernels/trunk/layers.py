"""The layers of a trunk whose output channels are prioritized, and the parameters' coverage."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from cs_kernels.nn.task_norm import TaskBatchNorm
from cs_kernels.ops import out_channels


@dataclass(frozen=True)
class Layer:
    """A layer whose output channels are prioritized."""

    name: str
    weight_index: int
    """The index of its weight among the shared parameters."""
    weight: nn.Parameter
    out_channel_dim: int
    groups: int
    """The groups of a transposed convolution; 1 for layers with `out_channel_dim` 0."""
    norm_name: str
    norms: tuple[nn.Module, ...]
    """One per task."""


class LayerLists(NamedTuple):
    """The arguments of Phase 2 for a list of layers."""

    layers: tuple[Layer, ...]
    weight_indices: list[int]
    weights: list[Tensor]
    out_channel_dims: list[int]
    groups: list[int]
    norms: list[nn.Module]
    """One per layer and task."""
    parameters: list[dict[str, nn.Parameter | None]]
    """`_parameters` of `norms`: a step reads thousands of entries, and attributes are slower."""
    buffers: list[dict[str, Tensor | None]]

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> "LayerLists":
        norms = [norm for layer in layers for norm in layer.norms]
        return cls(
            layers=tuple(layers),
            weight_indices=[layer.weight_index for layer in layers],
            weights=[layer.weight for layer in layers],
            out_channel_dims=[layer.out_channel_dim for layer in layers],
            groups=[layer.groups for layer in layers],
            norms=norms,
            parameters=[norm._parameters for norm in norms],
            buffers=[norm._buffers for norm in norms],
        )

    @property
    def channels(self) -> list[int]:
        return list(map(out_channels, self.weights, self.out_channel_dims, self.groups))

    def gammas(self) -> list[Tensor]:
        """[O] per normalization, layer by layer: gamma, or ones if the normalization has no scale.

        Raises:
            StaleLayoutError: The layout is out of date.

        """
        try:
            gammas = [parameters["weight"] for parameters in self.parameters]
        except KeyError:
            raise StaleLayoutError from None
        if any(gamma is None for gamma in gammas):
            pairs = zip(gammas, self.running_vars(), strict=True)
            return [torch.ones_like(var) if gamma is None else gamma for gamma, var in pairs]
        return cast("list[Tensor]", gammas)

    def running_vars(self) -> list[Tensor]:
        """[O] per normalization, layer by layer: the running variance.

        Raises:
            StaleLayoutError: The layout is out of date.

        """
        variances = [buffers.get("running_var") for buffers in self.buffers]
        if any(variance is None for variance in variances):
            raise StaleLayoutError
        return cast("list[Tensor]", variances)

    def epsilons(self) -> list[float]:
        """Epsilon of every normalization, layer by layer."""
        return [cast("float", norm.eps) for norm in self.norms]


class StaleLayoutError(RuntimeError):
    """A normalization no longer has a running variance, or its scale is no longer a parameter."""


def channels_of(layer: nn.Module, weight: Tensor) -> tuple[int, int, int]:
    """A layer's number of output channels, and the `out_channel_dim` and `groups` of its weight."""
    dim, groups = (1, layer.groups) if isinstance(layer, _ConvTransposeNd) else (0, 1)
    return out_channels(weight, dim, groups), dim, groups


@dataclass(frozen=True)
class Coverage:
    """Which shared parameters are prioritized, and why all others get the plain sum."""

    prioritized: dict[str, str]
    """By name of the layer's weight: the normalization behind the layer."""
    plain: dict[str, str]
    """By name of the parameter: why it gets the plain sum."""
    own: dict[str, str]
    """By name of the parameter: the only task that has ever reached it."""
    numel: dict[str, int] = field(repr=False)
    frozen: frozenset[str] = frozenset()
    """The names of prioritized parameters that require no gradient now."""

    def __str__(self) -> str:
        shared = [name for name in self.numel if name not in self.own]
        total = sum(self.numel[name] for name in shared)
        share = 100 * sum(self.numel[name] for name in self.prioritized) / max(1, total)
        lines = [
            f"{len(self.prioritized)} of {len(shared)} shared parameters are prioritized,"
            f" {share:.1f} % of {total} elements"
        ]
        width = max((len(name) for name in self.numel), default=0)
        for name, norm in self.prioritized.items():
            frozen = "frozen; " if name in self.frozen else ""
            lines.append(f"  {name:{width}}  {frozen}prioritized by {norm}")
        for name, reason in self.plain.items():
            lines.append(f"  {name:{width}}  plain sum: {reason}")
        for name, task in self.own.items():
            lines.append(f"  {name:{width}}  the gradient of {task!r}: no other task reaches it")
        return "\n".join(lines)


def shared_parameters(trunk: nn.Module) -> dict[str, nn.Parameter]:
    """A trunk's parameters outside task-specific normalization, by name, each once."""
    own = {
        id(parameter)
        for module in trunk.modules()
        if isinstance(module, TaskBatchNorm)
        for parameter in module.parameters()
    }
    return {name: p for name, p in trunk.named_parameters() if id(p) not in own}


@dataclass(frozen=True)
class Layout:
    """The prioritized layers of a trunk, and the coverage of its shared parameters."""

    layers: tuple[Layer, ...]
    coverage: Coverage

    @cached_property
    def lists(self) -> LayerLists:
        return LayerLists.of(self.layers)

    def lists_of(self, parameters: Container[int]) -> LayerLists:
        """The lists of layers whose weights are among these indices of shared parameters."""
        lists = self.lists
        if all(index in parameters for index in lists.weight_indices):
            return lists
        return LayerLists.of([layer for layer in self.layers if layer.weight_index in parameters])
