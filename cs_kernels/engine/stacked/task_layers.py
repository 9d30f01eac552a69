"""Convolutions and linear layers that keep the tasks' gradients apart in a stacked pass.

In a stacked pass, dimension 0 of a tensor holds the tasks' batches, concatenated. From each task's
part, a convolution or linear layer computes the gradients of its weight and bias for that task, and
passes them to `LayerUpdates`. Gradients that need no surgery go to autograd as usual.

A tensor subclass (`TaskWeight`) replaces the weight in the module, since only a subclass intercepts
every function that takes the weight. It relies on undocumented features of torch, tested with 2.10
to 2.14: a tensor subclass in `Module._parameters`, `torch_internals/subclasses.py`, and
`__torch_function__` for every attribute in `_FACTS`.

Memory traffic: forward and input-gradient kernels read the weight once for all tasks; the
weight-gradient kernels of all tasks together read inputs and output gradients once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from cs_kernels.engine.stacked.layer_updates import LayerUpdates
from cs_kernels.torch_internals.autograd import is_node_of
from cs_kernels.torch_internals.subclasses import DisableTorchFunctionSubclass, as_parameter


class Kind(NamedTuple):
    """The options of a convolution, as torch.convolution takes them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


@dataclass
class Stack:
    """The state that the layers of a stacked pass share."""

    parts: int
    """The number of tasks that take part."""
    updates: LayerUpdates
    problem_of: Callable[[Tensor, str], Exception | None]
    """Takes a layer's input and name; returns an error if the input does not consist of the tasks'
    parts, else None."""
    runs: bool = False
    """Whether the trunk is running on the batches of all tasks."""
    inputs: dict[int, tuple[Tensor, int, Tensor, int]] = field(default_factory=dict)
    """By `id` of a repeated input: this input and its version, the original and its version."""
    layers: list[tuple[nn.Parameter, ...]] = field(default_factory=list)
    """The parameters, weight or bias or both, of the layers that ran."""
    other_uses: dict[nn.Parameter, str] = field(default_factory=dict)
    """The parameters that were used outside of layers, and how."""
    problems: dict[nn.Parameter, Exception] = field(default_factory=dict)
    """The parameters of layers whose inputs do not consist of the tasks' parts, and the errors."""


