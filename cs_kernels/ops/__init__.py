"""The operators `torch.ops.cs_kernels.*`: each schema next to its fake implementation.

Each operator runs on the backend selected for the device of its tensors (`backends.py`). The
reference backend defines the results; the other backends match it up to rounding. No operator is
differentiable.

In a list of gradients, entry `t * tasks + i` is tensor t's gradient for task i; a missing gradient
counts as zero. Gamma and running variance of several layers are passed as one flat tensor each: the
layers' [K, O] arrays, concatenated. Output channels lie along a weight's dimension
`out_channel_dim`: 0, or 1 in transposed convolutions, whose convolution groups (`groups`) split
dimension 0. Updates must not alias gradients, except that in `combine_` and `drop_signs_`, an
update may be one of its own tensor's gradients: an element is read from every gradient before it is
written.

Eq. (n) refers to the paper on connection strength. d_ij = <G_i, G_j> over channel group i. The
projection coefficient a_i is the sum of -d_ij / d_ii over the tasks j with d_ij < 0; it is 0 unless
d_ii > 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_kernels.ops import backends
from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
from cs_kernels.ops.backends import available_backends, run_sketch, use_backend
from cs_kernels.ops.checks import (
    check_layouts,
    check_strength,
    check_tasks,
    check_weights,
    first_present,
    out_channels,
)
from cs_kernels.ops.solvers import SOLVERS

__all__ = ["available_backends", "out_channels", "run_sketch", "use_backend"]

_library = torch.library.Library("cs_kernels", "DEF")


def _operator(schema: str) -> Callable[[Callable[..., Any]], None]:
    """Defines an operator; the decorated function is its fake implementation."""
    name = schema.partition("(")[0]
    backends.OPERATORS.append(name)

    def define(fake: Callable[..., Any]) -> None:
        _library.define(schema)
        torch.library.register_fake(f"cs_kernels::{name}", _on_one_device(fake), lib=_library)
        _library.impl(name, _without_negative_bits(name), "Negative")
        for key in ("CPU", "CUDA"):
            _library.impl(name, backends.router(name, key.lower()), key)
        _library.impl(name, backends.router(name, None), "CompositeExplicitAutograd")

    return define


def _on_one_device(fake: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a fake reject tensors on different devices, such as meta tensors among CPU tensors."""

    def call(*args: Any) -> Any:
        devices = {str(leaf.device) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise ValueError(f"tensors must be on one device, got {sorted(devices)}")
        return fake(*args)

    return call


def _without_negative_bits(name: str) -> Callable[..., Any]:
    """Returns the implementation for tensors with a negative bit, such as `x.conj().imag`.

    It calls the operator with copies, because kernels read raw memory. PyTorch's own fallback skips
    tensors in a `Tensor?[]`.
    """

    def call(*args: Any) -> Any:
        operator = getattr(torch.ops.cs_kernels, name).default
        with torch.no_grad():
            copies = tree_map_only(Tensor, Tensor.resolve_neg, args)
            result = operator(*copies)
            for argument, original, copy in zip(
                operator._schema.arguments, args, copies, strict=False
            ):
                if argument.is_write:
                    for target, values in zip(
                        tree_leaves(original), tree_leaves(copy), strict=True
                    ):
                        if target is not values:
                            target.copy_(values)
        return result

    return call


# A fake names only the arguments that it uses.


@_operator(
    "connection_strength(Tensor weight, Tensor gamma, Tensor running_var, float[] eps,"
    " bool normalize, int out_channel_dim, int groups) -> Tensor"
)
def _(weight: Tensor, gamma: Tensor, *_: object) -> Tensor:
    """Returns float64 [K, O] for one layer."""
    return weight.new_empty(gamma.shape, dtype=torch.float64)


@_operator("task_priority(Tensor strength) -> Tensor")
def _(strength: Tensor) -> Tensor:
    """Returns int64 [O] for strengths [K, O]."""
    check_strength(strength)
    return strength.new_empty((strength.shape[1],), dtype=torch.int64)


@_operator(
    "project_conflicts_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] priorities,"
    " int[] out_channel_dims, int[] groups, int tasks) -> ()"
)
def _(*_: object) -> None:
    """Writes the updates: projected for the first len(priorities) tensors, else plain sums."""


@_operator(
    "phase2_update_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] weights, Tensor gamma,"
    " Tensor running_var, float[] eps, int[] out_channel_dims, int[] groups, int tasks,"
    " Tensor(b!)? products=None) -> Tensor"
)
def _(
    updates: Tensors,
    grads: Grads,
    weights: Tensors,
    gamma: Tensor,
    running_var: Tensor,
    eps: Floats,
    dims: Ints,
    groups: Ints,
    tasks: int,
    products: Tensor | None = None,
) -> Tensor:
    """Runs `connection_strength`, `task_priority` and `project_conflicts_` on a whole trunk.

    Returns all layers' priorities, concatenated, as int64. `products`, float64 [layers, K, K],
    receives the channel groups' d_ij.
    """
    channels = check_layouts(updates, dims, groups, len(weights), "weights")
    return gamma.new_empty((sum(channels),), dtype=torch.int64)


# Phase 2 in several operators, for weights or gradients sharded over devices: energies and products
# are sums, so they can be reduced over the shards between two operators.


@_operator("channel_energies(Tensor[] weights, int[] out_channel_dims, int[] groups) -> Tensor")
def _(weights: Tensors, dims: Ints, groups: Ints) -> Tensor:
    """Returns each channel's sum of squared weights, float64, concatenated over layers.

    This is Eq. (4) times the size of the kernel window, a factor that cancels in Eq. (7).
    """
    check_weights(weights, dims, groups)
    channels = sum(map(out_channels, weights, dims, groups))
    return weights[0].new_empty((channels,), dtype=torch.float64)


@_operator(
    "energy_priority(Tensor energies, Tensor gamma, Tensor running_var, float[] eps,"
    " int[] channels) -> Tensor"
)
def _(energies: Tensor, *_: object) -> Tensor:
    """Returns all layers' priorities, concatenated, as int64; `channels` lists each layer's O."""
    return energies.new_empty(energies.shape, dtype=torch.int64)


@_operator(
    "phase2_products_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] priorities,"
    " int[] out_channel_dims, int[] groups, int tasks) -> Tensor"
)
def _(updates: Tensors, grads: Grads, priorities: Tensors, *layers_and_tasks: Any) -> Tensor:
    """Writes the plain sums; returns the channel groups' d_ij, float64 [layers, K, K].

    `phase2_apply_` with these products then completes the update of `project_conflicts_`.
    """
    tasks = layers_and_tasks[-1]
    like = updates[0] if updates else torch.empty(0)
    return like.new_empty((len(priorities), tasks, tasks), dtype=torch.float64)


@_operator(
    "phase2_apply_(Tensor(a!)[] updates, Tensor?[] grads, Tensor[] priorities, Tensor products,"
    " int[] out_channel_dims, int[] groups, int tasks) -> ()"
)
def _(*_: object) -> None:
    """Adds a_i * G_i to the first len(priorities) updates, in each channel group i.

    Later updates are unchanged.
    """


@_operator("gramian(Tensor?[] grads, int[] group_of, int groups, int tasks) -> Tensor")
def _(grads: Grads, group_of: Ints, groups: int, tasks: int) -> Tensor:
    """Returns float64 [groups, K, K]: the dot products of the tasks' gradients.

    They are summed over the tensors of a group; tensor t is in group `group_of[t]`.
    """
    check_tasks(tasks)
    like = first_present(grads, 1, len(grads))[0]
    return like.new_empty((groups, tasks, tasks), dtype=torch.float64)


@_operator(
    "combine_(Tensor(a!)[] updates, Tensor?[] grads, Tensor weights, int[] group_of, int tasks,"
    " int? protected=None) -> ()"
)
def _(*_: object) -> None:
    """Writes each tensor's weighted sum of gradients; `weights` has shape [groups, K].

    Where the protected task's gradient is nonzero and the sum differs from it in sign, the update
    is this gradient.
    """


@_operator(
    "drop_signs_(Tensor(a!)[] updates, Tensor?[] grads, float[] leaks, int seed, int step,"
    " int tasks, Tensor? counter=None, int[]? offsets=None) -> ()"
)
def _(*_: object) -> None:
    """Writes, per element, the sum of either the positive or the negative gradients, at random.

    The probability of each sum is its share of the sum of absolute values. The fraction leaks[i] of
    task i's gradient is always added. The draw is a function of the seed, of `step + counter` and
    of the element's index. `counter` is one int64 that GPU kernels read from device memory, so
    every replay of a CUDA graph draws anew.

    Indices count up from a tensor's offset in memory order. Without offsets, each tensor's indices
    continue after the previous tensor's. With shards, the offset of a shard is the index of its
    first element among the elements of the full tensors.
    """


@_operator("sketch_(Tensor(a!) sketch, Tensor[] tensors, int[] offsets, int seed) -> ()")
def _(*_: object) -> None:
    """Adds the elements of tensors, with pseudorandom signs, to a linear sketch, float32 [d].

    The dot product of two sketches with the same seed is an unbiased estimate of the dot product of
    the sketched vectors x and y, with a variance of about (|x|^2 |y|^2 + <x, y>^2) / d. A vector
    may be sketched tensor by tensor.

    An element's sign and bin depend only on the seed and on the element's index, which is its
    tensor's offset plus its row-major position in the tensor, whatever the memory layout. A
    vector's sketch is therefore the sum of its shards' sketches. d is a power of two in
    [256, 2^30]. Sums are accumulated in float32 in index order and are bitwise equal on every
    backend.
    """


@_operator(
    "sketch_and_weight_(Tensor(a!) sketch, Tensor(b!)[] updates, Tensor[] tensors, int[] offsets,"
    " int seed, Tensor weight, bool add) -> ()"
)
def _(*_: object) -> None:
    """As `sketch_`; also writes weight * tensors to the updates or, if `add`, adds it to them.

    Tensors are read once. The weight is a float64 scalar. An update may be the tensor itself.
    """


def _weights(gramian: Tensor, *_: object) -> Tensor:
    """Returns float64 weights [..., K] for Gramians [..., K, K]."""
    return gramian.new_empty(gramian.shape[:-1], dtype=torch.float64)


for _name, _options in SOLVERS.items():
    _arguments = ", ".join(filter(None, ["Tensor gramian", _options]))
    _operator(f"{_name}_weights({_arguments}) -> Tensor")(_weights)
