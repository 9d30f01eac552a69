"""Torch internals that the package relies on; a failure names the file that uses one."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.nn import functional
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel

from cs_kernels.engine.stacked.task_layers import is_task_layer
from cs_kernels.torch_internals.autograd import arguments_of, edge_of, has_hooks, hooked, is_leaf
from cs_kernels.torch_internals.compile import is_compiled
from cs_kernels.torch_internals.ddp import FLAGS
from cs_kernels.torch_internals.memory import (
    is_in_foreign_memory,
    lone_holders,
    may_be_overwritten,
)
from cs_kernels.torch_internals.optimizers import step_hooks

pytestmark = pytest.mark.loop

CHANGED = f"torch {torch.__version__} has changed what {{}} relies on: {{}}"


def test_leaves_of_a_graph_are_known() -> None:
    x = torch.ones(2, requires_grad=True)
    ((node, _),) = edge_of(x * 2)[0].next_functions[:1]
    message = CHANGED.format("torch_internals/autograd.py", "the class of AccumulateGrad nodes")
    assert is_leaf(node), message
    assert node.variable is x, message


@pytest.mark.parametrize("own", [False, True])
def test_removed_hooks_of_leaves_leave_nothing(own: bool) -> None:
    x, seen = torch.ones(2, requires_grad=True), list[str]()
    if own:
        x.register_hook(lambda _: seen.append("own"))
    with hooked([(x, lambda _: seen.append("first")), (x, lambda _: seen.append("second"))]):
        x.sum().backward()
    message = CHANGED.format("torch_internals/autograd.py", "the hooks of a tensor")
    assert (x._backward_hooks is not None) == own, message
    x.sum().backward()
    handle = x.register_hook(lambda _: seen.append("later"))
    x.sum().backward()
    handle.remove()
    mine = ["own"] * own
    assert seen == [*mine, "first", "second", *mine, *mine, "later"], message


def test_holders_of_memory_are_known() -> None:
    own, held = torch.empty(4), torch.empty(4)
    other = held.view(2, 2)
    for grad, is_foreign in (
        (own, False),
        (held, True),
        (other, True),
        (torch.empty(8).resize_(4), True),
    ):
        message = CHANGED.format("torch_internals/memory.py", "the number of a storage's holders")
        assert is_in_foreign_memory(grad) == is_foreign, message


KEPT: list[Any] = []
"""Gradients, or other views of their memory, that the functions and hooks below keep."""


class Keeping(torch.autograd.Function):
    """Doubles its input, and keeps the gradient that its backward pass returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        KEPT.append(2 * grad)
        return KEPT[-1]


def _held_by_a_hook(keep: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        for leaf in (a, b):
            leaf.register_hook(lambda grad: KEPT.append(keep(grad)))
        return 2 * a + 3 * b

    return loss


LONE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda a, b: 2 * a + 3 * b,
    "a view of a product": lambda a, b: functional.linear(torch.ones(5, 3), a) @ b,
    "a new tensor of a function": lambda a, b: _Inverse.apply(a) + _Inverse.apply(b),
    "a sum of two gradients": lambda a, b: 2 * a + a.exp() + 3 * b + b.exp(),
}
HELD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one memory for both": lambda a, b: 2 * (a.view(-1) + b.view(-1)),
    "one memory for both, transposed": lambda a, b: 2 * (a.t() + b.t()),
    "parts of one memory": lambda a, b: 2 * torch.cat([a, b]),
    "an expanded number": lambda a, b: a.sum() + b.sum(),
    "expanded columns": lambda a, b: torch.cat([2 * a.sum(1), 3 * b.sum(1)]),
    "kept by a function": lambda a, b: Keeping.apply(a) + Keeping.apply(b),
    "kept by a hook": _held_by_a_hook(lambda grad: grad),
    "a view kept by a hook": _held_by_a_hook(lambda grad: grad.view(-1)),
    "its data kept by a hook": _held_by_a_hook(lambda grad: grad.data),
    "an array kept by a hook": _held_by_a_hook(lambda grad: grad.numpy()),
}


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def _overwritable(function: Callable[[Tensor, Tensor], Tensor]) -> list[bool]:
    """Whether the gradients of two leaves may be overwritten as they arrive."""
    a, b = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    found = []
    nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in (a, b)]
    for node in nodes:
        node.register_prehook(lambda grads: found.append(may_be_overwritten(grads)))
    function(a, b).exp().sum().backward()
    KEPT.clear()
    return found


