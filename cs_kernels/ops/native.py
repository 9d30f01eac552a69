"""The operators through the compiled module `cs_kernels._C`: addresses and sizes out of tensors.

The kernels read memory as it lies, so a weight, its gradients and its update must have one dense
layout there. Where a caller's have not, they are copied first.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

try:
    from cs_kernels import _C
except ImportError as error:
    unavailable: str | None = f"cs_kernels._C does not import: {error}"
else:
    unavailable = None

_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_Layout = tuple[int, int, int, int]


@lru_cache(maxsize=4096)
def channel_layout(
    shape: tuple[int, ...], stride: tuple[int, ...], out_channel_dim: int, groups: int
) -> _Layout | None:
    """The tensor's memory as an array [groups, outer, channels, inner]; None if it is not one."""
    if prod(shape) == 0:
        return (1, 1, shape[out_channel_dim] if shape else 0, 0)
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])
    expected = 1
    for d in reversed(dims):
        if stride[d] != expected:
            return None
        expected *= shape[d]
    sizes = {d: shape[d] for d in dims}
    if out_channel_dim == 1 and groups > 1:
        if dims[0] != 0:
            return None
        sizes[0] //= groups
    else:
        groups = 1
    if out_channel_dim not in sizes:
        return (groups, 1, 1, prod(sizes.values()))
    place = dims.index(out_channel_dim)
    outer = prod(sizes[d] for d in dims[:place])
    inner = prod(sizes[d] for d in dims[place + 1 :])
    return (groups, outer, shape[out_channel_dim], inner)


def _type(tensor: Tensor, name: str) -> int:
    code = _TYPES.get(tensor.dtype)
    if code is None:
        supported = ", ".join(str(dtype) for dtype in _TYPES)
        raise TypeError(f"{name} must be one of {supported}, got {tensor.dtype}")
    return code


