"""What a kernel is told of an operator's tensors: types, layouts in memory and addresses.

The kernels read memory as it lies, so a weight, its gradients and its update must have one dense
layout there. Where a caller's have not, they are copied first.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ALIGNED_SCALES = ("min", "median", "rmse")
"""The common lengths of Aligned-MTL, in the order of the kernels' numbers for them."""

ChannelLayout = tuple[int, int, int, int]
"""A tensor's memory as an array [groups, outer, channels, inner]."""


@lru_cache(maxsize=4096)
def channel_layout(
    shape: tuple[int, ...], stride: tuple[int, ...], out_channel_dim: int, groups: int
) -> ChannelLayout | None:
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


def as_channels(weight: Tensor, out_channel_dim: int, groups: int) -> tuple[Tensor, ChannelLayout]:
    """The tensor or a contiguous copy, and how it lies in memory."""
    layout = channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
        assert layout is not None
    return weight, layout


def check_type(tensor: Tensor, name: str) -> None:
    """Raises a TypeError for what no kernel reads."""
    if tensor.dtype not in DTYPES:
        supported = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} must be one of {supported}, got {tensor.dtype}")


def check_numel(tensor: Tensor, numel: int, name: str) -> None:
    """Raises a ValueError for another number of elements."""
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")


def check_device(tensor: Tensor, device: torch.device, name: str) -> None:
    """Raises a ValueError for a tensor elsewhere: a kernel is told its address alone."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def laid_out(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """The tensor itself if it lies in memory as `like` does, else a copy that does."""
    if tensor.dtype is not like.dtype or tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {tuple(like.shape)} on {like.device},"
            f" got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def first_present(grads: Sequence[Tensor | None], tensors: int, tasks: int) -> list[Tensor]:
    """A gradient of each tensor; an empty one where no task has any."""
    like = next(grad for grad in grads if grad is not None)
    present = []
    for t in range(tensors):
        of_tensor = (grad for grad in grads[t * tasks : (t + 1) * tasks] if grad is not None)
        present.append(next(of_tensor, like.new_empty(0)))
    return present


def check_group_of(group_of: Sequence[int], groups: int) -> None:
    """Raises a ValueError for a group that there is not."""
    if group_of and not 0 <= min(group_of) <= max(group_of) < groups:
        raise ValueError(f"group_of must lie in [0, {groups}), got {list(group_of)}")


def check_gramian(gramian: Tensor, most: int) -> None:
    """Raises a ValueError for what is not [..., K, K]."""
    tasks = gramian.shape[-1]
    if gramian.ndim < 2 or gramian.shape[-2] != tasks or not 1 <= tasks <= most:
        raise ValueError(
            f"gramian must have shape [..., K, K] with K in [1, {most}], got {tuple(gramian.shape)}"
        )


def check_scale(scale: str) -> str:
    """Raises a ValueError for a common length that Aligned-MTL has not."""
    if scale not in ALIGNED_SCALES:
        raise ValueError(f"scale must be one of {ALIGNED_SCALES}, got {scale!r}")
    return scale


class Operands:
    """The gradients of several tensors, and the tensors that they lie in memory like.

    Args:
        outputs: What is written, or what only says how gradients lie.
        grads: Those of a tensor's tasks together.
        tasks: K.
        out_channel_dims: Of the first tensors; 0 for the others.
        groups: Of the first tensors; 1 for the others.
        name: Of `outputs`, for errors.

    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tasks: int,
        *,
        out_channel_dims: Sequence[int] = (),
        groups: Sequence[int] = (),
        name: str = "updates",
    ) -> None:
        if len(grads) != len(outputs) * tasks:
            raise ValueError(
                f"grads must have {len(outputs) * tasks} entries, one a tensor and task,"
                f" got {len(grads)}"
            )
        self.tasks = tasks
        self.layouts: list[ChannelLayout] = []
        self.outputs: list[Tensor] = []
        self.gradients: list[int] = []
        """Addresses; 0 for a gradient that is missing."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._alive: list[Tensor] = []
        for t, given in enumerate(outputs):
            dim, group = (out_channel_dims[t], groups[t]) if t < len(groups) else (0, 1)
            output = given
            check_device(output, outputs[0].device, name)
            layout = channel_layout(output.shape, output.stride(), dim, group)
            if layout is None:
                output = torch.empty_like(given, memory_format=torch.contiguous_format)
                layout = channel_layout(output.shape, output.stride(), dim, group)
                assert layout is not None
                self._copies.append((given, output))
            check_type(output, name)
            self.layouts.append(layout)
            self.outputs.append(output)
            self.gradients.extend(self._addresses(grads[t * tasks : (t + 1) * tasks], output))

    def _addresses(self, grads: Sequence[Tensor | None], like: Tensor) -> Iterator[int]:
        """Of gradients that lie in memory as `like` does; those that do not are copied first."""
        shape, stride, dtype, device = like.shape, like.stride(), like.dtype, like.device
        for grad in grads:
            if grad is None:
                yield 0
            elif (
                grad.stride() == stride
                and grad.dtype is dtype
                and grad.shape == shape
                and grad.device == device
            ):
                yield grad.data_ptr()
            else:
                self._alive.append(laid_out(grad, like, "grads"))
                yield self._alive[-1].data_ptr()

    def channels(self, layer: int) -> int:
        """The number of output channels."""
        groups, _, channels, _ = self.layouts[layer]
        return groups * channels

    def addresses(self) -> list[int]:
        """Of the outputs."""
        return [output.data_ptr() for output in self.outputs]

    def check_here(self, tensor: Tensor, name: str) -> None:
        """Raises a ValueError for a tensor that is not on the device of the outputs."""
        for output in self.outputs[:1]:
            check_device(tensor, output.device, name)

    def check_priorities(self, priorities: Sequence[Tensor]) -> None:
        """Raises a ValueError for priorities that do not fit the first tensors."""
        for layer, priority in enumerate(priorities):
            self.check_here(priority, "priorities")
            if priority.dtype is not torch.int64 or priority.shape != (self.channels(layer),):
                raise ValueError(
                    f"priorities must be int64 of shape ({self.channels(layer)},),"
                    f" got {priority.dtype} of shape {tuple(priority.shape)}"
                )

    def weights(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Those of the first tensors, as their updates lie in memory."""
        return [
            laid_out(weight, output, "weights")
            for weight, output in zip(weights, self.outputs, strict=False)
        ]

    def check_statistics(
        self,
        weights: Sequence[Tensor],
        gamma: Tensor,
        running_var: Tensor,
        eps: Sequence[float],
    ) -> list[int]:
        """Raises a ValueError or TypeError for what does not fit the layers; returns channels."""
        channels = [self.channels(layer) for layer in range(len(weights))]
        for name, tensor in (("gamma", gamma), ("running_var", running_var)):
            check_type(tensor, name)
            self.check_here(tensor, name)
        check_numel(gamma, self.tasks * sum(channels), "gamma")
        check_numel(running_var, self.tasks * sum(channels), "running_var")
        if len(eps) != self.tasks * len(weights):
            raise ValueError(f"eps must have {self.tasks * len(weights)} entries, got {len(eps)}")
        return channels

    def finish(self) -> None:
        """Writes the outputs whose memory had no layout of its own."""
        for given, output in self._copies:
            given.copy_(output)
