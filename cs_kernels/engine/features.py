"""The features of a call of `backward`: graph checks, gradients, the passes of heads and trunk."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from cs_kernels.engine.pass_checks import PassChecks
from cs_kernels.errors import described
from cs_kernels.gradients import TaskGradients
from cs_kernels.methods import Method
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.stage import Passes
from cs_kernels.torch_internals.autograd import (
    Hooks,
    Reached,
    current_pass,
    edge_of,
    hooked,
    is_custom,
    is_leaf,
    walk,
    without_hooks,
)
from cs_kernels.trunk.layers import Coverage, Layout

_NO_LAYERS = Layout((), Coverage({}, {}, {}, {}))
"""The layout for gradients of features, which have no layers."""


class FeatureGradients(TaskGradients):
    """Gradients with respect to features, for this rank's samples: one row per task.

    Unlike a parameter, a feature that only one loss reaches is not that task's own, because its
    gradient still reaches shared parameters.
    """

    def __init__(self, features: Sequence[Tensor], tasks: Sequence[str], ranks: Ranks) -> None:
        # With groups="layer", the part before the dot is the name of the Gramian.
        named = {f"{i}.feature": cast("nn.Parameter", z) for i, z in enumerate(features)}
        super().__init__(named, tasks)
        self._ranks = ranks
        self._updates: list[Tensor | None] = [None] * len(features)
        self.combined: dict[int, Tensor] = {}
        """By index of the feature: the combination of its gradients."""

    def put_features(self, task: str, gradients: Sequence[Tensor | None]) -> None:
        """Assigns the gradients of a task's row."""
        self.rows[self.tasks.index(task)] = [None if g is None else self._own(g) for g in gradients]
        self.collected.add(task)

    def _own(self, grad: Tensor) -> Tensor:
        # A function may return the same buffer from every pass, and overwrite it in the next.
        return grad.clone() if self._ranks.scale == 1 else grad * self._ranks.scale

    def reached_here(self) -> tuple[bool, ...]:
        """For each feature, whether a task has a gradient for it on this rank."""
        here = set(self.reached())
        return tuple(i in here for i in range(len(self.parameters)))

    def fill(self, task: str, reached: Sequence[bool]) -> None:
        """Gives a task zeros for features that only other ranks' losses have reached."""
        pairs = zip(reached, self.reached_here(), strict=True)
        for i, (anywhere, here) in enumerate(pairs):
            if anywhere and not here:
                self.put_one(task, i, torch.zeros_like(self.parameters[i], requires_grad=False))

    def updates(self, parameters: Sequence[int], *, in_place: bool = False) -> list[Tensor]:
        """Allocates dense tensors for the updates of these features."""
        del in_place
        for i in parameters:
            if self._updates[i] is None:
                self._updates[i] = torch.empty_like(self.parameters[i], requires_grad=False)
        return [cast("Tensor", self._updates[i]) for i in parameters]

    def assign(self, parameters: Sequence[int]) -> None:
        """Keeps the updates of these features for the trunk's pass, and drops the rows."""
        self.combined.update(zip(parameters, self.updates(parameters), strict=True))
        self.clear()

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the samples of all ranks."""
        return self._ranks.sum_over_ranks(tensor)


def tensors_of(features: object) -> list[Tensor]:
    """The features as a list."""
    many = isinstance(features, Iterable) and not isinstance(features, Mapping | Tensor | str)
    tensors = list(features) if isinstance(features, Iterable) and many else [features]
    if not tensors:
        raise ValueError("features must be a tensor or a sequence of them, got none")
    for i, z in enumerate(tensors):
        if not isinstance(z, Tensor):
            raise TypeError(
                f"features must be a tensor or a sequence of them, got {described(z)} as"
                f" features[{i}]"
            )
    return cast("list[Tensor]", tensors)


def _check_computed(features: Iterable[Tensor]) -> None:
    for i, z in enumerate(features):
        if not z.is_floating_point() or z.layout is not torch.strided:
            raise ValueError(
                f"features must be dense floating-point tensors, but features[{i}] has layout"
                f" {z.layout} and dtype {z.dtype}"
            )
        if z.grad_fn is None:
            raise ValueError(
                f"features must be outputs of trunk that are part of a graph, but features[{i}], of"
                f" shape {tuple(z.shape)}, {'is a leaf' if z.requires_grad else 'has no graph'}:"
                " pass the tensor that trunk returned, not a detached copy"
            )


def _accumulating(loss: Tensor, leaves: Mapping[Tensor, Any]) -> Hooks:
    """Hooks that add gradients of leaves to `.grad` as soon as autograd computes them."""
    passes: list[int] = []

    def begins(_: Tensor) -> None:
        passes.append(current_pass())

    def accumulates(node: Any) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if current_pass() in passes:  # A nested pass accumulates its gradients itself.
                node(grad)

        return hook

    return [(loss, begins), *((leaf, accumulates(node)) for leaf, node in leaves.items())]


def _without_trunk(i: int, z: Tensor) -> ValueError:
    return ValueError(
        f"features must depend on a shared parameter of trunk, got features[{i}] of shape"
        f" {tuple(z.shape)} that depends on none: was it computed without the trunk, or with a copy"
        " of it?"
    )


class Features:
    """The features of one call of `backward`, and the passes of its heads and its trunk.

    Args:
        features: The features of this rank's samples. Without losses, only their number matters.
        losses: The loss of each task; empty if only other ranks have labels.
        tasks: The names of all tasks.
        shared: By leaf in a graph, the shared parameter; after `fully_shard`, leaves are unsharded.
        names_of: Returns the names of parameters, for errors.
        ranks: Sums products of gradients over the ranks.

    Raises:
        ValueError: The features do not separate the losses from the shared parameters; the message
            says how.

    """

    def __init__(
        self,
        features: Sequence[Tensor],
        losses: Mapping[str, Tensor],
        tasks: Sequence[str],
        shared: Mapping[Tensor, nn.Parameter],
        names_of: Callable[[Iterable[nn.Parameter]], list[str]],
        ranks: Ranks,
    ) -> None:
        self._features, self._shared, self._names_of = features, shared, names_of
        self._scale = ranks.scale
        self.number = len(features)
        self.gradients = FeatureGradients(features, tasks, ranks)
        self._behind: set[Tensor] = set()
        self._combined: list[int] = []
        if not losses:
            return
        _check_computed(features)
        self._edges = {edge_of(z): i for i, z in enumerate(features)}
        self._check_distinct()
        self._trunk = self._graph_of_trunk()
        heads = {task: self._reached_by(task, loss) for task, loss in losses.items()}
        self._check_shared(heads)
        leaves = {leaf for reached in heads.values() for leaf in reached.leaves}
        self._behind = {shared[leaf] for leaf in leaves & shared.keys()}

    def _check_distinct(self) -> None:
        for i, z in enumerate(self._features):
            if self._edges[edge_of(z)] != i:
                raise ValueError(
                    f"features must be different tensors, but features[{i}] is also"
                    f" features[{self._edges[edge_of(z)]}]"
                )
        if len(devices := {z.device for z in self._features}) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"features must be on one device, got some on {found}")

    def _graph_of_trunk(self) -> set[Any]:
        """Walks the graph from which the features were computed, and returns its nodes."""
        nodes: set[Any] = set()
        for (node, _), i in self._edges.items():
            reached = walk(node.next_functions, self._edges.keys(), nodes)
            for other in reached.features:
                raise ValueError(
                    "features must not be computed from each other, or gradients would count twice,"
                    f" but features[{i}] depends on features[{self._edges[other]}]"
                )
            # A `torch.autograd.Function`, such as reentrant checkpointing, can hide parameters.
            hidden = any(map(is_custom, (node, *reached.nodes)))
            # Whether this feature's graph shares nodes with an earlier feature's.
            joins = not nodes.isdisjoint(reached.nodes)
            if not (hidden or joins) and self._shared.keys().isdisjoint(reached.leaves):
                raise _without_trunk(i, self._features[i])
            nodes |= reached.nodes | {node}
        return nodes

    def _reached_by(self, task: str, loss: Tensor) -> Reached:
        """The nodes between a loss and the features."""
        reached = walk([edge_of(loss)], self._edges.keys())
        if not reached.features:
            raise ValueError(
                f"a loss must depend on features, but the loss of {task!r} depends on none: were"
                " they computed in the forward pass of the losses?"
            )
        past = reached.nodes & self._trunk
        if past:
            leaves = {node.variable for node in past if is_leaf(node)}
            raise ValueError(
                "losses must depend on the trunk through features alone, or part of a gradient"
                f" would not be weighted, but the loss of {task!r} also depends on"
                f" {self._described(leaves)} by a path around the features: pass every output of"
                " the trunk that a loss depends on; for a tied weight, call backward without"
                " features"
            )
        return reached

    def _described(self, leaves: Set[Tensor]) -> str:
        """Describes one of the leaves, preferably a parameter."""
        wholes = self._shared  # After `fully_shard`, a whole parameter has its shard's name.
        parameters = [wholes.get(leaf, leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)]
        if parameters:
            return min(self._names_of(parameters))
        shapes = [f"a leaf of shape {tuple(leaf.shape)}" for leaf in leaves]
        return (shapes or ["an output of trunk"])[0]

    def _check_shared(self, heads: Mapping[str, Reached]) -> None:
        """Raises if several tasks reach a shared parameter other than through the features."""
        found: dict[Tensor, str] = {}
        for task, reached in heads.items():
            for leaf in self._shared.keys() & reached.leaves.keys():
                other = found.setdefault(leaf, task)
                if other != task:
                    raise ValueError(
                        "features must come after every shared parameter that several losses reach,"
                        " or its gradients would not be weighted, but the losses of"
                        f" {other!r} and {task!r} depend on {self._described({leaf})} after the"
                        " features"
                    )

    def head_passes(self, losses: Mapping[str, Tensor], checks: PassChecks) -> None:
        """Runs a backward pass from each weighted loss to the features.

        Gradients of the parameters on the way add up in `.grad` during the pass, because
        `fully_shard` reduces them there.

        Raises:
            ValueError: A term that the weighting added reaches the trunk other than through the
                features; or no gradient reaches the features.
            RuntimeError: The graph between the features and several losses does not allow several
                passes.

        """
        heads = {task: self._reached_by(task, loss) for task, loss in losses.items()}
        self._check_shared(heads)
        with without_hooks(self._features):
            checks.check_repeatable(losses, self._features)
        inner = {task: head.inner for task, head in heads.items()}
        for task, loss in losses.items():
            nodes = inner.pop(task)
            # Frees nodes that no later head needs; the trunk's nodes do not run.
            retains = any(not nodes.isdisjoint(others) for others in inner.values())
            leaves = {v: node for v, node in heads[task].leaves.items() if v.requires_grad}
            with without_hooks(self._features), hooked(_accumulating(loss, leaves)):
                # `backward(inputs=...)` would also run the node that computed a feature.
                grads = torch.autograd.grad(
                    loss, [*self._features, *leaves], retain_graph=retains, allow_unused=True
                )[: self.number]
            if all(grad is None for grad in grads):
                raise ValueError(
                    "a loss must have a gradient with respect to features, but the loss of"
                    f" {task!r} has none"
                )
            self.gradients.put_features(task, grads)

    def combine(self, method: Method, passes: Passes) -> None:
        """Combines all tasks' gradients of the features into one.

        Raises:
            RuntimeError: The method assigns no update.

        """
        self.gradients.fill(passes.tasks[0], passes.reached)
        method.combine(self.gradients, _NO_LAYERS, passes.step)
        self.gradients.clear()
        self._combined = sorted(self.gradients.combined)
        if not self._combined:
            raise RuntimeError(
                f"method must assign the updates, but {method!r}.combine assigned none:"
                " call gradients.assign(parameters) in it"
            )

    def trunk_pass(self) -> None:
        """Runs the backward pass of the trunk, which frees its graph."""
        combined, scale = self.gradients.combined, self._scale
        grads = [grad if scale == 1 else grad / scale for grad in combined.values()]
        torch.autograd.backward([self._features[i] for i in combined], grads)
        combined.clear()

    def check_reached(self) -> None:
        """Raises ValueError if the trunk's pass has reached no shared parameter.

        The graph was checked before the pass, but it may hide parameters.
        """
        if all(p.grad is None for p in self._shared.values() if p not in self._behind):
            raise _without_trunk(self._combined[0], self._features[self._combined[0]])

    def close(self) -> None:
        """Clears the features' `.grad`, which `retain_grad()` fills."""
        for z in self._features:
            z.grad = None
