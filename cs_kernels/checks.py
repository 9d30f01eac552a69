"""What a MultiTaskOptimizer asks of its arguments, and of what a closure returns."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cs_kernels.methods import Method
from cs_kernels.nn import TaskBatchNorm, task_norms
from cs_kernels.ops import out_channels
from cs_kernels.weightings import Weighting


def checked_loss(loss: object, task: str) -> Tensor:
    """What a closure returned, if it is a scalar with a graph."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"closure must return a tensor, got {type(loss).__name__} for {task!r}")
    if loss.numel() != 1:
        raise ValueError(
            f"closure must return a scalar, got a tensor of shape {tuple(loss.shape)} for {task!r}"
        )
    if not loss.requires_grad:
        raise ValueError(f"closure must return a loss with a graph, got {loss} for {task!r}")
    return loss


def check_trunk(trunk: nn.Module, tasks: Sequence[str], method: Method) -> None:
    """Its normalizations know the tasks, and there are some where the method needs them."""
    for name, norm in trunk.named_modules():
        if isinstance(norm, TaskBatchNorm):
            for task in tasks:
                if task not in norm.tasks:
                    raise ValueError(
                        f"tasks must be known to every task-specific normalization of trunk:"
                        f" {name or 'it'} knows {list(norm.tasks)}, got {task!r}"
                    )
    if method.prioritizes and not task_norms(trunk):
        raise ValueError(
            f"trunk must have task-specific normalization for {method!r}: convert it with"
            f" cs.nn.convert_task_batchnorm; got {type(trunk).__name__} with none"
        )


def check_overrides(trunk: nn.Module, layers: Mapping[str, str | None]) -> None:
    """They map layers to task-specific normalizations of as many channels."""
    modules = dict(trunk.named_modules(remove_duplicate=False))
    for layer, norm in layers.items():
        weight = getattr(modules.get(layer), "weight", None)
        if not isinstance(weight, nn.Parameter):
            raise ValueError(f"layers must name layers of trunk with a weight, got {layer!r}")
        if norm is None:
            continue
        follower = modules.get(norm)
        if not isinstance(follower, TaskBatchNorm):
            raise ValueError(
                f"layers must map to task-specific normalizations of trunk, got {norm!r}"
                f" for {layer!r}"
            )
        module = modules[layer]
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        groups = module.groups if isinstance(module, nn.modules.conv._ConvTransposeNd) else 1
        channels = out_channels(weight, 1 if transposed else 0, groups)
        for child in follower.children():
            features = getattr(child, "num_features", channels)
            if features != channels:
                raise ValueError(
                    f"layers must map to a normalization of as many channels: {layer!r} has"
                    f" {channels}, got {norm!r} with {features}"
                )


def check_optimizer(
    trunk: nn.Module,
    shared: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    weighting: Weighting,
) -> None:
    """There is something shared to train, and the optimizer holds all that trains."""
    if not any(p.requires_grad for p in shared.values()):
        raise ValueError(
            f"trunk must have a shared parameter that requires a gradient,"
            f" got {len(shared)} shared ones and none that does"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name, p in trunk.named_parameters() if p.requires_grad and id(p) not in held
    ]
    if missing:
        raise ValueError(
            f"optimizer must hold every parameter of trunk that requires a gradient; got one"
            f" without {missing[0]} and {len(missing) - 1} others"
            " (was it built before the conversion?)"
        )
    if any(id(parameter) not in held for parameter in weighting.parameters()):
        raise ValueError(
            f"optimizer must hold the parameters() of weighting, got one without some of"
            f" {weighting!r}"
        )
