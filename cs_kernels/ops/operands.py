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

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
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

MOST_TASKS = 64
"""The limit of Gramian kernels and solvers, on every device."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""In the order of the kernels' numbers."""

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
    layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
    if layout is None:
        weight = weight.contiguous()
        layout = _C.channel_layout(weight.shape, weight.stride(), out_channel_dim, groups)
        assert layout is not None
    return weight, layout


def check_type(tensor: Tensor, name: str) -> None:
    """Raises a TypeError for a dtype that no kernel reads."""
    if tensor.dtype not in DTYPES:
        supported = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} must be one of {supported}, got {tensor.dtype}")


def check_numel(tensor: Tensor, numel: int, name: str) -> None:
    """Raises a ValueError for another number of elements."""
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")


def check_device(tensor: Tensor, device: torch.device, name: str) -> None:
    """Raises a ValueError for a tensor on another device: kernels only get addresses."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def laid_out(tensor: Tensor, like: Tensor, name: str) -> Tensor:
    """The tensor, or a copy in the memory layout of `like`."""
    if tensor.dtype is not like.dtype or tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {tuple(like.shape)} on {like.device},"
            f" got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )
    if _order(tensor) == _order(like):
        return tensor
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


def first_present(grads: Grads, tensors: int, tasks: int) -> list[Tensor]:
    """One gradient for each tensor; an empty tensor where no task has one."""
    like = next(grad for grad in grads if grad is not None)
    present = []
    for t in range(tensors):
        of_tensor = (grad for grad in grads[t * tasks : (t + 1) * tasks] if grad is not None)
        present.append(next(of_tensor, like.new_empty(0)))
    return present


def check_group_of(group_of: Ints, groups: int) -> None:
    """Raises a ValueError for a group outside [0, groups)."""
    if group_of and not 0 <= min(group_of) <= max(group_of) < groups:
        raise ValueError(f"group_of must lie in [0, {groups}), got {list(group_of)}")


def check_factors(gamma: Tensor, running_var: Tensor, numel: int, device: torch.device) -> None:
    """Raises a ValueError or TypeError for gamma or variance of another dtype, device or size."""
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        check_type(tensor, name)
        check_device(tensor, device, name)
        check_numel(tensor, numel, name)


def check_energies(
    energies: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, channels: Ints
) -> int:
    """Raises a ValueError or TypeError for arguments that do not fit the layers; returns K."""
    layers, rows = len(channels), sum(channels)
    tasks = len(eps) // max(layers, 1)
    if min(channels, default=0) < 0:
        raise ValueError(f"channels must not be negative, got {list(channels)}")
    if len(eps) != tasks * layers or (layers and not tasks):
        raise ValueError(f"eps must have K entries for each of {layers} layers, got {len(eps)}")
    if energies.shape != (rows,):
        raise ValueError(f"energies must have shape ({rows},), got {tuple(energies.shape)}")
    check_factors(gamma, running_var, tasks * rows, energies.device)
    return tasks


def check_counter(counter: Tensor | None, device: torch.device) -> None:
    """Raises a ValueError or TypeError for a counter that is not one int64 on the device."""
    if counter is None:
        return
    if counter.dtype is not torch.int64:
        raise TypeError(f"counter must be torch.int64, got {counter.dtype}")
    check_device(counter, device, "counter")
    check_numel(counter, 1, "counter")


def check_offsets(offsets: Ints | None, updates: Tensors) -> None:
    """Raises a ValueError for offsets that are not one an update, or an index outside [0, 2^63)."""
    if offsets is None:
        return
    if len(offsets) != len(updates):
        raise ValueError(
            f"offsets must have {len(updates)} entries, one an update, got {len(offsets)}"
        )
    for offset, update in zip(offsets, updates, strict=True):
        if not 0 <= offset <= 2**63 - update.numel():
            raise ValueError(
                f"offsets must lie in [0, 2^63 - {update.numel()}] for an update of"
                f" {update.numel()} elements, got {offset}"
            )


def check_gramian(gramian: Tensor) -> None:
    """Raises a ValueError for another shape than [..., K, K]."""
    tasks = gramian.shape[-1]
    if gramian.ndim < 2 or gramian.shape[-2] != tasks or not 1 <= tasks <= MOST_TASKS:
        raise ValueError(
            f"gramian must have shape [..., K, K] with K in [1, {MOST_TASKS}],"
            f" got {tuple(gramian.shape)}"
        )


def check_tasks(tasks: int) -> None:
    """Raises a ValueError for more tasks than kernels take."""
    if not 1 <= tasks <= MOST_TASKS:
        raise ValueError(f"tasks must be in [1, {MOST_TASKS}], got {tasks}")


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


def check_similarities(similarities: Tensor, gramian: Tensor) -> None:
    """Raises a ValueError for similarities that kernels cannot update in place."""
    check_device(similarities, gramian.device, "similarities")
    if similarities.dtype is not torch.float64 or similarities.shape != gramian.shape:
        raise ValueError(
            f"similarities must be float64 of shape {tuple(gramian.shape)}, got"
            f" {similarities.dtype} of shape {tuple(similarities.shape)}"
        )
    if not similarities.is_contiguous():
        raise ValueError(f"similarities must be contiguous, got strides {similarities.stride()}")


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
        self.tasks = tasks
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
        self.outputs[t] = torch.empty_like(given, memory_format=torch.contiguous_format)
        self._copies.append((given, self.outputs[t]))

    @property
    def shapes(self) -> Shapes:
        """Their types and memory layouts."""
        return Shapes(self.native.signature(), self.native)

    def check_device(self, tensor: Tensor, name: str) -> None:
        """Raises a ValueError for a tensor that is not on the device of the outputs."""
        for output in self.outputs[:1]:
            check_device(tensor, output.device, name)

    def _check_count(self, tensors: Tensors, name: str) -> None:
        if len(tensors) > len(self.outputs):
            raise ValueError(
                f"{name} must be at most {len(self.outputs)}, one an update, got {len(tensors)}"
            )

    def priority_addresses(self, priorities: Tensors) -> tuple[list[Tensor], list[int]]:
        """Given priorities of the first tensors, contiguous, and their addresses.

        Raises:
            ValueError: They do not fit the tensors.

        """
        self._check_count(priorities, "priorities")
        for layer, priority in enumerate(priorities):
            self.check_device(priority, "priorities")
            channels = self.native.channels(layer)
            if priority.dtype is not torch.int64 or priority.shape != (channels,):
                raise ValueError(
                    f"priorities must be int64 of shape ({channels},),"
                    f" got {priority.dtype} of shape {tuple(priority.shape)}"
                )
        kept = [priority.contiguous() for priority in priorities]
        return kept, [priority.data_ptr() for priority in kept]

    def weights(self, weights: Tensors) -> list[Tensor]:
        """Weights of the first tensors, in the memory layout of their updates."""
        weights = list(weights)
        self._check_count(weights, "weights")
        for layer in _C.misfits(weights, self.outputs[: len(weights)]):
            weights[layer] = laid_out(weights[layer], self.outputs[layer], "weights")
        return weights

    def check_statistics(
        self, weights: Tensors, gamma: Tensor, running_var: Tensor, eps: Floats
    ) -> list[int]:
        """Raises a ValueError or TypeError if they do not fit the layers; returns the channels."""
        channels = [self.native.channels(layer) for layer in range(len(weights))]
        device = self.outputs[0].device if self.outputs else gamma.device
        check_factors(gamma, running_var, self.tasks * sum(channels), device)
        if len(eps) != self.tasks * len(weights):
            raise ValueError(f"eps must have {self.tasks * len(weights)} entries, got {len(eps)}")
        return channels

    def check_products(self, products: Tensor, layers: int, *, written: bool = False) -> None:
        """Raises a ValueError for other products than float64 [layers, K, K] on this device.

        Products to be written must be contiguous too.
        """
        shape = (layers, self.tasks, self.tasks)
        self.check_device(products, "products")
        if products.dtype is not torch.float64 or products.shape != shape:
            raise ValueError(
                f"products must be float64 of shape {shape},"
                f" got {products.dtype} of shape {tuple(products.shape)}"
            )
        if written and not products.is_contiguous():
            raise ValueError(f"products must be contiguous, got strides {products.stride()}")

    def new_priorities(self, channels: Ints) -> tuple[Tensor, list[int]]:
        """An int64 tensor for the priorities of the first tensors, and each one's address."""
        # Kernels skip a layer without elements; its priorities are task 0.
        make = torch.zeros if 0 in self.native.sizes[: len(channels)] else torch.empty
        device = self.outputs[0].device if self.outputs else None
        priorities = make(sum(channels), dtype=torch.int64, device=device)
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
