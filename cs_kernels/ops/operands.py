"""Kernel arguments: dtype, memory layout and address of an operator's tensors.

Kernels need a weight, its gradients and its update in one dense memory layout; tensors in any other
layout are copied.
"""

import importlib
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from struct import pack, unpack
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Grads, Ints, Tensors
from cs_kernels.ops.checks import (
    DTYPES,
    MOST_TASKS,
    check_counter,
    check_device,
    check_grad_count,
    check_layer_count,
    check_like,
    check_priorities,
    check_similarities,
    check_type,
    check_writable,
    device_of,
    is_aligned,
)
from cs_kernels.ops.random import random_state
from cs_kernels.ops.solvers import ALIGNED_SCALES, SOLVERS, tolerances

unavailable: str | None = None
"""Why the compiled module cannot be used, or None."""
try:
    # Imported by name: a failed `from` import would be reported as a circular import.
    importlib.import_module("cs_kernels._C")
except ImportError as error:
    unavailable = f"cs_kernels._C cannot be imported: {error}"
    if isinstance(error, ModuleNotFoundError):
        sources = Path(__file__).parents[2]
        unavailable += " (not compiled; install with CS_KERNELS_NATIVE=1 to see why"
        in_sources = (sources / "setup.py").exists()
        unavailable += f"; to use an installed package, leave {sources})" if in_sources else ")"
else:
    from cs_kernels import _C

if TYPE_CHECKING:
    from cs_kernels._C import Operands as NativeOperands

TYPES = {dtype: number for number, dtype in enumerate(DTYPES)}

SOLVER_NUMBERS = {name: number for number, name in enumerate(SOLVERS)}

if unavailable is None:
    # The reference runs without the compiled module, so Python needs its own copies.
    for _name, _value in {
        "max_tasks": MOST_TASKS,
        "data_types": [str(dtype).removeprefix("torch.") for dtype in DTYPES],
        "solvers": list(SOLVERS),
        "tolerances": tolerances(),
    }.items():
        if getattr(_C, _name, None) != _value:
            raise ImportError(
                f"cs_kernels._C must have {_name} {_value}, got {getattr(_C, _name, None)}:"
                " rebuild it from these sources"
            )

Option = int | float | str | Tensor | None

ChannelLayout = tuple[int, int, int, int]
"""A tensor's memory, viewed as an array [groups, outer, channels, inner]."""


def as_channels(weight: Tensor, out_channel_dim: int, groups: int) -> tuple[Tensor, ChannelLayout]:
    """Returns the tensor, or a copy if unaligned or without a `ChannelLayout`, and the layout."""
    weight = weight if is_aligned(weight) else weight.clone()
    layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
        assert layout is not None  # Contiguous memory always has a layout.
    return weight, layout


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy if it is not contiguous or not aligned to its element size."""
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def copied_like(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """A copy in the memory layout of `like`."""
    check_like(tensor, like, name)
    return torch.empty_like(like).copy_(tensor)


def address_of(tensor: Tensor | None) -> int:
    """The address of a tensor's memory; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def misfits(tensors: Grads, likes: Tensors) -> list[int]:
    """Indices of tensors that are None or differ from `likes` in dtype, device or memory layout."""
    if unavailable is None:
        return _C.misfits(list(tensors), list(likes))
    return [
        index
        for index, (tensor, like) in enumerate(zip(tensors, likes, strict=True))
        if tensor is None
        or (tensor.dtype, tensor.device, tensor.shape, _relevant_strides(tensor))
        != (like.dtype, like.device, like.shape, _relevant_strides(like))
    ]


def _relevant_strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions larger than 1; other strides are arbitrary in torch."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


class SolverOptions(NamedTuple):
    """A solver's options, in the form that kernels take."""

    word: int = 0
    """64 bits: a random state, a float64, or the index of a scale."""
    counter: Tensor | None = None
    """Added to the random state."""
    rate: float = 0.0
    similarities: Tensor | None = None


def checked_options(gramian: Tensor, *options: Option) -> SolverOptions:
    """Checks a solver's options for these Gramians and packs them for the kernels.

    Raises:
        ValueError: The scale is unknown, or the counter or similarities do not fit the Gramians.
        TypeError: No solver takes these options.

    """
    match options:
        case ():
            return SolverOptions()
        case (int() as seed, int() as step, *rest) if len(rest) < 2:
            counter = cast("Tensor | None", rest[0] if rest else None)
            check_counter(counter, gramian.device)
            return SolverOptions(random_state(seed, step), counter)
        case (float() as number,):
            return SolverOptions(unpack("Q", pack("d", number))[0])
        case (str() as scale,):
            if scale not in ALIGNED_SCALES:
                raise ValueError(f"scale must be one of {ALIGNED_SCALES}, got {scale!r}")
            return SolverOptions(ALIGNED_SCALES.index(scale))
        case (Tensor() as similarities, float() as rate, *seeds):
            check_similarities(similarities, gramian)
            word, counter, *_ = checked_options(gramian, *seeds)
            return SolverOptions(word, counter, rate, similarities)
    raise TypeError(
        "options must be (), (scale,), (number,), (seed, step[, counter]) or (similarities, rate,"
        f" seed, step[, counter]), got {options}"
    )


