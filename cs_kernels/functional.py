"""The paper's equations on plain tensors, computed by the selected backend.

K is the number of tasks, O the number of output channels. A weight's output channels are its
dimension `out_channel_dim`: 0 for convolutions and linear layers, 1 for transposed convolutions,
whose `groups` are blocks of dimension 0. No function is differentiable.

`out=` takes a tensor for a result of a gradient's size. In a loop, it saves an allocation per call;
touching new memory pages can take longer than the computation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cs_kernels.ops.checks import (
    check_device,
    check_layout,
    check_strength,
    check_type,
    check_writable,
    out_channels,
)

__all__ = [
    "combine",
    "connection_strength",
    "gramian",
    "phase2_update",
    "project_conflicts",
    "task_priority",
]


def connection_strength(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    *,
    eps: float | Sequence[float] = 1e-5,
    normalize: bool = True,
    out_channel_dim: int = 0,
    groups: int = 1,
) -> Tensor:
    """How much each output channel of a layer contributes to each task, Eq. (6) and (7).

    `S_p^i = gamma_{i,p}^2 / (Var_{i,p} + eps_i) * energy_p`, where the energy of a channel is the
    sum of its squared weights divided by the size of the kernel window, Eq. (4). After
    normalization, each task's strengths sum to 1 over the layer, or are all 0.

    Args:
        weight: The layer's weight, of any floating dtype.
        gamma: [K, O], the scale of each task's normalization.
        running_var: [K, O], the running variance of each task's normalization.
        eps: The normalization's epsilon, one number for all tasks or one per task.
        normalize: Whether to divide by the sum over the layer.
        out_channel_dim: 0 or 1.
        groups: The groups of a transposed convolution.

    Returns:
        Float64 [K, O].

    Raises:
        ValueError: A shape, device or option does not fit; the message names the argument.
        TypeError: A dtype does not fit.

    Examples:
        >>> weight = torch.tensor([[1.0, 1.0], [2.0, 0.0]])
        >>> gamma = torch.tensor([[1.0, 1.0], [3.0, 1.0]])
        >>> cs.functional.connection_strength(weight, gamma, torch.ones(2, 2), eps=0.0)
        tensor([[0.3333, 0.6667],
                [0.8182, 0.1818]], dtype=torch.float64)

    """
    eps = _check_layer(weight, gamma, running_var, eps, out_channel_dim, groups)
    result: Tensor = torch.ops.cs_kernels.connection_strength(
        weight.detach(),
        gamma.detach(),
        running_var.detach(),
        eps,
        normalize,
        out_channel_dim,
        groups,
    )
    return result


def task_priority(strength: Tensor) -> Tensor:
    """The task with the greatest strength at each channel, Eq. (10).

    Args:
        strength: Floating [K, O]. Only normalized strengths can be compared between tasks.

    Returns:
        int64 [O]. A tie goes to the lowest index; a NaN never beats a number.

    Raises:
        ValueError: The shape does not fit.
        TypeError: The dtype does not fit.

    """
    check_strength(strength)
    result: Tensor = torch.ops.cs_kernels.task_priority(strength.detach())
    return result


def project_conflicts(
    grads: Tensor,
    priority: Tensor,
    *,
    out_channel_dim: int = 0,
    groups: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """The joint update of one layer whose channels belong to tasks (Algorithm 1, Phase 2).

    The channels of task i form the channel group CG_i; task i's gradient there is the reference
    gradient G_i. Any other task's gradient in conflict with G_i (a negative dot product over the
    whole channel group) loses its component along G_i. The update is the sum of the results.

    Args:
        grads: [K, *weight.shape].
        priority: int64 [O], each in [0, K).
        out_channel_dim: 0 or 1.
        groups: The groups of a transposed convolution.
        out: A tensor for the update, with the weight's shape, and the device and dtype of `grads`,
            with which it must share no memory. The memory layout of `grads[0]` is fastest.

    Returns:
        The update, with the weight's shape: `out`, if given.

    Raises:
        ValueError: A shape, a device, an option or `out` is invalid. The values of `priority` are
            checked on the CPU only; on a GPU, where a check would need a host synchronization, a
            channel with a priority outside [0, K) gets the plain sum.
        TypeError: A dtype does not fit.

    """
    _check_grads(grads)
    weight = grads[0]
    check_layout(weight, out_channel_dim, groups)
    channels = out_channels(weight, out_channel_dim, groups)
    if priority.dtype is not torch.int64:
        raise TypeError(f"priority must be torch.int64, got {priority.dtype}")
    if priority.shape != (channels,):
        raise ValueError(f"priority must have shape ({channels},), got {tuple(priority.shape)}")
    check_device(priority, grads.device, "priority")
    if priority.device.type == "cpu" and channels > 0:
        low, high = priority.aminmax()
        if low < 0 or high >= len(grads):
            invalid = int(low if low < 0 else high)
            raise ValueError(f"priority must lie in [0, {len(grads)}), got {invalid}")
    grads = grads.detach()
    update = _check_out(out, grads[0], grads=grads)
    torch.ops.cs_kernels.project_conflicts_(
        [update.detach()], list(grads), [priority], [out_channel_dim], [groups], len(grads)
    )
    return update


def phase2_update(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    grads: Tensor,
    *,
    eps: float | Sequence[float] = 1e-5,
    out_channel_dim: int = 0,
    groups: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`connection_strength`, `task_priority` and `project_conflicts` of one layer in one call.

    `grads` is [K, *weight.shape], in the weight's dtype. `out` is a tensor for the update, as in
    `project_conflicts`, and must share no memory with any other argument. All other arguments are
    as in `connection_strength`.

    Returns:
        The update in the weight's shape and dtype (`out`, if given), and the priority, int64 [O].

    Raises:
        ValueError: A shape, a device, an option or `out` is invalid; the message names the
            argument.
        TypeError: A dtype does not fit.

    """
    eps = _check_layer(weight, gamma, running_var, eps, out_channel_dim, groups)
    _check_grads(grads)
    if grads.shape != (len(gamma), *weight.shape):
        expected = (len(gamma), *weight.shape)
        raise ValueError(f"grads must have shape {expected}, got {tuple(grads.shape)}")
    if grads.dtype is not weight.dtype:
        raise TypeError(f"grads must have the weight's dtype {weight.dtype}, got {grads.dtype}")
    check_device(grads, weight.device, "grads")
    inputs = {"weight": weight, "grads": grads, "gamma": gamma, "running_var": running_var}
    update = _check_out(out, weight, **inputs)
    priority: Tensor = torch.ops.cs_kernels.phase2_update_(
        [update.detach()],
        list(grads.detach()),
        [weight.detach()],
        gamma.detach().flatten(),
        running_var.detach().flatten(),
        eps,
        [out_channel_dim],
        [groups],
        len(grads),
    )
    return update, priority


