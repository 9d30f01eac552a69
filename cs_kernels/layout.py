"""Which parameters of a trunk are shared, and which of them have prioritized output channels."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from cs_kernels.nn import TaskBatchNorm
from cs_kernels.ops import out_channels
from cs_kernels.watching import LAYERS, Watcher


class Norm(NamedTuple):
    """A normalization and the dictionaries of its tensors, which may be replaced between steps.

    A step reads every layer's and task's tensors; access through module attributes is slower.
    """

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    module: Any


@dataclass(frozen=True)
class Layer:
    """A layer whose output channels are prioritized."""

    name: str
    weight_index: int
    """The index of its weight among the shared parameters."""
    weight: nn.Parameter
    out_channel_dim: int
    groups: int
    """The groups of a transposed convolution; 1 for other layers, with `out_channel_dim` 0."""
    norm_name: str
    norms: tuple[Norm, ...]
    """The normalization of each task."""


class LayerLists(NamedTuple):
    """The arguments of Phase 2 for some layers."""

    layers: tuple[Layer, ...]
    weight_indices: list[int]
    weights: list[Tensor]
    out_channel_dims: list[int]
    groups: list[int]
    parameters: list[dict[str, nn.Parameter | None]]
    """The parameters of every layer's normalizations, a dictionary for each task."""
    buffers: list[dict[str, Tensor | None]]
    """Likewise."""
    norms: list[Any]
    """The normalizations."""

    @property
    def channels(self) -> list[int]:
        """The number of output channels of every layer."""
        return list(map(out_channels, self.weights, self.out_channel_dims, self.groups))

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> "LayerLists":
        """The lists of these layers."""
        norms = [norm for layer in layers for norm in layer.norms]
        return cls(
            layers=tuple(layers),
            weight_indices=[layer.weight_index for layer in layers],
            weights=[layer.weight for layer in layers],
            out_channel_dims=[layer.out_channel_dim for layer in layers],
            groups=[layer.groups for layer in layers],
            parameters=[norm.parameters for norm in norms],
            buffers=[norm.buffers for norm in norms],
            norms=[norm.module for norm in norms],
        )


class StaleLayoutError(RuntimeError):
    """A normalization has no running variance any more, or a scale that is no parameter."""


def gammas(layers: Sequence[Layer]) -> list[Tensor]:
    """Gamma of every normalization, [O], layer by layer; ones if it has no scale.

    Raises:
        StaleLayoutError: The layers have to be found anew.

    """
    norms = [norm for layer in layers for norm in layer.norms]
    if not all("weight" in norm.parameters for norm in norms):
        raise StaleLayoutError
    found = [norm.parameters["weight"] for norm in norms]
    if any(gamma is None for gamma in found):
        pairs = zip(found, running_vars(layers), strict=True)
        return [torch.ones_like(var) if gamma is None else gamma for gamma, var in pairs]
    return cast("list[Tensor]", found)


def running_vars(layers: Sequence[Layer]) -> list[Tensor]:
    """The running variance of every normalization, [O], layer by layer.

    Raises:
        StaleLayoutError: The layers have to be found anew.

    """
    buffers = [norm.buffers.get("running_var") for layer in layers for norm in layer.norms]
    if any(buffer is None for buffer in buffers):
        raise StaleLayoutError
    return cast("list[Tensor]", buffers)


def epsilons(layers: Sequence[Layer]) -> list[float]:
    """Epsilon of every normalization, layer by layer."""
    return [norm.module.eps for layer in layers for norm in layer.norms]


def channels_of(layer: nn.Module, weight: Tensor) -> tuple[int, int, int]:
    """The number of output channels of a layer, `out_channel_dim` and `groups` of its weight."""
    dim, groups = (1, layer.groups) if isinstance(layer, _ConvTransposeNd) else (0, 1)
    return out_channels(weight, dim, groups), dim, groups


@dataclass(frozen=True)
class Coverage:
    """Which shared parameters are prioritized and which get the plain sum, and why."""

    prioritized: dict[str, str]
    """By name of the layer's weight: the normalization behind the layer."""
    plain: dict[str, str]
    """By name of the parameter: why it gets the plain sum."""
    own: dict[str, str]
    """By name of the parameter: the only task that has ever reached it."""
    numel: dict[str, int] = field(repr=False)
    frozen: frozenset[str] = frozenset()
    """The names of the prioritized ones that require no gradient now."""

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
    """The parameters of a trunk outside task-specific normalization, by name, each once."""
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
        """The lists of all layers."""
        return LayerLists.of(self.layers)

    def lists_of(self, parameters: Container[int]) -> LayerLists:
        """The lists of the layers whose weights are among these shared parameters."""
        lists = self.lists
        if all(index in parameters for index in lists.weight_indices):
            return lists
        return LayerLists.of([layer for layer in self.layers if layer.weight_index in parameters])


