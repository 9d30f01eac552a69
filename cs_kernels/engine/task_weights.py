"""Backward passes with task weights known in advance: gradients add up, without K rows.

Gradients of shared parameters are weighted by task, but gradients of other parameters, such as
heads, are not, so a weighted loss would give heads a wrong gradient. A gradient gets its weight
where it enters the part of the graph that several tasks have in common, or at the shared
parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from cs_kernels.torch_internals.autograd import (
    Hooks,
    is_custom,
    is_leaf,
    is_reentrant,
    makes_gradients,
    may_hide_parameters,
)
from cs_kernels.weightings.weighting import weighed


def at_leaves(shared: Iterable[Tensor], weight: Tensor, arrived: set[Tensor]) -> Hooks:
    """The hooks that weight each shared parameter's gradient in a backward pass of one task.

    Args:
        shared: The shared parameters, as they appear in graphs.
        weight: The task's weight.
        arrived: Receives the parameters that got a gradient.

    """
    # The hooks are on nodes, because a function may compute gradients of parameters in its backward
    # pass and return them, and a hook on the parameter would see these twice.
    nodes = [(get_gradient_edge(p).node, p) for p in shared if p.requires_grad]

    def weigh(p: Tensor, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        if any(grad is not None for grad in grads):
            arrived.add(p)
        return tuple(None if grad is None else _times(grad, weight) for grad in grads)

    return [(node, partial(weigh, p)) for node, p in nodes]


class OnePass(NamedTuple):
    """The nodes at which a single backward pass of several tasks weights gradients."""

    edges: Sequence[tuple[Any, Set[int], str]]
    """A node of one task, the indices of the gradients that it passes on to nodes of several tasks
    or to shared parameters, and the task."""
    whole: Set[str]
    """The tasks whose loss is computed by a node of several tasks."""

    def hooks(self, weights: Mapping[str, Tensor]) -> Hooks:
        """Hooks that weight the gradients."""
        return [(node, _weighing(entries, weights[task])) for node, entries, task in self.edges]

    def terms(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
        """The terms whose sum is differentiated: the losses, weighted if in `whole`."""
        with torch.enable_grad():
            return [weighed(x, weights[t]) if t in self.whole else x for t, x in losses.items()]


def find_one_pass(
    losses: Mapping[str, Tensor],
    shared: Set[Tensor],
    held: Iterable[Tensor],
    *,
    trusts_functions: bool,
) -> OnePass | None:
    """One backward pass of several tasks, or None if it could give a wrong gradient.

    The gradient would be wrong if a node of several tasks led to leaves other than shared
    parameters. It might be wrong if the graph hides parameters: reentrant checkpointing runs its
    function again in the backward pass, and any other `torch.autograd.Function` can hide some, even
    parameters that the graph shows elsewhere. With such a function, all parameters missing from the
    graph must be shared, and the function must be a node of several tasks, so that gradients are
    weighted before they reach it. A hook of a leaf can compute gradients of any parameters.

    Args:
        losses: By task.
        shared: The parameters whose gradients are weighted, as they appear in the graph.
        held: All parameters of the torch optimizers that may be in the graph.
        trusts_functions: Whether to assume that a function of one task hides no parameter that the
            graph shows elsewhere.

    """
    roots: dict[str, Any] = {task: loss.grad_fn for task, loss in losses.items()}
    if None in roots.values():
        return None
    tasks, parents = _tasks_of_nodes(roots)
    leaves = {node.variable: node for node in tasks if is_leaf(node)}
    functions = {node for node in tasks if is_custom(node)}
    if any(map(is_reentrant, functions)):
        return None
    if any(makes_gradients(leaf) for leaf in leaves):
        return None
    hiding = set(filter(may_hide_parameters, functions))
    unmet = {p for p in held if p.requires_grad and p not in leaves} if hiding else set()
    of_one_task = any(tasks[node] is not None for node in hiding)
    if not unmet <= shared or (of_one_task and (unmet or not trusts_functions)):
        return None
    others = [node for leaf, node in leaves.items() if leaf not in shared]
    if any(tasks[node] is None and not is_leaf(node) for node in _leading_to(others, parents)):
        return None
    edges = []
    for node, task in tasks.items():
        if task is not None and not is_leaf(node):
            entries = {
                i
                for i, (n, _) in enumerate(node.next_functions)
                if n is not None and (n.variable in shared if is_leaf(n) else tasks[n] is None)
            }
            if entries:
                edges.append((node, entries, task))
    return OnePass(edges, {task for task, root in roots.items() if tasks[root] is None})


def _tasks_of_nodes(
    roots: Mapping[str, Any],
) -> tuple[dict[Any, str | None], dict[Any, list[Any]]]:
    """Each node's task, or None for several; and the nodes that pass gradients to each node."""
    tasks: dict[Any, str | None] = {}  # Keeps the nodes alive, and so their identity.
    parents: dict[Any, list[Any]] = defaultdict(list)
    for task, root in roots.items():
        nodes = [root]
        while nodes:
            node = nodes.pop()
            if node in tasks and tasks[node] in (task, None):
                continue
            following = [n for n, _ in node.next_functions if n is not None]
            if node not in tasks:
                for n in following:
                    parents[n].append(node)
            tasks[node] = None if node in tasks else task
            nodes += following
    return tasks, parents


def _leading_to(leaves: Sequence[Any], parents: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """The given nodes, and all nodes that lead to them."""
    found, nodes = set[Any](), [*leaves]
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += parents.get(node, ())
    return found


def _times(grad: Tensor, weight: Tensor) -> Tensor:
    return (grad * weight).to(grad.dtype)


def _weighing(entries: Set[int], weight: Tensor) -> Callable[..., Any]:
    """A hook that weights the gradients that a node passes on at these indices."""

    def weigh(grads: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
        return tuple(
            grad if grad is None or i not in entries else _times(grad, weight)
            for i, grad in enumerate(grads)
        )

    return weigh
