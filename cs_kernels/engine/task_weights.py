"""Backward passes with task weights that are known before: gradients add up, without K rows.

The gradients of shared parameters are weighted by task; those of other parameters, as of heads, are
not, so the gradient of a weighted loss would be wrong for them. A gradient gets its weight where it
enters the part of the graph that leads to shared parameters alone, or at the shared parameters.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cs_kernels.engine.autograd_graph import is_leaf
from cs_kernels.weightings.weighting import weighed

Hooks = list[tuple[Any, Callable[..., Any]]]
"""Parameters or nodes of autograd's graph, and a hook to register with each."""

_HIDE_NOTHING = {
    "CompiledFunctionBackward",
    "RegisterPostBackwardFunctionBackward",
    "_DDPSinkBackward",
}
"""Functions of torch (`torch.compile`, `fully_shard`, DistributedDataParallel): the graph shows all
parameters behind them."""


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Around a backward pass with some hooks."""
    with contextlib.ExitStack() as handles:
        for place, hook in hooks:
            handles.callback(place.register_hook(hook).remove)
        yield


def at_leaves(shared: Iterable[Tensor], weight: Tensor) -> Hooks:
    """The hooks for a backward pass of one task: each shared parameter's gradient is weighted."""
    return [(p, lambda grad: _times(grad, weight)) for p in shared if p.requires_grad]


class OnePass(NamedTuple):
    """Where one backward pass of several tasks weights gradients; every node runs once."""

    edges: Sequence[tuple[Any, Set[int], str]]
    """A node, the indices of the gradients that it hands on to shared parameters, and its task."""
    whole: Set[str]
    """The tasks whose losses lead to shared parameters alone."""

    def hooks(self, weights: Mapping[str, Tensor]) -> Hooks:
        """The hooks of the nodes."""
        return [(node, _weighing(entries, weights[task])) for node, entries, task in self.edges]

    def terms(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
        """The losses to add up."""
        return [weighed(x, weights[t]) if t in self.whole else x for t, x in losses.items()]


def find_one_pass(
    losses: Mapping[str, Tensor], shared: Set[Tensor], held: Iterable[Tensor]
) -> OnePass | None:
    """One backward pass of several tasks, or None where it would give a wrong gradient.

    It would if losses have nodes in common that lead to other leaves than shared parameters, or if
    the graph may hide parameters.

    Args:
        losses: By task.
        shared: The parameters whose gradients are weighted, as the graph has them.
        held: All parameters of the torch optimizers that may be in the graph.

    """
    roots: dict[str, Any] = {task: loss.grad_fn for task, loss in losses.items()}
    to_others = None if None in roots.values() else _nodes_to_others(roots.values(), shared, held)
    if to_others is None:
        return None
    edges = []
    task_of: dict[Any, str] = {}
    for task, root in roots.items():
        nodes = [root] if root in to_others else []
        while nodes:
            node = nodes.pop()
            if is_leaf(node) or task_of.get(node) == task:
                continue
            if task_of.setdefault(node, task) != task:
                return None
            following = [n for n, _ in node.next_functions]
            nodes += [n for n in following if n in to_others]
            entries = {i for i, n in enumerate(following) if n is not None and n not in to_others}
            if entries:
                edges.append((node, entries, task))
    return OnePass(edges, {task for task, root in roots.items() if root not in to_others})


def _times(grad: Tensor, weight: Tensor) -> Tensor:
    return (grad * weight).to(grad.dtype)


def _weighing(entries: Set[int], weight: Tensor) -> Callable[..., Any]:
    """A hook that weights some of the gradients that a node hands on."""

    def weigh(grads: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
        return tuple(
            grad if grad is None or i not in entries else _times(grad, weight)
            for i, grad in enumerate(grads)
        )

    return weigh


def _nodes_to_others(
    roots: Collection[Any], shared: Set[Tensor], held: Iterable[Tensor]
) -> set[Any] | None:
    """The nodes that lead to a leaf that is not shared; None if these cannot be told.

    Reentrant checkpointing runs its function again in the backward pass, so the graph does not have
    the parameters there. Any other `torch.autograd.Function` can hide those that the walk does not
    meet: they must be shared, and the function must lead to no others.
    """
    parents: dict[Any, list[Any]] = defaultdict(list)
    seen, nodes = set(roots), list(roots)
    while nodes:
        node = nodes.pop()
        for following, _ in node.next_functions:
            if following is not None:
                parents[following].append(node)
                if following not in seen:  # The set keeps nodes alive, and so their identity.
                    seen.add(following)
                    nodes.append(following)
    functions = {n for n in seen if isinstance(n, BackwardCFunction)}
    if any(hasattr(node, "run_function") for node in functions):
        return None
    leaves = {node.variable: node for node in seen if is_leaf(node)}
    hiding = {node for node in functions if type(node).__name__ not in _HIDE_NOTHING}
    unmet = {p for p in held if p.requires_grad and p not in leaves} if hiding else set()
    if not unmet <= shared:
        return None
    to_others = set[Any]()
    nodes = [node for leaf, node in leaves.items() if leaf not in shared]
    while nodes:
        node = nodes.pop()
        if node not in to_others:
            to_others.add(node)
            nodes += parents[node]
    return None if unmet and not to_others.isdisjoint(hiding) else to_others
