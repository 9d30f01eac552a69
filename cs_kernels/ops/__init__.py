"""The operators `torch.ops.cs_kernels.*`: every schema next to its fake, and who computes it.

Each is computed by the backend in force for the device of its tensors (`backends.py`). The
reference defines the results; the others agree with it to rounding. None is differentiable: a
gradient is what they take, not what they have.

A list over tensors comes with the tasks inside: entry `t * tasks + i` is tensor t of task i. Gamma
and running variance of several layers are [K, O] of one flattened after those of the other. The
output channels of a weight are its dimension `out_channel_dim`: 0, or 1 in transposed convolutions,
whose `groups` lie in blocks of dimension 0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops import backends
from cs_kernels.ops.backends import available_backends, use_backend

__all__ = ["available_backends", "out_channels", "use_backend"]

_library = torch.library.Library("cs_kernels", "DEF")


def out_channels(weight: Tensor, out_channel_dim: int, groups: int) -> int:
    """The number of output channels of a weight."""
    return weight.shape[out_channel_dim] * (groups if out_channel_dim == 1 else 1)


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines an operator; the decorated function is its fake."""
    name = schema.partition("(")[0]

    def define(fake: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        torch.library.register_fake(f"cs_kernels::{name}", fake, lib=_library)
        for key in ("CPU", "CUDA"):
            _library.impl(name, backends.router(name, key.lower()), key)
        _library.impl(name, backends.router(name, None), "CompositeExplicitAutograd")
        return fake

    return define


@_operator(
    "connection_strength(Tensor weight, Tensor gamma, Tensor running_var, float[] eps,"
    " bool normalize, int out_channel_dim, int groups) -> Tensor"
)
def _(
    weight: Tensor,
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    normalize: bool,
    out_channel_dim: int,
    groups: int,
) -> Tensor:
    """Float64 [K, O] of one layer."""
    return weight.new_empty(gamma.shape, dtype=torch.float64)


@_operator("task_priority(Tensor strength) -> Tensor")
def _(strength: Tensor) -> Tensor:
    """int64 [O] from [K, O]."""
    return strength.new_empty((strength.shape[1],), dtype=torch.int64)


@_operator(
    "project_conflicts_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] priorities,"
    " int[] out_channel_dims, int[] groups, int tasks) -> ()"
)
def _(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    priorities: Sequence[Tensor],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> None:
    """Writes the update of every tensor: the first len(priorities) projected, the others summed.

    A missing gradient counts as zero. The updates share no memory with the gradients.
    """


@_operator(
    "phase2_update_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] weights, Tensor gamma,"
    " Tensor running_var, float[] eps, int[] out_channel_dims, int[] groups, int tasks)"
    " -> Tensor"
)
def _(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    gamma: Tensor,
    running_var: Tensor,
    eps: Sequence[float],
    out_channel_dims: Sequence[int],
    groups: Sequence[int],
    tasks: int,
) -> Tensor:
    """`connection_strength`, `task_priority` and `project_conflicts_` of a whole trunk in one call.

    Returns the priorities, int64 [O] of one layer after the other.
    """
    channels = map(out_channels, weights, out_channel_dims, groups)
    return gamma.new_empty((sum(channels),), dtype=torch.int64)


@_operator("gramian(Tensor?[] grads, int[] group_of, int groups, int tasks) -> Tensor")
def _(grads: Sequence[Tensor | None], group_of: Sequence[int], groups: int, tasks: int) -> Tensor:
    """Float64 [groups, K, K]: the products of the tasks' gradients, of each group of tensors."""
    like = next(grad for grad in grads if grad is not None)
    return like.new_empty((groups, tasks, tasks), dtype=torch.float64)


@_operator(
    "combine_(Tensor(a!)[] updates, Tensor?[] grads, Tensor weights, int[] group_of, int tasks)"
    " -> ()"
)
def _(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Tensor,
    group_of: Sequence[int],
    tasks: int,
) -> None:
    """Writes the weighted sum of every tensor's gradients; weights [groups, K]."""


@_operator(
    "drop_signs_(Tensor(a!)[] updates, Tensor?[] grads, float[] leaks, int seed, int step,"
    " int tasks) -> ()"
)
def _(
    updates: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaks: Sequence[float],
    seed: int,
    step: int,
    tasks: int,
) -> None:
    """Writes of each element the positive or the negative gradients' sum, drawn by their shares."""


def _weights(gramian: Tensor, *options: object) -> Tensor:
    """Float64 [..., K] from Gramians [..., K, K]."""
    del options
    return gramian.new_empty(gramian.shape[:-1], dtype=torch.float64)


_operator("pcgrad_weights(Tensor gramian, int seed, int step) -> Tensor")(_weights)
_operator("cagrad_weights(Tensor gramian, float c) -> Tensor")(_weights)
_operator("mgda_weights(Tensor gramian) -> Tensor")(_weights)
_operator("aligned_mtl_weights(Tensor gramian, str scale) -> Tensor")(_weights)
_operator("nash_mtl_weights(Tensor gramian) -> Tensor")(_weights)
_operator("imtl_g_weights(Tensor gramian) -> Tensor")(_weights)
_operator("upgrad_weights(Tensor gramian) -> Tensor")(_weights)
