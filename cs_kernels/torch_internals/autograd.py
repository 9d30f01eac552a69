"""Walks over autograd's graphs, and hooks on their nodes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

Edge = tuple[Any, int]
"""A node of autograd's graph and the index of one of its outputs, which identify a tensor."""


Hooks = Iterable[tuple[Any, Callable[..., Any]]]
"""Tensors or nodes of autograd's graph, and a hook to register on each. A hook on a leaf's node
runs before each accumulation of a gradient."""


def current_pass() -> int:
    """The number of the running backward pass; a nested pass has a number of its own."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_leaf(node: object) -> bool:
    """Whether a node accumulates the gradient of a leaf."""
    return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]


def is_custom(node: object) -> bool:
    """Whether a node belongs to a `torch.autograd.Function`, which may hide parameters."""
    return isinstance(node, BackwardCFunction)


_HIDE_NOTHING = {
    "CompiledFunctionBackward",
    "RegisterPostBackwardFunctionBackward",
    "_DDPSinkBackward",
}
"""Functions of torch (`torch.compile`, `fully_shard`, DistributedDataParallel) that hide no
parameter from the graph."""


def may_hide_parameters(node: object) -> bool:
    """Whether a node's function may read parameters that the graph does not show."""
    return is_custom(node) and type(node).__name__ not in _HIDE_NOTHING


def arguments_of(node: Any) -> Sequence[Any]:
    """The shape, dtype and device of each gradient that a node takes."""
    metadata: Sequence[Any] = node._input_metadata
    return metadata


def is_node_of(node: object, function: type[torch.autograd.Function]) -> bool:
    """Whether a node belongs to this function."""
    return isinstance(node, function._backward_cls)


def is_reentrant(node: object) -> bool:
    """Whether a node belongs to reentrant checkpointing, which runs a backward pass of its own."""
    return is_custom(node) and hasattr(node, "run_function")


def has_early_hooks(tensor: Tensor) -> bool:
    """Whether hooks see a gradient of a tensor before it is used."""
    return bool(tensor._backward_hooks)


increment_versions: Any = torch._C._increment_version
"""`torch.autograd.graph.increment_version` for a tuple of tensors, without its Python code."""


def has_late_hooks(leaf: Tensor) -> bool:
    """Whether hooks run after a gradient has arrived in `.grad`."""
    return bool(leaf._post_accumulate_grad_hooks)


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks see a gradient of a tensor before or after it arrives in `.grad`."""
    return has_early_hooks(tensor) or has_late_hooks(tensor)


def makes_gradients(leaf: Tensor) -> bool:
    """Whether a hook on a leaf may compute gradients of parameters."""
    return bool(leaf._backward_hooks) and not isinstance(leaf, nn.Parameter)


class Reached(NamedTuple):
    """The result of a walk from a loss to the given features, or to the leaves."""

    features: set[Edge]
    """The features where the walk ended."""
    nodes: set[Any]
    """All nodes on the way; a leaf's node accumulates its gradient."""

    @property
    def leaves(self) -> dict[Tensor, Any]:
        """The leaves that the walk reached, mostly parameters, with their nodes."""
        return {node.variable: node for node in self.nodes if is_leaf(node)}

    @property
    def inner(self) -> set[Any]:
        """The nodes whose saved tensors a backward pass frees: all but the leaves' nodes."""
        return {node for node in self.nodes if not is_leaf(node)}


def edge_of(tensor: Tensor) -> Edge:
    """The edge that leads to a tensor."""
    return tensor.grad_fn, tensor.output_nr


def walk(roots: Iterable[Edge], features: Set[Edge], known: Set[Any] = frozenset()) -> Reached:
    """Follows graphs from their roots to the leaves.

    The walk stops at the features and at known nodes.
    """
    reached = Reached(set(), set())
    edges = list(roots)
    while edges:
        edge = edges.pop()
        if edge in features:
            reached.features.add(edge)
        elif edge[0] is not None and edge[0] not in reached.nodes:
            # The set keeps nodes alive, so that a node reached again is the same Python object.
            reached.nodes.add(edge[0])
            if edge[0] not in known:
                edges.extend(edge[0].next_functions)
    return reached


class Parameters(NamedTuple):
    """The parameters that a loss depends on."""

    found: list[nn.Parameter]
    """The parameters in the loss's graph."""
    hidden: bool
    """Whether a `torch.autograd.Function` may hide parameters, as reentrant checkpointing does."""
    hooked: bool
    """Whether a leaf's hook may compute other leaves' gradients; cached contrastive losses do."""


def reached_parameters(loss: Tensor) -> Parameters:
    """The parameters in the graph of a loss."""
    reached = walk([edge_of(loss)], frozenset())
    leaves = [*reached.leaves, loss] if loss.is_leaf else reached.leaves
    found = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    hooked = any(map(makes_gradients, leaves))
    hidden = any(map(is_custom, reached.nodes))
    return Parameters(found, hidden, hooked)


def _forget_hooks(leaf: Tensor) -> None:
    """Removes the dictionary of a leaf's hooks if it is empty; autograd would still read it."""
    if not leaf._backward_hooks:
        leaf._backward_hooks = None


@contextlib.contextmanager
def hooked(hooks: Hooks) -> Iterator[None]:
    """Wraps a backward pass, and registers these hooks for that pass only."""
    with contextlib.ExitStack() as handles:
        for place, hook in hooks:
            if isinstance(place, Tensor) and place.is_leaf and place._backward_hooks is None:
                handles.callback(_forget_hooks, place)
            register = place.register_prehook if is_leaf(place) else place.register_hook
            handles.callback(register(hook).remove)
        yield


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disables the tensors' hooks, such as `fully_shard`'s, which belong to the trunk's pass."""
    hooks = [(z._backward_hooks, dict(z._backward_hooks)) for z in tensors if z._backward_hooks]
    for of_tensor, _ in hooks:
        of_tensor.clear()  # In place, because the graph reads this dictionary.
    try:
        yield
    finally:
        for of_tensor, kept in hooks:
            of_tensor.update(kept)