def gramian(grads: Tensor) -> Tensor:
    """The dot products of K gradients: `G[i, j] = <grads[i], grads[j]>`.

    Args:
        grads: [K, N] or [K, *shape], of any floating dtype.

    Returns:
        Float64 [K, K].

    Raises:
        ValueError: The shape does not fit.
        TypeError: The dtype does not fit.

    Examples:
        >>> cs.functional.gramian(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
        tensor([[5., 1.],
                [1., 2.]], dtype=torch.float64)

    """
    _check_grads(grads)
    grads = grads.detach()
    result: Tensor = torch.ops.cs_kernels.gramian(list(grads), [0], 1, len(grads))
    return result[0]


def combine(grads: Tensor, coefficients: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The weighted sum of K gradients.

    Args:
        grads: [K, N] or [K, *shape], of any floating dtype.
        coefficients: Floating [K].
        out: A tensor for the sum, [N] or [*shape], with the device and dtype of `grads`, with which
            it must share no memory. The memory layout of `grads[0]` is fastest.

    Returns:
        [N] or [*shape], in the dtype of `grads`: `out`, if given.

    Raises:
        ValueError: A shape, a device or `out` is invalid.
        TypeError: A dtype does not fit.

    Examples:
        >>> grads = torch.tensor([[1.0, 2.0], [-1.0, 1.0]])
        >>> update = torch.empty(2)
        >>> cs.functional.combine(grads, torch.tensor([0.5, 0.25]), out=update) is update
        True
        >>> update
        tensor([0.2500, 1.2500])

    """
    _check_grads(grads)
    check_type(coefficients, "coefficients")
    if coefficients.shape != (len(grads),):
        raise ValueError(
            f"coefficients must have shape ({len(grads)},), got {tuple(coefficients.shape)}"
        )
    check_device(coefficients, grads.device, "coefficients")
    grads = grads.detach()
    update = _check_out(out, grads[0], grads=grads, coefficients=coefficients)
    torch.ops.cs_kernels.combine_(
        [update.detach()], list(grads), coefficients.detach().unsqueeze(0), [0], len(grads)
    )
    return update


def _check_out(out: Tensor | None, like: Tensor, **inputs: Tensor) -> Tensor:
    """The tensor for a result: `out`, which must not overlap an input, or a new one like `like`."""
    if out is None:
        return torch.empty_like(like)
    if out.dtype is not like.dtype or out.shape != like.shape or out.device != like.device:
        raise ValueError(
            f"out must be {like.dtype} of shape {tuple(like.shape)} on {like.device},"
            f" got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    check_writable(out, "out")
    for name, tensor in inputs.items():
        if _ranges_overlap(out, tensor):
            raise ValueError(f"out must not overlap the memory range of {name}, but it does")
    return out


def _ranges_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory ranges from the first to the last element of two tensors overlap."""
    if torch.compiler.is_compiling() or a.is_meta or b.is_meta:  # No addresses to compare.
        return False
    if a.device != b.device or 0 in (a.numel(), b.numel()):
        return False
    (first, end), (other_first, other_end) = _address_range(a), _address_range(b)
    return first < other_end and other_first < end


def _address_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the byte after its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


def _check_layer(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: float | Sequence[float],
    out_channel_dim: int,
    groups: int,
) -> list[float]:
    """Checks the arguments; returns eps as a list, one number per task."""
    check_type(weight, "weight")
    check_layout(weight, out_channel_dim, groups)
    channels = out_channels(weight, out_channel_dim, groups)
    for name, tensor in (("gamma", gamma), ("running_var", running_var)):
        check_type(tensor, name)
        if tensor.ndim != 2 or tensor.shape[0] == 0 or tensor.shape[1] != channels:
            raise ValueError(f"{name} must have shape [K, {channels}], got {tuple(tensor.shape)}")
        check_device(tensor, weight.device, name)
    if running_var.shape != gamma.shape:
        raise ValueError(
            f"running_var must have the shape of gamma, {tuple(gamma.shape)},"
            f" got {tuple(running_var.shape)}"
        )
    if isinstance(eps, Sequence):
        if len(eps) != len(gamma):
            raise ValueError(f"eps must be a number or {len(gamma)} numbers, got {eps}")
        return [float(e) for e in eps]
    return [float(eps)] * len(gamma)


def _check_grads(grads: Tensor) -> None:
    check_type(grads, "grads")
    if grads.ndim < 2 or grads.shape[0] == 0:
        raise ValueError(
            "grads must have shape [K, *shape], with K > 0 and at least one dimension in shape,"
            f" got {tuple(grads.shape)}"
        )
