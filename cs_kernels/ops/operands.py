"""What a kernel is told of an operator's tensors: types, layouts in memory and addresses.

The kernels read memory as it lies, so a weight, its gradients and its update must have one dense
layout there. Where a caller's have not, they are copied first.
"""

import importlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

unavailable: str | None = None
"""Why the compiled module cannot be used, if it cannot."""
try:
    # By its name: a failed `from` import would be reported as a circular one.
    importlib.import_module("cs_kernels._C")
except ImportError as error:
    unavailable = f"cs_kernels._C does not import: {error}"
else:
    from cs_kernels import _C

MOST_TASKS = 64
"""What Gramian kernels and solvers take, on every device: `kMaxTasks`."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ALIGNED_SCALES = ("min", "median", "rmse")
"""The common lengths of Aligned-MTL, in the order of the kernels' numbers for them."""

ChannelLayout = tuple[int, int, int, int]
"""A tensor's memory as an array [groups, outer, channels, inner]."""


def as_channels(weight: Tensor, out_channel_dim: int, groups: int) -> tuple[Tensor, ChannelLayout]:
    """The tensor or a contiguous copy, and how it lies in memory."""
    layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
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


def misfits(tensors: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[int]:
    """The places of tensors that are None or lie in memory otherwise than those beside them."""
    if unavailable is None:
        return _C.misfits(list(tensors), list(likes))
    return [
        place
        for place, (tensor, like) in enumerate(zip(tensors, likes, strict=True))
        if tensor is None
        or (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        != (like.dtype, like.device, like.shape, like.stride())
    ]


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
        self.tasks = tasks
        self.outputs = list(outputs)
        self._copies: list[tuple[Tensor, Tensor]] = []
        grads, dims, of_groups = list(grads), list(out_channel_dims), list(groups)
        found = _C.Operands(self.outputs, grads, tasks, dims, of_groups)
        if found.unfit:
            for t in found.unfit:
                self._refit(t, name)
            found = _C.Operands(self.outputs, grads, tasks, dims, of_groups)
            if found.unfit:
                device = self.outputs[0].device
                raise ValueError(f"{name} must have addresses, got tensors on {device}")
        self.types = found.types
        """Of the outputs: indices into DTYPES."""
        self.layouts: list[ChannelLayout] = found.layouts
        self.sizes = found.sizes
        """Numbers of elements."""
        self.kernel_sizes = found.kernel_sizes
        """Numbers of elements behind the first two dimensions."""
        self.addresses = found.addresses
        """Of the outputs."""
        self.gradients = found.gradient_addresses
        """Addresses; 0 for a gradient that is missing."""
        self._alive: list[Tensor] = []
        for place in found.misfits:
            grad = grads[place]
            assert grad is not None
            self._alive.append(laid_out(grad, self.outputs[place // tasks], "grads"))
            self.gradients[place] = self._alive[-1].data_ptr()

    def _refit(self, t: int, name: str) -> None:
        """Puts a contiguous tensor in the place of an output that has no layout of its own."""
        given = self.outputs[t]
        check_device(given, self.outputs[0].device, name)
        check_type(given, name)
        self.outputs[t] = torch.empty_like(given, memory_format=torch.contiguous_format)
        self._copies.append((given, self.outputs[t]))

    def channels(self, layer: int) -> int:
        """The number of output channels."""
        groups, _, channels, _ = self.layouts[layer]
        return groups * channels

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
        weights = list(weights)
        if len(weights) > len(self.outputs):
            raise ValueError(
                f"weights must be at most {len(self.outputs)}, one an update, got {len(weights)}"
            )
        for layer in _C.misfits(weights, self.outputs[: len(weights)]):
            weights[layer] = laid_out(weights[layer], self.outputs[layer], "weights")
        return weights

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

    def priorities(self, channels: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Room for the priorities of the first tensors, one after the other; each one's address."""
        # A layer without elements has no strength and no address: the first task's.
        make = torch.zeros if 0 in self.sizes[: len(channels)] else torch.empty
        device = self.outputs[0].device if self.outputs else None
        room = make(sum(channels), dtype=torch.int64, device=device)
        starts = list(accumulate(channels, initial=0))[:-1]
        return room, [room.data_ptr() + room.itemsize * start for start in starts]

    def finish(self) -> None:
        """Writes the outputs whose memory had no layout of its own."""
        for given, output in self._copies:
            given.copy_(output)