@dataclass(frozen=True)
class Shapes:
    """The dtypes and memory layouts of operands; part of a plan's cache key."""

    signature: bytes
    native: "NativeOperands" = field(compare=False)


class Operands:
    """Tensors and their gradients for all tasks, in the same memory layout.

    Args:
        outputs: The updates, or tensors that only define the memory layout of the gradients.
        grads: Entry `t * tasks + i` is tensor t's gradient for task i.
        tasks: K.
        out_channel_dims: `out_channel_dim` of the first tensors; 0 for later tensors.
        groups: The number of convolution groups of the first tensors; 1 for later tensors.
        name: The name of `outputs` in error messages.

    """

    def __init__(
        self,
        outputs: Tensors,
        grads: Grads,
        tasks: int,
        out_channel_dims: Ints = (),
        groups: Ints = (),
        *,
        name: str = "updates",
    ) -> None:
        check_grad_count(outputs, grads, tasks)
        self.tasks = tasks
        self._layouts = out_channel_dims, groups
        self.outputs = list(outputs)
        self._copies: list[tuple[Tensor, Tensor]] = []
        arguments = (self.outputs, list(grads), tasks, out_channel_dims, groups)
        self.native = _C.Operands(*arguments)
        if self.native.unfit:
            for t in self.native.unfit:
                self._refit(t, name)
            self.native = _C.Operands(*arguments)
            if self.native.unfit:
                device = self.outputs[0].device
                raise ValueError(f"{name} must be on a device with memory, got {device}")
        self._grad_copies: list[Tensor] = []  # Kept alive, because kernels have only addresses.
        for index in self.native.misfits:
            grad = grads[index]
            assert grad is not None
            self._grad_copies.append(copied_like(grad, self.outputs[index // tasks], "grads"))
            self.native.set_gradient(index, self._grad_copies[-1].data_ptr())

    def _refit(self, t: int, name: str) -> None:
        original = self.outputs[t]
        check_device(original, self.outputs[0].device, name)
        check_type(original, name)
        if name == "updates":
            check_writable(original, name)
        self.outputs[t] = torch.empty_like(original, memory_format=torch.contiguous_format)
        self._copies.append((original, self.outputs[t]))

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.native.signature(), self.native)

    @property
    def device(self) -> torch.device | None:
        return device_of(self.outputs)

    def _channels(self, layers: Tensors, name: str) -> list[int]:
        check_layer_count(len(layers), self.outputs, *self._layouts, name)
        return [self.native.channels(layer) for layer in range(len(layers))]

    def priority_addresses(self, priorities: Tensors) -> tuple[list[Tensor], list[int]]:
        """The priorities of the first tensors, made contiguous, and their addresses."""
        check_priorities(priorities, self._channels(priorities, "priorities"), self.device)
        priorities = list(map(dense, priorities))
        return priorities, [priority.data_ptr() for priority in priorities]

    def weights(self, weights: Tensors) -> tuple[list[Tensor], list[int]]:
        """The first tensors' weights, in the memory layout of the updates, and channel counts."""
        weights, channels = list(weights), self._channels(weights, "weights")
        for layer in _C.misfits(weights, self.outputs[: len(weights)]):
            weights[layer] = copied_like(weights[layer], self.outputs[layer], "weights")
        return weights, channels

    def new_priorities(self, channels: Ints) -> tuple[Tensor, list[int]]:
        """Allocates all layers' priorities in one int64 tensor; returns it and their addresses."""
        # Kernels skip a layer without elements, so its priorities must be 0 from the start.
        make = torch.zeros if 0 in self.native.sizes[: len(channels)] else torch.empty
        priorities = make(sum(channels), dtype=torch.int64, device=self.device)
        starts = list(accumulate(channels, initial=0))[:-1]
        return priorities, [priorities.data_ptr() + priorities.itemsize * s for s in starts]

    def read_outputs(self) -> None:
        """Copies non-dense outputs into their buffers, for a kernel that adds to them."""
        for original, output in self._copies:
            output.copy_(original)

    def finish(self) -> None:
        """Copies the buffers of non-dense outputs back to the outputs."""
        for original, output in self._copies:
            original.copy_(output)
