"""Which parameters of a trunk are shared, and which of them have prioritized output channels.

A layer has where a task-specific normalization takes the very tensor that it returned. That is seen
by watching a forward pass, not read from names: networks name and nest their layers as they please.
"""

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from cs_kernels.nn import TaskBatchNorm

_LAYERS = (_ConvNd, nn.Linear)


class Norm(NamedTuple):
    """Where a normalization keeps its tensors: they may be others in the next step.

    The dictionaries themselves: a step asks every layer's and task's, and the way to them over
    modules and their attributes takes longer.
    """

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    module: nn.Module


@dataclass(frozen=True)
class Layer:
    """A layer whose output channels have a priority."""

    name: str
    weight_index: int
    """Of its weight among the shared parameters."""
    weight: nn.Parameter
    out_channel_dim: int
    groups: int
    """Of a transposed convolution; 1 for all others, whose channels lie in dimension 0."""
    norm_name: str
    norms: tuple[Norm, ...]
    """The normalization of each task."""


def gammas(layers: Sequence[Layer]) -> list[Tensor]:
    """The scale of every normalization, [O], a layer's tasks together; ones where it has none."""
    return [
        torch.ones_like(cast("Tensor", norm.buffers["running_var"])) if gamma is None else gamma
        for layer in layers
        for norm in layer.norms
        for gamma in [norm.parameters["weight"]]
    ]


def running_vars(layers: Sequence[Layer]) -> list[Tensor]:
    """The running variance of every normalization, [O], a layer's tasks together."""
    buffers = [norm.buffers["running_var"] for layer in layers for norm in layer.norms]
    return cast("list[Tensor]", buffers)  # A layer with one that is None has no priority.


def epsilons(layers: Sequence[Layer]) -> list[float]:
    """That of every normalization, a layer's tasks together."""
    return [cast("float", norm.module.eps) for layer in layers for norm in layer.norms]


@dataclass(frozen=True)
class Coverage:
    """Which shared parameters are prioritized and which get the plain sum, and why."""

    prioritized: dict[str, str]
    """By name of the layer's weight: the normalization that gives its channels a priority."""
    plain: dict[str, str]
    """By name of the parameter: why it gets the plain sum."""
    numel: dict[str, int] = field(repr=False)

    def __str__(self) -> str:
        total = max(1, sum(self.numel.values()))
        share = 100 * sum(self.numel[name] for name in self.prioritized) / total
        lines = [
            f"{len(self.prioritized)} of {len(self.numel)} shared parameters are prioritized,"
            f" {share:.1f} % of {total} elements"
        ]
        width = max((len(name) for name in self.numel), default=0)
        for name, norm in self.prioritized.items():
            lines.append(f"  {name:{width}}  prioritized by {norm}")
        for name, reason in self.plain.items():
            lines.append(f"  {name:{width}}  plain sum: {reason}")
        return "\n".join(lines)


class Followers:
    """Which normalizations follow which layer, as seen in forward passes of a trunk."""

    def __init__(self, trunk: nn.Module) -> None:
        self._trunk = trunk
        self.norms: dict[str, set[str]] = {}
        """By name of each layer that ran: the normalizations that took its output."""

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watches the forward passes inside the `with`."""
        # By identity, which lasts as long as the tensor does.
        producers: dict[int, tuple[weakref.ref[Tensor], str]] = {}

        def remember(name: str, output: object) -> None:
            self.norms.setdefault(name, set())
            if isinstance(output, Tensor):
                producers[id(output)] = (weakref.ref(output), name)

        def connect(name: str, args: tuple[object, ...]) -> None:
            if not args:
                return
            tensor, layer = producers.get(id(args[0]), (lambda: None, ""))
            if tensor() is args[0] and layer:
                self.norms[layer].add(name)

        handles = []
        for name, module in self._trunk.named_modules():
            if isinstance(module, _LAYERS):
                handles.append(
                    module.register_forward_hook(
                        lambda _, __, output, name=name: remember(name, output)
                    )
                )
            elif isinstance(module, TaskBatchNorm):
                handles.append(
                    module.register_forward_pre_hook(lambda _, args, name=name: connect(name, args))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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
    """The shared parameters of a trunk and those of its layers that have a priority."""

    layers: tuple[Layer, ...]
    coverage: Coverage


def find_layout(
    trunk: nn.Module,
    tasks: Sequence[str],
    followers: Mapping[str, set[str]],
    overrides: Mapping[str, str | None],
) -> Layout:
    """Joins layers and the normalizations that follow them.

    Args:
        trunk: The shared module.
        tasks: In the order of the gradients.
        followers: By name of each layer that ran, the normalizations that took its output.
        overrides: By name of a layer, the normalization to take instead; None for the plain sum.

    """
    modules = dict(trunk.named_modules(remove_duplicate=False))
    parameters = shared_parameters(trunk)
    index = {id(parameter): i for i, parameter in enumerate(parameters.values())}
    names = {id(parameter): name for name, parameter in parameters.items()}

    norms_of_weight: dict[int, set[str]] = {}
    layers_of_weight: dict[int, list[str]] = {}
    reasons = {
        id(p): "not the weight of a convolution or linear layer" for p in parameters.values()
    }
    for name, module in trunk.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, _LAYERS) or id(weight) not in index:
            continue
        layers_of_weight.setdefault(id(weight), []).append(name)
        followed_by = norms_of_weight.setdefault(id(weight), set())
        if name in overrides:
            override = overrides[name]
            reasons[id(weight)] = "excluded by `layers`"
            followed_by.update([] if override is None else [override])
        elif name in followers:
            reasons[id(weight)] = "no task-specific normalization takes its output"
            followed_by.update(followers[name])
        else:
            reasons[id(weight)] = "the layer has not run"

    layers = []
    for weight_id, followed_by in norms_of_weight.items():
        if len(followed_by) > 1:
            reasons[weight_id] = f"several normalizations follow: {', '.join(sorted(followed_by))}"
        if len(followed_by) != 1:
            continue
        (norm_name,) = followed_by
        norm = modules[norm_name]
        assert isinstance(norm, TaskBatchNorm)
        norms = tuple(norm.of(task) for task in tasks)
        if any(n._buffers.get("running_var") is None for n in norms):
            reasons[weight_id] = f"{norm_name} keeps no running variance"
            continue
        if any("weight" not in n._parameters for n in norms):
            reasons[weight_id] = f"{norm_name} has a scale that is not a parameter"
            continue
        layer_name = layers_of_weight[weight_id][0]
        module = modules[layer_name]
        transposed = isinstance(module, _ConvTransposeNd)
        layers.append(
            Layer(
                name=layer_name,
                weight_index=index[weight_id],
                weight=parameters[names[weight_id]],
                out_channel_dim=1 if transposed else 0,
                groups=module.groups if isinstance(module, _ConvTransposeNd) else 1,
                norm_name=norm_name,
                norms=tuple(Norm(n._parameters, n._buffers, n) for n in norms),
            )
        )
    layers.sort(key=lambda layer: layer.weight_index)
    covered = {layer.weight_index: layer.norm_name for layer in layers}
    return Layout(
        layers=tuple(layers),
        coverage=Coverage(
            prioritized={names[id(layer.weight)]: layer.norm_name for layer in layers},
            plain={
                name: ("frozen; " if not p.requires_grad else "") + reasons[id(p)]
                for i, (name, p) in enumerate(parameters.items())
                if i not in covered
            },
            numel={name: p.numel() for name, p in parameters.items()},
        ),
    )