def find_layout(
    trunk: nn.Module,
    tasks: Sequence[str],
    watcher: Watcher,
    overrides: Mapping[nn.Parameter, str | None],
    own: Mapping[str, str],
) -> Layout:
    """Joins layers and the normalizations that follow them.

    Args:
        trunk: The shared module.
        tasks: In the order of the gradients.
        watcher: The watcher of the trunk's forward passes.
        overrides: By the weight of a layer, the normalization to use; None for the plain sum.
        own: By name, the parameters that only one task reaches, and that task.

    """
    modules = dict(trunk.named_modules(remove_duplicate=False))
    parameters = shared_parameters(trunk)
    index = {parameter: i for i, parameter in enumerate(parameters.values())}
    name_of = {parameter: name for name, parameter in parameters.items()}
    reasons = dict.fromkeys(parameters.values(), "not the weight of a convolution or linear layer")

    layers_of: dict[nn.Parameter, list[str]] = {}
    for name, module in trunk.named_modules():
        weight = module._parameters.get("weight")
        candidate = isinstance(module, LAYERS) or weight in overrides
        if candidate and weight in index and name_of[weight] not in own:
            layers_of.setdefault(weight, []).append(name)

    layers = []
    for weight, names in layers_of.items():
        norm_name, reasons[weight] = _norm_of(weight, names, watcher, overrides)
        if norm_name is None:
            continue
        norm = modules[norm_name]
        assert isinstance(norm, TaskBatchNorm)
        norms = tuple(norm.of(task) for task in tasks)
        kinds = {channels_of(modules[name], weight) for name in names}
        channels, out_channel_dim, groups = min(kinds)
        reasons[weight] = _unfit(norm_name, norms, channels)
        if weight.is_complex():
            reasons[weight] = f"its weight is {weight.dtype}"
        if len(kinds) > 1:
            reasons[weight] = f"{', '.join(names)} have other dimensions for their outputs"
        if reasons[weight]:
            continue
        layers.append(
            Layer(
                name=names[0],
                weight_index=index[weight],
                weight=weight,
                out_channel_dim=out_channel_dim,
                groups=groups,
                norm_name=norm_name,
                norms=tuple(Norm(n._parameters, n._buffers, n) for n in norms),
            )
        )
    layers.sort(key=lambda layer: layer.weight_index)
    prioritized = {name_of[layer.weight]: layer.norm_name for layer in layers}
    return Layout(
        layers=tuple(layers),
        coverage=Coverage(
            prioritized=prioritized,
            plain={
                name: ("frozen; " if not p.requires_grad else "") + reasons[p]
                for name, p in parameters.items()
                if name not in prioritized and name not in own
            },
            own=dict(own),
            numel={name: p.numel() for name, p in parameters.items()},
            frozen=frozenset(name for name in prioritized if not parameters[name].requires_grad),
        ),
    )


def _norm_of(
    weight: nn.Parameter,
    layers: Sequence[str],
    watcher: Watcher,
    overrides: Mapping[nn.Parameter, str | None],
) -> tuple[str | None, str]:
    """The normalization behind the layers of a weight, and why there is none."""
    if weight in overrides:
        return overrides[weight], "excluded by `layers`"
    if not any(layer in watcher.norms for layer in layers) and watcher.has_norms:
        return None, "the layer has not run"
    norms = {norm for layer in layers for norm in watcher.norms.get(layer, ())}
    if len(norms) == 1:
        return norms.pop(), ""
    if norms:
        return None, f"several normalizations follow: {', '.join(sorted(norms))}"
    others = {norm for layer in layers for norm in watcher.other_channels.get(layer, ())}
    if others:
        return None, f"{', '.join(sorted(others))} normalizes other channels than its outputs"
    return None, "no task-specific normalization takes its output"


def _unfit(name: str, norms: Sequence[nn.Module], channels: int) -> str:
    """Why the normalizations of a layer cannot prioritize its output channels, or nothing."""
    variances = [norm._buffers.get("running_var") for norm in norms]
    if any(variance is None for variance in variances):
        return f"{name} keeps no running variance"
    if any("weight" not in norm._parameters for norm in norms):
        return f"{name} has a scale that is not a parameter"
    if any(variance is not None and variance.numel() != channels for variance in variances):
        return f"{name} has other channels than its {channels} outputs"
    return ""
