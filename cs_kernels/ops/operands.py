"""Kernel arguments: dtype, memory layout and address of an operator's tensors.

A weight, its gradients and its update must have one dense memory layout; other tensors are copied.
"""

import importlib
from dataclasses import dataclass, field
from itertools import accumulate
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
"""Why the compiled module cannot be used, if it cannot."""
try:
    # By name: a failed `from` import would be reported as a circular import.
    importlib.import_module("cs_kernels._C")
except ImportError as error:
    unavailable = f"cs_kernels._C does not import: {error}"
else:
    from cs_kernels import _C

if TYPE_CHECKING:
    from cs_kernels._C import Operands as NativeOperands

TYPES = {dtype: number for number, dtype in enumerate(DTYPES)}

SOLVER_NUMBERS = {name: number for number, name in enumerate(SOLVERS)}

if unavailable is None:
    # Python has these too, as the reference runs without the module.
    for _name, _value in {
        "max_tasks": MOST_TASKS,
        "data_types": [str(dtype).removeprefix("torch.") for dtype in DTYPES],
        "solvers": list(SOLVERS),
        "tolerances": tolerances(),
    }.items():
        if getattr(_C, _name, None) != _value:
            raise ImportError(
                f"cs_kernels._C must have {_name} {_value}, got {getattr(_C, _name, None)}: was it"
                " built from other sources?"
            )

Option = int | float | str | Tensor | None
"""An option of a solver."""

ChannelLayout = tuple[int, int, int, int]
"""A tensor's memory as an array [groups, outer, channels, inner]."""


def as_channels(weight: Tensor, out_channel_dim: int, groups: int) -> tuple[Tensor, ChannelLayout]:
    """The tensor or a contiguous copy, and its memory layout."""
    weight = weight if is_aligned(weight) else weight.clone()
    layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
        assert layout is not None  # a contiguous one has one
    return weight, layout


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that is contiguous and aligned to its elements, as kernels need it."""
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def laid_out(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """A copy in the memory layout of `like`."""
    check_like(tensor, like, name)
    return torch.empty_like(like).copy_(tensor)


def address_of(tensor: Tensor | None) -> int:
    """The address of a tensor's memory; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def misfits(tensors: Grads, likes: Tensors) -> list[int]:
    """The indices of tensors that are None or whose memory layout differs from `likes`."""
    if unavailable is None:
        return _C.misfits(list(tensors), list(likes))
    return [
        index
        for index, (tensor, like) in enumerate(zip(tensors, likes, strict=True))
        if tensor is None
        or (tensor.dtype, tensor.device, tensor.shape, _order(tensor))
        != (like.dtype, like.device, like.shape, _order(like))
    ]


def _order(tensor: Tensor) -> list[int]:
    """The strides of dimensions of more than one element; torch sets the others as it likes."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


class SolverOptions(NamedTuple):
    """The options of a solver as kernels take them."""

    word: int = 0
    """64 bits: a random state, a number or the number of a scale."""
    counter: Tensor | None = None
    """It adds to the random state."""
    rate: float = 0.0
    similarities: Tensor | None = None


def checked_options(gramian: Tensor, *options: Option) -> SolverOptions:
    """The options of a solver for Gramians.

    Raises:
        ValueError: The scale is not one of `ALIGNED_SCALES`, the counter not one on the device, or
            the similarities are not like the Gramians.
        TypeError: They are of another kind.

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
        "options must be none, a scale, a number, a seed, a step and a counter, or similarities, a"
        f" rate and these, got {options}"
    )


@dataclass(frozen=True)
class Shapes:
    """The types and memory layouts of operands, as a key of plans."""

    signature: bytes
    native: "NativeOperands" = field(compare=False)


class Operands:
    """Tensors, and the gradients of all tasks for each, in the same memory layout.

    Args:
        outputs: The updates, or tensors that only define the layout of the gradients.
        grads: Entry `t * tasks + i` is tensor t's gradient for task i.
        tasks: K.
        out_channel_dims: One for each of the first tensors; 0 for the others.
        groups: Convolution groups of the first tensors; 1 for the others.
        name: The name of `outputs` in errors.

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
                raise ValueError(f"{name} must have addresses, got tensors on {device}")
        self._alive: list[Tensor] = []
        for index in self.native.misfits:
            grad = grads[index]
            assert grad is not None
            self._alive.append(laid_out(grad, self.outputs[index // tasks], "grads"))
            self.native.set_gradient(index, self._alive[-1].data_ptr())

    def _refit(self, t: int, name: str) -> None:
        given = self.outputs[t]
        check_device(given, self.outputs[0].device, name)
        check_type(given, name)
        if name == "updates":
            check_writable(given, name)
        self.outputs[t] = torch.empty_like(given, memory_format=torch.contiguous_format)
        self._copies.append((given, self.outputs[t]))

    @property
    def shapes(self) -> Shapes:
        """Their types and memory layouts."""
        return Shapes(self.native.signature(), self.native)

    @property
    def device(self) -> torch.device | None:
        """The device of the outputs, if there are any."""
        return device_of(self.outputs)

    def _channels(self, layers: Tensors, name: str) -> list[int]:
        """The output channels of the first tensors."""
        check_layer_count(len(layers), self.outputs, *self._layouts, name)
        return [self.native.channels(layer) for layer in range(len(layers))]

    def priority_addresses(self, priorities: Tensors) -> tuple[list[Tensor], list[int]]:
        """Given priorities of the first tensors, contiguous, and their addresses.

        Raises:
            ValueError: They do not fit the tensors.

        """
        check_priorities(priorities, self._channels(priorities, "priorities"), self.device)
        kept = list(map(dense, priorities))
        return kept, [priority.data_ptr() for priority in kept]

    def weights(self, weights: Tensors) -> tuple[list[Tensor], list[int]]:
        """Weights of the first tensors, in their updates' memory layout, and their channels."""
        weights, channels = list(weights), self._channels(weights, "weights")
        for layer in _C.misfits(weights, self.outputs[: len(weights)]):
            weights[layer] = laid_out(weights[layer], self.outputs[layer], "weights")
        return weights, channels

    def new_priorities(self, channels: Ints) -> tuple[Tensor, list[int]]:
        """An int64 tensor for the priorities of the first tensors, and each one's address."""
        # Kernels skip a layer without elements; its priorities are task 0.
        make = torch.zeros if 0 in self.native.sizes[: len(channels)] else torch.empty
        priorities = make(sum(channels), dtype=torch.int64, device=self.device)
        starts = list(accumulate(channels, initial=0))[:-1]
        return priorities, [priorities.data_ptr() + priorities.itemsize * s for s in starts]

    def read_outputs(self) -> None:
        """Copies outputs that are not dense into their buffers, for a kernel that adds."""
        for given, output in self._copies:
            output.copy_(given)

    def finish(self) -> None:
        """Copies the buffers of outputs that are not dense back."""
        for given, output in self._copies:
            given.copy_(output)
