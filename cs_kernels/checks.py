"""Checks of the arguments of a MultiTaskOptimizer and of the losses that it gets."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cs_kernels.distributed.ranks import Alone, Ranks
from cs_kernels.distributed.sharded import is_sharded
from cs_kernels.layout import channels_of, shared_parameters
from cs_kernels.methods import ConnectionStrength, GramianMethod, Method
from cs_kernels.nn import TaskBatchNorm, task_norms
from cs_kernels.ops.operands import DTYPES, MOST_TASKS
from cs_kernels.schedules import Schedule
from cs_kernels.weightings import Weighting

Closure = Callable[[str], Tensor]


def described(value: object) -> str:
    """A value for an error message: a class or a function by its name."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, str) else type(value).__name__


def check_kinds(
    method: object,
    schedule: object,
    weighting: object,
    scaler: object,
    backward: object,
) -> None:
    """Raises TypeError for classes, names or options in place of objects."""
    for name, value, kind, example in (
        ("method", method, Method, "a method such as cs.PCGrad()"),
        ("schedule", schedule, Schedule, "a schedule such as cs.Mixed(epochs=200)"),
        ("weighting", weighting, Weighting, "a weighting such as cs.EqualWeights()"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {example}, got {described(value)}")
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}")
    if backward is not None and not callable(backward):
        raise TypeError(f"backward must be a function of a loss, got {backward!r}")


def checked_loss(loss: object, task: str, source: str = "closure must return") -> Tensor:
    """The loss as a scalar, if it is one real number with a graph."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"{source} a tensor, got {type(loss).__name__} for {task!r}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{source} a real scalar, got a {loss.dtype} tensor of shape {tuple(loss.shape)} for"
            f" {task!r}"
        )
    if not loss.requires_grad:
        raise ValueError(f"{source} a loss with a graph, got {loss} for {task!r}")
    return loss if loss.dim() == 0 else loss.reshape(())


def checked_closures(closure: object) -> list[Closure]:
    """The closures as a list: one a micro-batch."""
    many = isinstance(closure, Iterable) and not isinstance(closure, Mapping | Tensor | str)
    closures = list(closure) if isinstance(closure, Iterable) and many else [closure]
    if not closures:
        raise ValueError("closure must be a function or a sequence of them, got none")
    for function in closures:
        if not callable(function):
            hint = ": with losses of one forward pass, call backward({task: loss})"
            raise TypeError(
                f"closure must be a function from a task to its loss, got {described(function)}"
                f"{hint if isinstance(function, Mapping | Tensor) else ''}"
            )
    found: dict[object, object] = {}
    for function in closures:
        facts = _what_it_reads(function)
        if facts is not None and found.setdefault(facts, function) is not function:
            raise ValueError(
                f"closure must be a function for each micro-batch, got {len(closures)} of which two"
                f" are the same {described(function)}: variables are read when it is called, so"
                " bind the batch, as in functools.partial(loss, batch); or give one function"
                " several times, [closure] * 2, if it gets its batches itself"
            )
    return cast("list[Closure]", closures)


def _what_it_reads(function: object) -> object:
    """Equal for two functions with the same code and the same variables; None if unknown."""
    if isinstance(function, partial):
        inner = _what_it_reads(function.func)
        bound = *function.args, *function.keywords.values()
        return None if inner is None else (inner, *map(id, bound), *function.keywords)
    if not isinstance(function, FunctionType):
        return None
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    cells = function.__closure__ or ()
    return function.__code__, id(function.__globals__), *map(id, defaults), *map(id, cells)


def checked_losses(losses: object) -> dict[str, Tensor]:
    """The loss of each task."""
    if not isinstance(losses, Mapping):
        hint = ": with a closure, call step(closure)" if callable(losses) else ""
        raise TypeError(f"losses must be a mapping {{task: loss}}, got {described(losses)}{hint}")
    return {task: checked_loss(loss, task, "losses must hold") for task, loss in losses.items()}


def check_trunk(trunk: nn.Module, tasks: Sequence[str], method: Method) -> None:
    """The trunk's normalizations know the tasks; there are some if the method needs them."""
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


def refuse_reevaluation(weighting: Weighting, where: str) -> None:
    """Raises ValueError if a weighting needs the losses after a step."""
    if weighting.reevaluates:
        raise ValueError(
            f"weighting must not compute losses again {where}, got {weighting!r}: use"
            " FAMO(reevaluate=False)"
        )


def check_stackable(
    method: Method, weighting: Weighting, modules: Iterable[tuple[str, nn.Module]]
) -> None:
    """Raises where one pass of the trunk cannot serve all tasks.

    Args:
        method: Combines the gradients.
        weighting: Weighs the losses.
        modules: Those of the trunk outside task-specific normalizations, with names.

    """
    # Another `combine` may look at all layers.
    known = type(method).combine in (ConnectionStrength.combine, GramianMethod.combine)
    if method.separate_gradients and not (known and method.layerwise):
        raise ValueError(
            "method must be ConnectionStrength(), Sum() or one with groups='layer' for"
            " step_together, which never has all gradients of the tasks, got"
            f" {method!r}: use step"
        )
    refuse_reevaluation(weighting, "in step_together")
    for name, module in modules:
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                "trunk must have no batch normalization in training but task-specific ones for"
                f" step_together, got {name}: convert it, set it to eval(), or use step"
            )


