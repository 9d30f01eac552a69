"""Pairs layers with the task-specific normalizations that follow them."""

from collections.abc import Mapping, Sequence

from torch import nn

from cs_kernels.nn.task_norm import TaskBatchNorm
from cs_kernels.trunk.layers import Coverage, Layer, Layout, channels_of, shared_parameters
from cs_kernels.trunk.watcher import LAYERS, Watcher

Overrides = Mapping[nn.Parameter, str | None]
"""By a layer's weight: the name of the normalization to use, or None for the plain sum."""


def find_layout(
    trunk: nn.Module,
    tasks: Sequence[str],
    watcher: Watcher,
    overrides: Overrides,
    own: Mapping[str, str],
) -> Layout:
    """Pairs layers with the normalizations that follow them.

    `own` maps the name of each parameter that only one task reaches to this task.
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
        found = _layer_of(weight, index[weight], names, modules, tasks, watcher, overrides)
        if isinstance(found, Layer):
            layers.append(found)
        else:
            reasons[weight] = found
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


def _layer_of(
    weight: nn.Parameter,
    index: int,
    names: Sequence[str],
    modules: Mapping[str, nn.Module],
    tasks: Sequence[str],
    watcher: Watcher,
    overrides: Overrides,
) -> Layer | str:
    """The prioritized layer of a weight, or the reason for the plain sum."""
    norm_name, reason = _norm_of(weight, names, watcher, overrides)
    if norm_name is None:
        return reason
    norm = modules[norm_name]
    assert isinstance(norm, TaskBatchNorm)
    norms = tuple(norm.of(task) for task in tasks)
    channel_layouts = {channels_of(modules[name], weight) for name in names}
    channels, out_channel_dim, groups = min(channel_layouts)
    if len(channel_layouts) > 1:
        return f"{', '.join(names)} differ in the dimension of their channels"
    if weight.is_complex():
        return f"its weight is {weight.dtype}"
    reason = _unsuitable(norm_name, norms, channels)
    return reason or Layer(
        name=names[0],
        weight_index=index,
        weight=weight,
        out_channel_dim=out_channel_dim,
        groups=groups,
        norm_name=norm_name,
        norms=norms,
    )


def _norm_of(
    weight: nn.Parameter,
    layers: Sequence[str],
    watcher: Watcher,
    overrides: Overrides,
) -> tuple[str | None, str]:
    """The name of the normalization behind a weight's layers, or None; and the reason for None."""
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
        return None, f"{', '.join(sorted(others))} normalizes a dimension other than the channels"
    return None, "no task-specific normalization takes its output"


def _unsuitable(name: str, norms: Sequence[nn.Module], channels: int) -> str:
    """Why the normalizations of a layer cannot prioritize its output channels; "" if they can."""
    variances = [norm._buffers.get("running_var") for norm in norms]
    if any(variance is None for variance in variances):
        return f"{name} keeps no running variance"
    if any("weight" not in norm._parameters for norm in norms):
        return f"{name} has a scale that is not a parameter"
    if any(variance is not None and variance.numel() != channels for variance in variances):
        return f"{name} does not have the {channels} channels of the layer"
    return ""


def checked_overrides(trunk: nn.Module, layers: Mapping[str, str | None]) -> Overrides:
    """Checks the argument `layers`, and returns it by weight."""
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers must be a mapping from layer to normalization, got {layers!r}")
    modules = dict(trunk.named_modules(remove_duplicate=False))
    shared = set(shared_parameters(trunk).values())
    overrides: dict[nn.Parameter, str | None] = {}
    for layer, norm in layers.items():
        module = modules.get(layer)
        weight = module._parameters.get("weight") if module is not None else None
        if module is None or weight is None or weight not in shared:
            raise ValueError(
                f"layers must name layers of trunk with a shared weight, got {layer!r}"
            )
        if overrides.setdefault(weight, norm) != norm:
            raise ValueError(
                f"layers must map one weight to one normalization, got {overrides[weight]!r} and"
                f" {norm!r} for the weight of {layer!r}"
            )
        if norm is None:
            continue
        if weight.dim() < 2 or weight.is_complex():
            raise ValueError(
                "layers must name layers with a real-valued weight of at least 2 dimensions,"
                f" got {layer!r} with a {weight.dtype} weight of shape {tuple(weight.shape)}"
            )
        follower = modules.get(norm)
        if not isinstance(follower, TaskBatchNorm):
            raise ValueError(
                f"layers must map to task-specific normalizations of trunk, got {norm!r}"
                f" for {layer!r}"
            )
        channels, _, _ = channels_of(module, weight)
        for child in follower.children():
            features = getattr(child, "num_features", channels)
            if features != channels:
                raise ValueError(
                    f"layers must map to a normalization with as many channels as the layer:"
                    f" {layer!r} has {channels}, got {norm!r} with {features}"
                )
    return overrides
