"""Checks of operator arguments, shared by all backends.

A failed check raises a ValueError, or a TypeError if it checks only a dtype; the message names the
argument and quotes its value. Gradients can number in the thousands, so backends that read memory
by address check them in C++ (`python/operands.cpp`), by the rules of `check_gradients`.
"""

from functools import cache
from itertools import chain, repeat
from math import inf

import torch
from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors

MOST_TASKS = 64
"""The maximum number of tasks. Connection strength and Phase 2 have no maximum in the backends
reference and cpu."""

LEAST_SKETCH, MOST_SKETCH = 256, 1 << 30
"""Limits on a sketch's number of bins: a Triton program owns 256, and bin indices have 32 bits."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The supported dtypes, in the order of the kernels' type numbers."""


def out_channels(weight: Tensor, out_channel_dim: int, groups: int) -> int:
    """The number of output channels of a weight."""
    return weight.shape[out_channel_dim] * (groups if out_channel_dim == 1 else 1)


def device_of(tensors: Tensors) -> torch.device | None:
    return tensors[0].device if tensors else None


def check_type(tensor: Tensor, name: str) -> None:
    if tensor.dtype not in DTYPES:
        supported = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name} must be one of {supported}, got {tensor.dtype}")


def check_numel(tensor: Tensor, numel: int, name: str) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")


def check_count(count: int, expected: int, name: str, unit: str) -> None:
    if count != expected:
        raise ValueError(f"{name} must have {expected} entries, {unit}, got {count}")


def check_device(tensor: Tensor, device: torch.device | None, name: str) -> None:
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


@cache
def _without_float64(device_type: str) -> str | None:
    """Torch's error message if a device type has no float64, else None."""
    try:
        torch.empty(0, dtype=torch.float64, device=device_type)
    except (TypeError, RuntimeError) as error:
        return str(error)
    return None


def check_float64(device: torch.device, name: str) -> None:
    """Raises a ValueError on a device without float64, the dtype of task weights."""
    why = _without_float64(device.type)
    if why is not None:
        raise ValueError(
            f"{name} must be on a device with float64, got {device}: train on the CPU, which has"
            f" compiled kernels. Torch says: {why}"
        )


def check_like(tensor: Tensor, like: Tensor, name: str) -> None:
    if tensor.dtype is not like.dtype or tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} of shape {tuple(like.shape)} on {like.device},"
            f" got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
        )


def is_aligned(tensor: Tensor) -> bool:
    """Whether the address is a multiple of the item size; `torch.frombuffer` does not ensure it."""
    return tensor.data_ptr() % tensor.itemsize == 0


def check_in_place(tensor: Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if not is_aligned(tensor):
        raise ValueError(
            f"{name} must be aligned to its element size, got address {tensor.data_ptr():#x}"
        )


def check_writable(tensor: Tensor, name: str) -> None:
    """Rejects a tensor whose elements share memory, as after `expand`."""
    strides = tensor.stride()
    shared = any(n > 1 and step == 0 for n, step in zip(tensor.shape, strides, strict=True))
    if shared and tensor.numel():
        raise ValueError(
            f"{name} must not have elements that share memory, as after expand(), got strides"
            f" {strides}"
        )


def check_tasks(tasks: int, most: int = MOST_TASKS) -> None:
    if not 1 <= tasks <= most:
        raise ValueError(f"tasks must be in [1, {most}], got {tasks}")


def check_gradients(updates: Tensors, grads: Grads, tasks: int, name: str = "updates") -> None:
    check_grad_count(updates, grads, tasks)
    for t, update in enumerate(updates):
        check_device(update, device_of(updates), name)
        check_type(update, name)
        if name == "updates":
            check_writable(update, name)
        for grad in grads[t * tasks : (t + 1) * tasks]:
            if grad is not None:
                check_like(grad, update, "grads")


def check_grad_count(updates: Tensors, grads: Grads, tasks: int) -> None:
    check_tasks(tasks, 2**31 - 1)
    check_count(len(grads), len(updates) * tasks, "grads", "one per update and task")


def first_present(grads: Grads, tensors: int, tasks: int) -> list[Tensor]:
    """Returns one gradient per tensor, or an empty tensor if no task has one.

    Raises:
        ValueError: All gradients are missing.

    """
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        raise ValueError("grads must have at least one tensor, got none")
    empty, starts = like.new_empty(0), range(0, tensors * tasks, tasks)
    # Usually, the first task has a gradient. `grads` may be too short; its length is checked later.
    firsts = chain(grads[: tensors * tasks : tasks], repeat(None))
    return [
        next((g for g in grads[s : s + tasks] if g is not None), empty) if first is None else first
        for s, first in zip(starts, firsts, strict=False)
    ]


def check_layout(weight: Tensor, out_channel_dim: int, groups: int) -> None:
    if out_channel_dim not in (0, 1):
        raise ValueError(f"out_channel_dim must be 0 or 1, got {out_channel_dim}")
    shape = tuple(weight.shape)
    if weight.ndim <= out_channel_dim:
        raise ValueError(f"out_channel_dim must be a dimension of {shape}, got {out_channel_dim}")
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}")
    if groups > 1 and out_channel_dim == 0:
        raise ValueError(f"groups must be 1 where out_channel_dim is 0, got {groups}")
    if groups > 1 and (shape[0] == 0 or shape[0] % groups):
        raise ValueError(f"groups must divide dimension 0 of {shape}, got {groups}")