class TaskWeight(Tensor):
    """Stands for the weight or bias of a layer during a stacked pass.

    A convolution or linear layer that gets a TaskWeight runs as `_TaskLayer`. Any other function
    gets the parameter itself, and is recorded if it reads the values.
    """

    parameter: nn.Parameter
    label: str
    stack: Stack

    @staticmethod
    def of(parameter: nn.Parameter, label: str, stack: Stack) -> "TaskWeight":
        """Makes the stand-in of a parameter; errors call it `label`."""
        # The stand-in's graph leads to the parameter, since some functions, such as scripted
        # functions, ignore the subclass.
        with torch.enable_grad():
            weight = parameter.as_subclass(TaskWeight)
        weight.parameter, weight.label, weight.stack = parameter, label, stack
        as_parameter(weight)
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs a layer, or another function with the parameter itself."""
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            layer = _LAYERS.get(func)
            if layer is not None:
                if "input" in kwargs:
                    args, kwargs = (kwargs["input"], *args), {**kwargs}
                    del kwargs["input"]
                if _runs_as_layer(*args, **kwargs):
                    return layer(*args, **kwargs)

            # x.to(weight) reads only the dtype and the device.
            casts = func in (Tensor.to, Tensor.type_as) and not isinstance(args[0], TaskWeight)

            def parameter_of(weight: TaskWeight) -> nn.Parameter:
                if func not in _FACTS and layer is None and not casts:
                    name = str(getattr(func, "__name__", func))
                    weight.stack.other_uses[weight.parameter] = f"in {name}"
                return weight.parameter

            args, kwargs = tree_map_only(TaskWeight, parameter_of, (args, kwargs))
            return func(*args, **kwargs)


def _runs_as_layer(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: object, **kwargs: object
) -> bool:
    """Whether a layer runs as `_TaskLayer`; the stack records the layer, or why it does not."""
    stand_ins = [tensor for tensor in (weight, bias) if isinstance(tensor, TaskWeight)]
    if not stand_ins or any(isinstance(a, TaskWeight) for a in (x, *args, *kwargs.values())):
        return False
    stack, parameters = stand_ins[0].stack, tuple(s.parameter for s in stand_ins)
    if not stack.runs:
        stack.other_uses.update(dict.fromkeys(parameters, "outside of run"))
        return False
    problem = stack.problem_of(x, stand_ins[0].label)
    if problem is not None:
        stack.problems.update(dict.fromkeys(parameters, problem))
        return False
    stack.layers.append(parameters)
    return True


_FACTS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(torch.rand_like, torch.randn_like),
}
"""Functions that do not read the values of a weight."""


def _sizes(size: Any, dims: int) -> tuple[int, ...]:
    sizes = tuple(size) if isinstance(size, tuple | list) else (size,)
    return sizes * dims if len(sizes) == 1 else sizes


def _convolution(dims: int) -> Callable[..., Tensor]:
    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        dilation = _sizes(dilation, dims)
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            padding = tuple(total // 2 for total in totals)
            if any(total % 2 for total in totals):  # An odd total pads one more element at the end.
                x = functional.pad(x, [n for total in reversed(totals) for n in (0, total % 2)])
        padding = _sizes(0 if padding == "valid" else padding, dims)
        kind = Kind(_sizes(stride, dims), padding, dilation, False, (0,) * dims, groups)
        return _run(x, weight, bias, kind)

    return convolution


def _transposed_convolution(dims: int) -> Callable[..., Tensor]:
    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        strides, pads, dilations, out = (
            _sizes(n, dims) for n in (stride, padding, dilation, output_padding)
        )
        return _run(x, weight, bias, Kind(strides, pads, dilations, True, out, groups))

    return convolution


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _run(x, weight, bias, None)


_LAYERS: dict[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution(1),
    functional.conv2d: _convolution(2),
    functional.conv3d: _convolution(3),
    functional.conv_transpose1d: _transposed_convolution(1),
    functional.conv_transpose2d: _transposed_convolution(2),
    functional.conv_transpose3d: _transposed_convolution(3),
}


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Kind | None) -> Tensor:
    """Runs a layer; for a linear one, `kind` is None."""
    (stack, *_) = (t.stack for t in (weight, bias) if isinstance(t, TaskWeight))
    weight = weight.parameter if isinstance(weight, TaskWeight) else weight
    bias = bias.parameter if isinstance(bias, TaskWeight) else bias
    once = False
    if id(x) in stack.inputs:
        repeated, version, given, given_version = stack.inputs[id(x)]
        once = x._version == version and given._version == given_version and repeated is x
        x = given if once else x
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _apply(x, weight, bias, kind, stack, once, None)
    dtype = None if x.dtype is torch.float64 else torch.get_autocast_dtype(device)
    x = x if dtype is None else x.to(dtype)
    with torch.autocast(device, enabled=False):  # `_TaskLayer` casts as autocast would.
        return _apply(x, weight, bias, kind, stack, once, dtype)


class _TaskLayer(torch.autograd.Function):
    """Runs a layer; with `once`, its input is one batch for all tasks, not repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind | None,
        stack: Stack,
        once: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # With checkpointing, `save_for_backward` would return a copy of the parameter.
        ctx.weight, ctx.bias, ctx.version = weight, bias, weight._version
        ctx.kind, ctx.stack, ctx.once, ctx.dtype = kind, stack, once, dtype
        cast_weight = weight if dtype is None else weight.to(dtype)
        cast_bias = bias if bias is None or dtype is None else bias.to(dtype)
        if kind is None:
            y = functional.linear(x, cast_weight, cast_bias)
        else:
            y = torch.convolution(x, cast_weight, cast_bias, *kind)
        return y.repeat(stack.parts, *[1] * (y.dim() - 1)) if once else y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "losses for step_together must not be computed from gradients that came through"
                " trunk, got a backward pass with create_graph=True, as for a gradient penalty: use"
                " step"
            )
        (x,) = ctx.saved_tensors
        kind, stack, given, bias = ctx.kind, ctx.stack, ctx.weight, ctx.bias
        if given._version != ctx.version:
            raise RuntimeError(
                "forward must leave the weights of trunk alone until the step is made, but one of"
                f" shape {tuple(given.shape)} was changed in place"
            )
        weight = given if ctx.dtype is None else given.to(ctx.dtype)
        of_input = of_weight = of_bias = None
        grads = grad.chunk(stack.parts)
        if ctx.once:
            grad = sum(grads[1:], grads[0])
        updates = stack.updates
        takes_weight = ctx.needs_input_grad[1] and given in updates.taken
        takes_bias = ctx.needs_input_grad[2] and bias in updates.taken
        updates.make_room([given] * takes_weight + [bias] * takes_bias)
        if ctx.needs_input_grad[1]:
            if takes_weight:
                inputs = [x] * stack.parts if ctx.once else x.chunk(stack.parts)
                parts = zip(grads, inputs, strict=True)
                updates.hand_over(given, (_of_weight(g, part, weight, kind) for g, part in parts))
            else:
                of_weight = _of_weight(grad, x, weight, kind).to(given.dtype)
        if ctx.needs_input_grad[0]:
            of_input = grad @ weight if kind is None else _backward(grad, x, weight, kind, 0)
        if ctx.needs_input_grad[2]:
            others = [d for d in range(grad.dim()) if d != (grad.dim() - 1 if kind is None else 1)]
            if takes_bias:
                updates.hand_over(bias, (g.sum(others) for g in grads))
            else:
                of_bias = grad.sum(others).to(bias.dtype)
        return of_input, of_weight, of_bias, None, None, None, None


_apply = cast("Callable[..., Tensor]", _TaskLayer.apply)


def is_task_layer(node: object) -> bool:
    """Whether a node of autograd's graph is a `_TaskLayer`."""
    return is_node_of(node, _TaskLayer)


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, kind: Kind | None) -> Tensor:
    if kind is None:
        return grad.flatten(0, -2).t() @ x.flatten(0, -2)
    return _backward(grad, x, weight, kind, 1)


def _backward(grad: Tensor, x: Tensor, weight: Tensor, kind: Kind, which: int) -> Tensor:
    """The gradient of a convolution with respect to its input (0) or weight (1)."""
    mask = [which == 0, which == 1, False]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        grad, x, weight, None, *kind, mask
    )
    return found[which]
