"""Kernel arguments, checked against torch's strides and offsets."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers import SMALL, operator_calls
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cs_kernels import _C
from cs_kernels.ops import backends, operands
from cs_kernels.ops.operands import DTYPES, Operands

pytestmark = pytest.mark.kernel

ONE_BY_ONE = torch.ones(12).as_strided((4, 3, 1, 1), (3, 1, 3, 7))

Weight = tuple[Tensor, int, int]


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    """A dense weight with permuted dimensions, its output channels' dimension, and its groups.

    The value of each element is its offset in memory.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    out_channel_dim = draw(st.integers(0, min(1, len(shape) - 1)))
    most = 4 if out_channel_dim else 1
    groups = draw(st.sampled_from([g for g in range(1, most + 1) if shape[0] % g == 0]))
    memory = torch.arange(torch.Size(shape).numel()).view([shape[d] for d in order])
    return memory.permute([order.index(d) for d in range(len(shape))]), out_channel_dim, groups


@given(weights())
def test_layouts_give_the_channel_of_every_element(of: Weight) -> None:
    weight, dim, groups = of
    layout = _C.channel_layout(weight.shape, weight.stride(), dim, groups)
    if layout is None:
        slowest = max(weight.stride(d) for d in range(weight.ndim) if weight.shape[d] > 1)
        assert groups > 1
        assert weight.stride(0) < slowest
        return
    index = torch.meshgrid(*(torch.arange(n) for n in weight.shape), indexing="ij")
    channel = index[dim]
    if groups > 1:
        channel = channel + index[0] // (weight.shape[0] // groups) * weight.shape[1]
    in_memory = torch.empty(weight.numel(), dtype=torch.int64)
    in_memory[weight.flatten()] = channel.flatten()
    of_groups, outer, channels, inner = layout
    expected = torch.arange(of_groups * channels).view(of_groups, 1, channels, 1)
    assert torch.equal(in_memory, expected.expand(of_groups, outer, channels, inner).flatten())


@given(weights())
def test_weights_that_are_not_dense_have_no_layout(of: Weight) -> None:
    weight, dim, groups = of
    spread = [2 * stride for stride in weight.stride()]
    layout = _C.channel_layout(weight.shape, spread, dim, groups)
    assert (layout is None) == (weight.numel() > 1)


def test_misfits_are_the_same_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.zeros(4, 3, 2, 2)
    tensors = [
        like.clone(),
        None,
        like.double(),
        like.to(memory_format=torch.channels_last),
        like[:2],
        nn.Parameter(like.clone()),
        torch.empty_like(like, device="meta"),
    ]
    for reason in (None, "there is none"):
        monkeypatch.setattr(operands, "unavailable", reason)
        assert operands.misfits(tensors, 7 * [like]) == [1, 2, 3, 4, 6]
        assert operands.misfits([ONE_BY_ONE], [torch.zeros(4, 3, 1, 1)]) == []


def test_strides_of_dimensions_of_size_one_are_ignored() -> None:
    read = Operands([torch.zeros(4, 3, 1, 1)], [ONE_BY_ONE], 1)
    assert read.native.gradients == [ONE_BY_ONE.data_ptr()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addresses_types_and_sizes(dtype: torch.dtype) -> None:
    outputs = [torch.zeros(4, 3, 2, 2, dtype=dtype), torch.zeros(0, 5), torch.zeros(())]
    grads: list[Tensor | None] = [torch.zeros_like(output) for output in outputs for _ in range(2)]
    grads[1] = None
    read = Operands(outputs, grads, 2)
    assert [DTYPES[code] for code in read.native.types] == [output.dtype for output in outputs]
    assert read.native.sizes == [48, 0, 1]
    assert read.native.kernel_sizes == [4, 1, 1]
    assert read.native.addresses == [output.data_ptr() for output in outputs]
    assert read.native.gradients == [0 if g is None else g.data_ptr() for g in grads]


@pytest.mark.parametrize(
    "grad",
    [
        torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.zeros(4, 3, 2, 4)[..., ::2],
        torch.zeros(4, 3, 1, 1).expand(4, 3, 2, 2),
    ],
    ids=["channels_last", "strided", "expanded"],
)
def test_a_gradient_with_other_strides_is_copied(grad: Tensor) -> None:
    output = torch.zeros(4, 3, 2, 2)
    read = Operands([output], [grad, torch.zeros_like(output)], 2)
    copied, kept = read.native.gradients
    assert copied not in (0, grad.data_ptr())
    assert [copy.data_ptr() for copy in read._grad_copies] == [copied]
    assert kept != copied


def test_an_output_that_is_not_dense_is_written_through_a_copy() -> None:
    output = torch.zeros(4, 6)[:, ::2]
    read = Operands([output], [torch.ones(4, 3)], 1)
    read.outputs[0].fill_(7)
    assert read.native.addresses == [read.outputs[0].data_ptr()]
    assert output.eq(0).all()
    read.finish()
    assert output.eq(7).all()


def _negative(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def _misaligned(x: Tensor) -> Tensor:
    memory = bytearray(1 + x.numel() * x.itemsize)
    return torch.frombuffer(memory, dtype=x.dtype, offset=1).view(x.shape).copy_(x)


@pytest.mark.parametrize("view", [_negative, _misaligned])
@pytest.mark.parametrize("name", backends.OPERATORS)
def test_memory_that_kernels_cannot_read(
    backend: str, name: str, view: Callable[[Tensor], Tensor]
) -> None:
    """The sign of `x.conj().imag` is not in memory; `torch.frombuffer` allows odd addresses."""
    operator, arguments = getattr(torch.ops.cs_kernels, name), operator_calls()[name]
    leaves, structure = tree_flatten(arguments)
    plain = _copied(leaves)
    result = operator(*tree_unflatten(plain, structure))
    argument_of = [n for n, argument in enumerate(arguments) for _ in tree_leaves(argument)]
    for index, leaf in enumerate(leaves):
        again = index > 0 and argument_of[index - 1] == argument_of[index]
        if not isinstance(leaf, Tensor) or (SMALL and again):
            continue
        given = [view(x) if i == index else x for i, x in enumerate(_copied(leaves))]
        here = backends._BACKENDS[backend].computes_on("cpu")  # A GPU gets aligned copies.
        refused = (name, index) in (
            ("gradvac_weights", 1),
            ("sketch_", 0),
            ("sketch_and_weight_", 0),
        )
        if refused and view is _misaligned and here:
            with pytest.raises(ValueError, match="must be aligned to its element size"):
                operator(*tree_unflatten(given, structure))
            continue
        found = operator(*tree_unflatten(given, structure))
        for a, b in [(found, result), *zip(given, plain, strict=True)]:
            if isinstance(b, Tensor):
                assert_close(a, b, rtol=0, atol=0)


def _copied(leaves: list[object]) -> list[object]:
    return [x.clone() if isinstance(x, Tensor) else x for x in leaves]


def test_a_transposed_layer_without_conflicts(backend: str) -> None:
    """In float64, the reference must not copy the update to itself in another order."""
    update = torch.arange(65.0).double().view(65, 1)
    priorities, products = [torch.zeros(5).long()], torch.zeros(1, 1, 1).double()
    given = [update.clone()], [torch.ones(65, 1).double()], priorities, products, [1], [5], 1
    torch.ops.cs_kernels.phase2_apply_(*given)
    assert_close(given[0][0], update, rtol=0, atol=0)