def check_layer_count(layers: int, updates: Tensors, dims: Ints, groups: Ints, name: str) -> None:
    if layers > len(updates):
        raise ValueError(
            f"{name} must have at most {len(updates)} entries, one per update, got {layers}"
        )
    check_count(len(dims), layers, "out_channel_dims", "one per layer")
    check_count(len(groups), layers, "groups", "one per layer")


def check_layouts(updates: Tensors, dims: Ints, groups: Ints, layers: int, name: str) -> list[int]:
    """Checks the layers' layouts; returns each layer's number of output channels.

    The layers are the first `layers` updates.
    """
    for layer in zip(updates, dims, groups, strict=False):
        check_layout(*layer)
    check_layer_count(layers, updates, dims, groups, name)
    return list(map(out_channels, updates, dims, groups))


def check_priorities(priorities: Tensors, channels: Ints, device: torch.device | None) -> None:
    for priority, rows in zip(priorities, channels, strict=True):
        check_device(priority, device, "priorities")
        if priority.dtype is not torch.int64 or priority.shape != (rows,):
            raise ValueError(
                f"priorities must be int64 of shape ({rows},),"
                f" got {priority.dtype} of shape {tuple(priority.shape)}"
            )


def check_products(
    products: Tensor, layers: int, tasks: int, device: torch.device | None, *, written: bool = False
) -> None:
    """Checks products; if a kernel writes them, they must be contiguous and aligned."""
    shape = (layers, tasks, tasks)
    check_device(products, device, "products")
    if products.dtype is not torch.float64 or products.shape != shape:
        raise ValueError(
            f"products must be float64 of shape {shape},"
            f" got {products.dtype} of shape {tuple(products.shape)}"
        )
    if written:
        check_in_place(products, "products")


def check_factors(
    gamma: Tensor, running_var: Tensor, numel: int, device: torch.device | None
) -> None:
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        check_type(tensor, name)
        check_device(tensor, device, name)
        check_numel(tensor, numel, name)


def check_statistics(
    gamma: Tensor,
    running_var: Tensor,
    eps: Floats,
    channels: Ints,
    tasks: int,
    device: torch.device | None,
) -> None:
    check_factors(gamma, running_var, tasks * sum(channels), device or gamma.device)
    check_count(len(eps), tasks * len(channels), "eps", "one per layer and task")


def check_layer(
    weight: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, dim: int, groups: int
) -> None:
    check_type(weight, "weight")
    check_layout(weight, dim, groups)
    check_tasks(len(eps), 2**31 - 1)
    shape = len(eps), out_channels(weight, dim, groups)
    check_factors(gamma, running_var, shape[0] * shape[1], weight.device)
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_weights(weights: Tensors, dims: Ints, groups: Ints) -> None:
    if not weights:
        raise ValueError("weights must have at least one tensor, got []")
    for weight in weights:
        check_type(weight, "weights")
        check_device(weight, device_of(weights), "weights")
    check_layouts(weights, dims, groups, len(weights), "weights")


def check_energies(
    energies: Tensor, gamma: Tensor, running_var: Tensor, eps: Floats, channels: Ints
) -> int:
    """Checks the arguments of `energy_priority`; returns K."""
    layers, rows = len(channels), sum(channels)
    tasks = len(eps) // max(layers, 1)
    if min(channels, default=0) < 0:
        raise ValueError(f"channels must not be negative, got {list(channels)}")
    if len(eps) != tasks * layers or (layers and not tasks):
        raise ValueError(f"eps must have K entries for each of {layers} layers, got {len(eps)}")
    check_type(energies, "energies")
    if energies.shape != (rows,):
        raise ValueError(f"energies must have shape ({rows},), got {tuple(energies.shape)}")
    check_factors(gamma, running_var, tasks * rows, energies.device)
    return tasks


def check_strength(strength: Tensor) -> None:
    check_type(strength, "strength")
    if strength.ndim != 2 or strength.shape[0] == 0:
        raise ValueError(f"strength must have shape [K, O], got {tuple(strength.shape)}")


def check_group_of(group_of: Ints, groups: int, tensors: int) -> None:
    check_count(len(group_of), tensors, "group_of", "one per tensor")
    if groups < 0:
        raise ValueError(f"groups must not be negative, got {groups}")
    if group_of and not 0 <= min(group_of) <= max(group_of) < groups:
        raise ValueError(f"group_of must lie in [0, {groups}), got {list(group_of)}")


