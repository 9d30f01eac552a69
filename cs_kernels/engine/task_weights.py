"""Backward passes with task weights that are known before: gradients add up, without K rows.

The gradients of shared parameters are weighted by task; those of other parameters, as of heads, are
not, so the gradient of a weighted loss would be wrong for them. A gradient gets its weight where it
enters the part of the graph that leads to shared parameters alone, or at the shared parameters.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cs_kernels.engine.autograd_graph import is_leaf
from cs_kernels.weightings.weighting import weighed

Hooks = list[tuple[Any, Callable[..., Any]]]
"""Parameters or nodes of autograd's graph, and a hook to register with each."""


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Around a backward pass with some hooks."""
    handles = [place.register_hook(hook) for place, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def at_leaves(shared: Iterable[Tensor], weight: Tensor) -> Hooks:
    """The hooks for a backward pass of one task: each shared parameter's gradient is weighted."""
    return [(p, lambda grad: _times(grad, weight)) for p in shared if p.requires_grad]


def in_one_pass(
    losses: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    shared: Set[Tensor],
    held: Iterable[Tensor],
) -> tuple[list[Tensor], Hooks] | None:
    """The hooks for one backward pass of several tasks, in which every node runs once.

    Args:
        losses: By task.
        weights: By task, scalars.
        shared: The parameters whose gradients are weighted, as the graph has them.
        held: All parameters of the torch optimizers, as the graph has them.

    Returns:
        The losses to be added up, and the hooks; None where one pass would give a wrong gradient:
        losses have nodes in common that lead to other leaves too, or the graph may hide parameters.

    """
    roots: dict[str, Any] = {task: loss.grad_fn for task, loss in losses.items()}
    own = None if None in roots.values() else _nodes_to_others(roots.values(), shared, held)
    if own is None:
        return None
    hooks: Hooks = []
    task_of: dict[Any, str] = {}
    for task, root in roots.items():
        nodes = [root] if root in own else []
        while nodes:
            node = nodes.pop()
            if is_leaf(node) or task_of.get(node) == task:
                continue
            if task_of.setdefault(node, task) != task:
                return None
            following = [n for n, _ in node.next_functions]
            nodes += [n for n in following if n in own]
            entries = {i for i, n in enumerate(following) if n is not None and n not in own}
            if entries:
                hooks.append((node, _weighing(entries, weights[task])))
    terms = [
        loss if roots[task] in own else weighed(loss, weights[task])
        for task, loss in losses.items()
    ]
    return terms, hooks


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

    A `torch.autograd.Function` can hide the parameters that the walk does not meet: reentrant
    checkpointing does. Hidden ones must be shared, and their function lead to no others.
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
    leaves = {node.variable: node for node in seen if is_leaf(node)}
    hiding = {node for node in seen if isinstance(node, BackwardCFunction)}
    unmet = {p for p in held if p.requires_grad and p not in leaves} if hiding else set()
    if not unmet <= shared:
        return None
    own = set[Any]()
    nodes = [node for leaf, node in leaves.items() if leaf not in shared]
    while nodes:
        node = nodes.pop()
        if node not in own:
            own.add(node)
            nodes += parents[node]
    return None if unmet and not own.isdisjoint(hiding) else own