def _laid_out(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """The tensor itself if it lies in memory as `like` does, else a copy that does."""
    if tensor.dtype is not like.dtype or tensor.shape != like.shape:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {tuple(like.shape)},"
            f" got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _in_double(tensor: Tensor, numel: int, name: str) -> Tensor:
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")
    return tensor.to(torch.float64).contiguous()


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """Reads the weight once."""
    layout = channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
        assert layout is not None
    channels = layout[0] * layout[2]
    gamma = _in_double(gamma, len(eps) * channels, "gamma")
    variance = _in_double(running_var, len(eps) * channels, "running_var")
    strength = torch.empty((len(eps), channels), dtype=torch.float64)
    _C.connection_strength(
        type=_type(weight, "weight"),
        layout=layout,
        weight=weight.data_ptr(),
        kernel_size=prod(weight.shape[2:]),
        gamma=gamma.data_ptr(),
        variance=variance.data_ptr(),
        epsilon=list(eps),
        normalize=normalize,
        strength=strength.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return strength


def task_priority(strength: Tensor) -> Tensor:
    """Reads K * O numbers, writes O."""
    numbers = strength.to(torch.float64).contiguous()
    tasks, channels = numbers.shape
    priority = torch.empty(channels, dtype=torch.int64)
    _C.task_priority(
        strength=numbers.data_ptr(), tasks=tasks, rows=channels, priority=priority.data_ptr()
    )
    return priority


def _laid_out_addresses(
    grads: Sequence[Tensor | None], like: Tensor, copies: list[Tensor]
) -> Iterator[int]:
    """Of gradients that lie in memory as `like` does; those that do not are copied first."""
    shape, stride, dtype = like.shape, like.stride(), like.dtype
    for grad in grads:
        if grad is None:
            yield 0
        elif grad.stride() == stride and grad.dtype is dtype and grad.shape == shape:
            yield grad.data_ptr()
        else:
            copies.append(_laid_out(grad, like, "grads"))
            yield copies[-1].data_ptr()


def _check_grads(grads: Sequence[Tensor | None], tensors: int, tasks: int) -> None:
    if len(grads) != tensors * tasks:
        raise ValueError(
            f"grads must have {tensors * tasks} entries, one a tensor and task, got {len(grads)}"
        )


class _Phase2Call:
    """The part of the arguments that both projections share."""

    def __init__(
        self,
        updates: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        out_channel_dims: Sequence[int],
        groups: Sequence[int],
        tasks: int,
    ) -> None:
        _check_grads(grads, len(updates), tasks)
        self.tasks = tasks
        self.types: list[int] = []
        self.layouts: list[_Layout] = []
        self.outputs: list[Tensor] = []
        self.gradients: list[int] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._alive: list[Tensor] = []
        for t, update in enumerate(updates):
            dim, group = (out_channel_dims[t], groups[t]) if t < len(groups) else (0, 1)
            output = update
            layout = channel_layout(update.shape, update.stride(), dim, group)
            if layout is None:
                output = torch.empty_like(update, memory_format=torch.contiguous_format)
                layout = channel_layout(output.shape, output.stride(), dim, group)
                assert layout is not None
                self._copies.append((update, output))
            self.types.append(_type(update, "updates"))
            self.layouts.append(layout)
            self.outputs.append(output)
            of_tensor = grads[t * tasks : (t + 1) * tasks]
            self.gradients.extend(_laid_out_addresses(of_tensor, output, self._alive))

    def channels(self, layer: int) -> int:
        groups, _, channels, _ = self.layouts[layer]
        return groups * channels

    def run(
        self,
        priorities: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
        gamma: int = 0,
        variance: int = 0,
        eps: Sequence[float] = (),
    ) -> None:
        _C.phase2(
            tasks=self.tasks,
            types=self.types,
            layouts=self.layouts,
            updates=[output.data_ptr() for output in self.outputs],
            gradients=self.gradients,
            priorities=[priority.data_ptr() for priority in priorities],
            weights=[weight.data_ptr() for weight in weights],
            gamma=gamma,
            variance=variance,
            epsilon=list(eps),
            threads=torch.get_num_threads(),
        )
        for update, output in self._copies:
            update.copy_(output)


def project_conflicts_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N; rows in conflict are visited again in cache."""
    call = _Phase2Call(updates, grads, out_channel_dims, groups, tasks)
    for layer, priority in enumerate(priorities):
        if priority.dtype is not torch.int64 or priority.shape != (call.channels(layer),):
            raise ValueError(
                f"priorities must be int64 of shape ({call.channels(layer)},),"
                f" got {priority.dtype} of shape {tuple(priority.shape)}"
            )
    call.run([priority.contiguous() for priority in priorities])


def phase2_update_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> list[Tensor]:
    """Reads N weights and K * N gradients once and writes N; conflicts again in cache."""
    call = _Phase2Call(updates, grads, out_channel_dims, groups, tasks)
    weights = [
        _laid_out(weight, output, "weights")
        for weight, output in zip(weights, call.outputs, strict=False)
    ]
    channels = [call.channels(layer) for layer in range(len(weights))]
    gamma = _in_double(gamma, tasks * sum(channels), "gamma")
    variance = _in_double(running_var, tasks * sum(channels), "running_var")
    if len(eps) != tasks * len(weights):
        raise ValueError(f"eps must have {tasks * len(weights)} entries, got {len(eps)}")
    # A layer without elements has no strength and no address: its channels are the first task's.
    priorities = [
        (torch.empty if weight.numel() else torch.zeros)(count, dtype=torch.int64)
        for weight, count in zip(weights, channels, strict=True)
    ]
    call.run(priorities, weights, gamma.data_ptr(), variance.data_ptr(), eps)
    return priorities


class _GradientCall:
    """Gradients of several tensors, and the tensors that they are read or written like."""

    def __init__(self, likes: Sequence[Tensor], grads: Sequence[Tensor | None], tasks: int) -> None:
        if not 1 <= tasks <= _C.max_tasks:
            raise ValueError(f"tasks must be in [1, {_C.max_tasks}], got {tasks}")
        _check_grads(grads, len(likes), tasks)
        self.outputs: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._alive: list[Tensor] = []
        addresses: list[int] = []
        for t, like in enumerate(likes):
            output = like
            if channel_layout(like.shape, like.stride(), 0, 1) is None:
                output = torch.empty_like(like, memory_format=torch.contiguous_format)
                self._copies.append((like, output))
            self.outputs.append(output)
            of_tensor = grads[t * tasks : (t + 1) * tasks]
            addresses.extend(_laid_out_addresses(of_tensor, output, self._alive))
        self.arguments: dict[str, Any] = {
            "tasks": tasks,
            "types": [_type(output, "grads") for output in self.outputs],
            "sizes": [output.numel() for output in self.outputs],
            "gradients": addresses,
            "threads": torch.get_num_threads(),
        }

    def updates(self) -> list[int]:
        return [output.data_ptr() for output in self.outputs]

    def finish(self) -> None:
        for update, output in self._copies:
            update.copy_(output)


def gramian(
    grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int
) -> Tensor:
    """Reads K * N gradients once."""
    present = []
    for t in range(len(group_of)):
        of_tensor = grads[t * tasks : (t + 1) * tasks]
        present.append(next((grad for grad in of_tensor if grad is not None), None))
    likes = [torch.empty(0) if like is None else like for like in present]
    call = _GradientCall(likes, grads, tasks)
    _check_groups(group_of, groups)
    result = torch.empty((groups, tasks, tasks), dtype=torch.float64)
    _C.gramian(**call.arguments, groups=groups, group_of=list(group_of), out=result.data_ptr())
    return result


def _check_groups(group_of: Sequence[int], groups: int) -> None:
    if group_of and not 0 <= min(group_of) <= max(group_of) < groups:
        raise ValueError(f"group_of must lie in [0, {groups}), got {list(group_of)}")


def combine_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Tensor,
    group_of: Sequence[int],
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    call = _GradientCall(updates, grads, tasks)
    groups = len(weights)
    _check_groups(group_of, groups)
    weights = _in_double(weights, groups * tasks, "weights")
    _C.combine(
        **call.arguments,
        groups=groups,
        group_of=list(group_of),
        updates=call.updates(),
        weights=weights.data_ptr(),
    )
    call.finish()


def drop_signs_(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaks: Sequence[float],
    seed: int,
    step: int,
    tasks: int,
) -> None:
    """Reads K * N gradients once and writes N."""
    call = _GradientCall(updates, grads, tasks)
    _C.drop_signs(**call.arguments, updates=call.updates(), leaks=list(leaks), seed=seed, step=step)
    call.finish()


def _solve(solver: Callable[..., None], gramian: Tensor, *options: float) -> Tensor:
    tasks = gramian.shape[-1]
    if gramian.ndim < 2 or gramian.shape[-2] != tasks or not 1 <= tasks <= _C.max_tasks:
        raise ValueError(
            f"gramian must have shape [..., K, K] with K in [1, {_C.max_tasks}],"
            f" got {tuple(gramian.shape)}"
        )
    numbers = gramian.to(torch.float64).contiguous()
    weights = torch.empty(numbers.shape[:-1], dtype=torch.float64)
    count = weights.numel() // tasks
    solver(numbers.data_ptr(), count, tasks, weights.data_ptr(), *options)
    return weights


def pcgrad_weights(gramian: Tensor, seed: int, step: int) -> Tensor:
    """All solvers read K * K numbers and write K; this one takes K^3 operations."""
    return _solve(_C.pcgrad_weights, gramian, seed, step)


def cagrad_weights(gramian: Tensor, c: float) -> Tensor:
    """A few non-negative quadratic programs."""
    return _solve(_C.cagrad_weights, gramian, c)


def mgda_weights(gramian: Tensor) -> Tensor:
    """One non-negative quadratic program."""
    return _solve(_C.mgda_weights, gramian)


def aligned_mtl_weights(gramian: Tensor, scale: str) -> Tensor:
    """One eigendecomposition."""
    return _solve(_C.aligned_mtl_weights, gramian, ("min", "median", "rmse").index(scale))


def nash_mtl_weights(gramian: Tensor) -> Tensor:
    """At most 100 Newton steps, usually below 10."""
    return _solve(_C.nash_mtl_weights, gramian)


def imtl_g_weights(gramian: Tensor) -> Tensor:
    """One eigendecomposition."""
    return _solve(_C.imtl_g_weights, gramian)


def upgrad_weights(gramian: Tensor) -> Tensor:
    """K non-negative quadratic programs."""
    return _solve(_C.upgrad_weights, gramian)