def check_weighting(weighting: Weighting, method: Method, ranks: Ranks) -> None:
    """The method and the ranks have what the weighting reads after a step."""
    if weighting.needs_gramian and not method.has_gramian:
        raise ValueError(
            f"method must be a Gramian method for {weighting!r}, got {method!r}: for the plain sum,"
            " use Sum(separate=True)"
        )
    if not isinstance(ranks, Alone):
        refuse_reevaluation(weighting, f"on {ranks.size} ranks")


def check_devices(shared: Mapping[str, nn.Parameter], tasks: Sequence[str], method: Method) -> None:
    """All shared parameters are on one device, which has kernels for so many tasks."""
    first: dict[torch.device, str] = {}
    for name, parameter in shared.items():
        first.setdefault(parameter.device, name)
    if method.separate_gradients and len(first) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(f"trunk must be on one device for {method!r}, got {found}")
    on_gpu = any(device.type == "cuda" for device in first)
    if method.separate_gradients and on_gpu and len(tasks) > MOST_TASKS:
        raise ValueError(f"tasks must be at most {MOST_TASKS} on a GPU, got {len(tasks)}")


def check_dtypes(shared: Mapping[str, nn.Parameter], method: Method) -> None:
    """The method takes gradients of the types of all shared parameters that train."""
    if not method.separate_gradients:
        return
    for name, parameter in shared.items():
        is_complex, dtype = parameter.is_complex(), parameter.dtype.to_real()
        if parameter.requires_grad and (
            dtype not in DTYPES or (is_complex and not method.takes_complex)
        ):
            kinds = ", ".join(str(kind) for kind in DTYPES)
            pairs = ", or complex pairs of these" if method.takes_complex else ""
            raise ValueError(
                f"trunk must have shared parameters of {kinds}{pairs} for {method!r}, got {name} of"
                f" {parameter.dtype}: use Sum()"
            )


def checked_overrides(
    trunk: nn.Module, layers: Mapping[str, str | None]
) -> dict[nn.Parameter, str | None]:
    """By the weight of a layer, the normalization to use, or None for the plain sum."""
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
                f" {norm!r}, by {layer!r}"
            )
        if norm is None:
            continue
        if weight.dim() < 2 or weight.is_complex():
            raise ValueError(
                f"layers must name layers with real output channels, got {layer!r} with a"
                f" {weight.dtype} weight of shape {tuple(weight.shape)}"
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
                    f"layers must map to a normalization of as many channels: {layer!r} has"
                    f" {channels}, got {norm!r} with {features}"
                )
    return overrides


def checked_optimizers(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers as a tuple: their steps need no closure, and each parameter is in one."""
    several = isinstance(optimizer, Sequence)
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    seen: set[nn.Parameter] = set()
    if not optimizers:
        raise ValueError("optimizer must be a torch optimizer or a sequence of them, got none")
    for one in optimizers:
        if not hasattr(one, "param_groups") or not callable(getattr(one, "step", None)):
            raise TypeError(
                f"optimizer must be a torch optimizer or a sequence of them, got {described(one)}"
                f"{' in it' if several else ''}"
            )
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"optimizer must make a step without a closure, got {type(one).__name__}"
            )
        held = set(held_parameters([one]))
        if seen & held:
            raise ValueError(
                f"optimizer must hold each parameter once, got {len(seen & held)} in several"
            )
        seen |= held
    return optimizers


def held_parameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """The parameters of torch optimizers."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def numeric_options(optimizers: Sequence[torch.optim.Optimizer]) -> list[object]:
    """The options of each group of parameters that are numbers on the host."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    found: list[object] = []
    for n, group in enumerate(groups):
        for name, value in group.items():
            values = value if isinstance(value, tuple | list) else (value,)
            if name != "params" and all(isinstance(v, Real) for v in values):
                found.append((n, name, *map(float, values)))
    return found


def check_scales(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """A scaler cannot unscale sharded and other gradients together."""
    for optimizer in optimizers:
        sharded = sum(map(is_sharded, held_parameters([optimizer])))
        others = len(held_parameters([optimizer])) - sharded
        if sharded and others:
            raise ValueError(
                "optimizer must hold sharded parameters or others with a scaler, got"
                f" {type(optimizer).__name__} with {sharded} and {others}: call fully_shard on the"
                " heads too, or build a second optimizer"
            )


def check_steps_now(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Inside `accelerator.accumulate`, the optimizer makes no step until the last micro-batch."""
    for optimizer in optimizers:
        state = getattr(optimizer, "gradient_state", None)
        if not getattr(state, "sync_gradients", True):
            raise RuntimeError(
                f"optimizer must make a step now, got {type(optimizer).__name__} that waits for"
                " more micro-batches: use step([closure, ...]) without accelerator.accumulate, or"
                " backward(losses, update=accelerator.sync_gradients)"
            )


def check_held(
    trunk: nn.Module,
    shared: Mapping[str, nn.Parameter],
    held: set[nn.Parameter],
    weighting: Weighting,
) -> None:
    """A shared parameter requires a gradient, and the optimizer holds all those that do."""
    if not any(p.requires_grad for p in shared.values()):
        raise ValueError(
            f"trunk must have a shared parameter that requires a gradient,"
            f" got {len(shared)} shared ones and none that does"
        )
    missing = [name for name, p in trunk.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"optimizer must hold every parameter of trunk that requires a gradient; got one"
            f" without {missing[0]} and {len(missing) - 1} others"
            " (was it built before the conversion?)"
        )
    if any(parameter not in held for parameter in weighting.parameters()):
        raise ValueError(
            f"optimizer must hold the parameters() of weighting, got one without some of"
            f" {weighting!r}"
        )
