"""The operators through the compiled module `cs_kernels._C`: addresses and sizes out of tensors.

The kernels read memory as it lies, so a weight, its gradients and its update must have one dense
layout there. Where a caller's have not, they are copied first.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

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
        if len(grads) != len(updates) * tasks:
            raise ValueError(
                f"grads must have {len(updates) * tasks} entries, one a tensor and task,"
                f" got {len(grads)}"
            )
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
            shape, stride, dtype = output.shape, output.stride(), output.dtype
            for grad in grads[t * tasks : (t + 1) * tasks]:
                if grad is None:
                    self.gradients.append(0)
                elif grad.stride() == stride and grad.dtype is dtype and grad.shape == shape:
                    self.gradients.append(grad.data_ptr())
                else:
                    copy = _laid_out(grad, output, "grads")
                    self._alive.append(copy)
                    self.gradients.append(copy.data_ptr())

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