def check_task_weights(
    weights: Tensor, group_of: Ints, tasks: int, updates: Tensors, protected: int | None = None
) -> None:
    check_tasks(tasks)
    if protected is not None and not 0 <= protected < tasks:
        raise ValueError(f"protected must be None or lie in [0, {tasks}), got {protected}")
    check_type(weights, "weights")
    check_device(weights, device_of(updates), "weights")
    if weights.ndim != 2 or weights.shape[1] != tasks:
        raise ValueError(f"weights must have shape [groups, {tasks}], got {tuple(weights.shape)}")
    check_group_of(group_of, len(weights), len(updates))


def check_signs(
    updates: Tensors, leaks: Floats, tasks: int, counter: Tensor | None, offsets: Ints | None
) -> None:
    check_tasks(tasks)
    check_count(len(leaks), tasks, "leaks", "one per task")
    check_counter(counter, device_of(updates))
    check_offsets(offsets, updates)


def check_counter(counter: Tensor | None, device: torch.device | None) -> None:
    if counter is None:
        return
    if counter.dtype is not torch.int64:
        raise TypeError(f"counter must be torch.int64, got {counter.dtype}")
    check_device(counter, device, "counter")
    check_numel(counter, 1, "counter")
    check_in_place(counter, "counter")


def check_offsets(offsets: Ints | None, tensors: Tensors) -> None:
    if offsets is None:
        return
    check_count(len(offsets), len(tensors), "offsets", "one per tensor")
    for offset, tensor in zip(offsets, tensors, strict=True):
        if not 0 <= offset <= 2**63 - tensor.numel():
            raise ValueError(
                f"offsets must lie in [0, 2^63 - {tensor.numel()}] for a tensor of"
                f" {tensor.numel()} elements, got {offset}"
            )


def check_sketch(sketch: Tensor, tensors: Tensors, offsets: Ints, *, wide: bool = False) -> None:
    """Checks the arguments of `sketch_`; `wide` also allows a float64 sketch."""
    if sketch.dtype is not torch.float32 and not (wide and sketch.dtype is torch.float64):
        raise TypeError(f"sketch must be torch.float32, got {sketch.dtype}")
    size = sketch.numel()
    if sketch.ndim != 1 or not LEAST_SKETCH <= size <= MOST_SKETCH or size & (size - 1):
        raise ValueError(
            f"sketch must have shape [d], with d a power of two in [{LEAST_SKETCH}, 2^30], got"
            f" {tuple(sketch.shape)}"
        )
    check_in_place(sketch, "sketch")
    for tensor in tensors:
        check_type(tensor, "tensors")
        check_device(tensor, sketch.device, "tensors")
    check_offsets(offsets, tensors)
    for offset, tensor in zip(offsets, tensors, strict=True):
        if offset > 2**63 - MOST_SKETCH - tensor.numel():  # Kernels index whole blocks.
            raise ValueError(
                f"offsets must lie in [0, 2^63 - 2^30 - {tensor.numel()}] for a tensor of"
                f" {tensor.numel()} elements, got {offset}"
            )


def fits_sketch(sketch: Tensor, tensor: Tensor, update: Tensor | None) -> bool:
    """Whether `run_sketch` can use the tensors' memory as it is; for the CPU, C++ checks this."""
    used = (tensor,) if update is None else (tensor, update)
    return tensor.dtype in DTYPES and all(
        (t.dtype, t.device, t.shape) == (tensor.dtype, sketch.device, tensor.shape)
        and t.layout is torch.strided
        and t.is_contiguous()
        and is_aligned(t)
        for t in used
    )


def check_weighting(updates: Tensors, tensors: Tensors, weight: Tensor) -> None:
    """Checks the arguments of `sketch_and_weight_` that `sketch_` does not have."""
    check_count(len(updates), len(tensors), "updates", "one per tensor")
    for update, tensor in zip(updates, tensors, strict=True):
        check_like(update, tensor, "updates")
        check_writable(update, "updates")
    if weight.dtype is not torch.float64 or weight.ndim:
        raise ValueError(
            f"weight must be a float64 scalar, got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    check_device(weight, device_of(tensors), "weight")


def check_solver(name: str, gramian: Tensor, *options: object) -> None:
    tasks = gramian.shape[-1] if gramian.ndim else 0
    if gramian.ndim < 2 or gramian.shape[-2] != tasks or not 1 <= tasks <= MOST_TASKS:
        raise ValueError(
            f"gramian must have shape [..., K, K] with K in [1, {MOST_TASKS}],"
            f" got {tuple(gramian.shape)}"
        )
    check_type(gramian, "gramian")
    if name == "fair_grad" and not 0 < options[0] < inf:  # type: ignore[operator]
        raise ValueError(f"alpha must be positive and finite, got {options[0]}")


def check_similarities(similarities: Tensor, gramian: Tensor) -> None:
    check_device(similarities, gramian.device, "similarities")
    if similarities.dtype is not torch.float64 or similarities.shape != gramian.shape:
        raise ValueError(
            f"similarities must be float64 of shape {tuple(gramian.shape)}, got"
            f" {similarities.dtype} of shape {tuple(similarities.shape)}"
        )
    check_in_place(similarities, "similarities")