@pytest.mark.parametrize("case", [*LONE, *HELD])
def test_holders_of_arriving_gradients_are_known(case: str) -> None:
    message = CHANGED.format("torch_internals/memory.py", "the number of a gradient's holders")
    assert _overwritable((LONE | HELD)[case]) == [case in LONE] * 2, message


def test_the_last_of_two_leaves_with_one_gradient_owns_it() -> None:
    assert _overwritable(lambda a, b: a + b) == [False, True]


def test_nothing_is_overwritten_if_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_kernels.torch_internals.memory._use_count", None)
    lone_holders.cache_clear()
    try:
        assert _overwritable(LONE["a product"]) == [False, False]
    finally:
        lone_holders.cache_clear()


def test_a_subclass_in_parameters_sees_the_functions_of_layers() -> None:
    seen = []

    class Weight(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    for layer, function, shape in (
        (nn.Linear(3, 4), functional.linear, (2, 3)),
        (nn.Conv2d(3, 4, 1), functional.conv2d, (2, 3, 5, 5)),
        (nn.ConvTranspose2d(3, 4, 1), functional.conv_transpose2d, (2, 3, 5, 5)),
    ):
        layer._parameters["weight"] = layer.weight.as_subclass(Weight)
        layer(torch.ones(shape))
        what = f"{type(layer).__name__} calls another function with its weight"
        assert function in seen, CHANGED.format("engine/stacked/task_layers.py", what)
    assert not is_task_layer(object())


def test_parts_of_fully_shard() -> None:
    for of, names in (
        (_fsdp_state.FSDPState, ("_is_root", "_fsdp_param_group")),
        (_fsdp_param_group.FSDPParamGroup, ("fsdp_params", "reshard_after_backward")),
        (_fsdp_param.FSDPParam, ("sharded_param", "_unsharded_param")),
    ):
        source = inspect.getsource(of)
        for name in names:
            assert name in source, CHANGED.format(
                "torch_internals/fsdp.py", f"{of.__name__}.{name}"
            )


def test_parts_of_data_parallel() -> None:
    source = inspect.getsource(DistributedDataParallel)
    for name in (*FLAGS, "_active_ddp_module"):
        assert name in source, CHANGED.format("torch_internals/ddp.py", f"its {name}")


def test_parts_of_process_groups() -> None:
    message = CHANGED.format("torch_internals/groups.py", "names and timeouts of process groups")
    assert hasattr(distributed_c10d._world, "group_count"), message
    assert hasattr(distributed_c10d._world, "pg_names"), message
    assert hasattr(dist.ProcessGroup, "_get_backend"), message


def test_hooks_of_all_modules() -> None:
    message = CHANGED.format("trunk/watcher.py", "forward hooks of all modules")
    assert hasattr(nn_module, "register_module_forward_pre_hook"), message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules() -> None:
    module = nn.Linear(2, 2)
    message = CHANGED.format("torch_internals/compile.py", "the marks of compiled modules")
    assert not is_compiled(module), message
    assert is_compiled(torch.compile(module)), message
    module.compile()
    assert is_compiled(module), message


def test_hooks_of_optimizers() -> None:
    sgd = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    hooks = [print, repr]
    sgd.register_step_pre_hook(hooks[0])
    sgd.register_step_post_hook(hooks[1])
    message = CHANGED.format("torch_internals/optimizers.py", "the hooks of a step")
    assert [*step_hooks(sgd)] == hooks, message


def test_hooks_of_gradients() -> None:
    message = CHANGED.format("torch_internals/autograd.py", "the hooks of a tensor")
    x = torch.ones(2, requires_grad=True)
    assert not has_hooks(x), message
    for register in (x.register_hook, x.register_post_accumulate_grad_hook):
        handle = register(print)
        assert has_hooks(x), message
        handle.remove()
        assert not has_hooks(x), message


def test_gradients_that_nodes_take() -> None:
    y = torch.nn.Linear(3, 4)(torch.randn(2, 3))
    (like,) = arguments_of(y.grad_fn)
    found = tuple(like.shape), like.dtype, like.device, like.is_cpp_nested_tensor
    message = CHANGED.format("torch_internals/autograd.py", "the gradients that a node takes")
    assert found == ((2, 4), torch.float32, y.device, False), message
