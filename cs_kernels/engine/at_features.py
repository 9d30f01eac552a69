"""The joint update from the gradients with respect to a shared representation.

K backward passes of the heads end at the features; a method combines the K gradients that arrive
there, and one backward pass of the trunk takes the combination further (MGDA-UB, Sener and Koltun
2018, section 3.3; IMTL-G, Liu et al. 2021). Memory holds K gradients of the features in place of
K gradients of all shared parameters.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.profiler import record_function

from cs_kernels.engine import supports
from cs_kernels.engine.autograd_graph import Reached, edge_of, is_leaf, walk
from cs_kernels.engine.engine import Engine
from cs_kernels.engine.one_graph import OneGraph
from cs_kernels.errors import described
from cs_kernels.gradients import TaskGradients
from cs_kernels.methods import Method
from cs_kernels.step import Part, Step
from cs_kernels.trunk.layers import Coverage, Layout

_NO_LAYERS = Layout((), Coverage({}, {}, {}, {}))
"""A combination of gradients of features knows no layers."""


class AtFeatures(OneGraph):
    """Backward passes of the heads that end at features, and one of the trunk.

    Args:
        engine: Makes the step.
        losses: As in `backward`.
        features: A tensor that the trunk has returned, or a sequence of them.
        update: As in `backward`; it must be True.

    """

    name = supports.FEATURES

    def __init__(self, engine: Engine, losses: object, features: object, *, update: bool) -> None:
        super().__init__(engine, losses, update=update)
        self._given_features = features
        self._features: Features | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Leaves no gradient in the features."""
        with super().around():
            try:
                yield
            finally:
                if self._features is not None:
                    self._features.close()

    def prepare(self) -> None:
        """Checks that the features separate the losses from the trunk."""
        if not self.update:
            raise ValueError(
                "update must be True for backward with features, which change from one micro-batch"
                f" to the next, got {self.update!r}"
            )
        trunk = self.engine.trunk
        self._features = Features(
            self._given_features, self.losses, trunk.tasks, trunk.shared, trunk.watcher.names_of
        )

    def separates(self, step: Step) -> bool:
        """As each node runs once in any case, also where task weights are kept."""
        return self.engine.method.separate_gradients

    def backward_passes(self, part: Part, losses: Mapping[str, Tensor]) -> None:
        """Backward passes that end at the features; a plain sum of gradients needs no stop."""
        if not part.separate:
            super().backward_passes(part, losses)
            return
        assert self._features is not None
        scaled = self.engine.graph.scaled
        self._features.head_passes({task: scaled(loss) for task, loss in losses.items()})

    def surgery(self, part: Part) -> None:
        """Combines the gradients of features, and takes the combination through the trunk."""
        if not part.separate:
            super().surgery(part)
            return
        assert self._features is not None
        engine, step = self.engine, part.step
        timer = engine.monitor.timer(engine.trunk.device, eager=True)
        with record_function("cs_kernels.surgery"), torch.no_grad(), timer:
            self._features.combine(engine.method, step)
        step.elapsed = timer
        self._features.trunk_pass()


class FeatureGradients(TaskGradients):
    """K rows of gradients, a tensor or None for every feature.

    Unlike a parameter, a feature that only one loss reaches is no task's own: shared parameters
    have led to it.
    """

    def __init__(self, features: Sequence[Tensor], tasks: Sequence[str]) -> None:
        # With groups="layer", the part before the dot is the name of the Gramian.
        named = {f"{i}.feature": cast("nn.Parameter", z) for i, z in enumerate(features)}
        super().__init__(named, tasks)
        self.combined: dict[int, Tensor] = {}
        """By index of the feature: the combination of its gradients."""

    def put_features(self, task: str, gradients: Sequence[Tensor | None]) -> None:
        """Makes gradients a task's row."""
        # The next pass overwrites a part of a larger allocation, such as a CUDA graph's.
        self.rows[self.tasks.index(task)] = [
            g.clone() if g is not None and _is_part(g) else g for g in gradients
        ]
        self.collected.add(task)

    def updates(self, parameters: Sequence[int]) -> list[Tensor]:
        """The tensors for the updates of some features; dense, also where a feature is not."""
        for i in parameters:
            if self._updates[i] is None:
                self._updates[i] = torch.empty_like(self.parameters[i], requires_grad=False)
        return [cast("Tensor", self._updates[i]) for i in parameters]

    def assign(self, parameters: Sequence[int]) -> None:
        """Keeps the updates of some features for the trunk's pass, and forgets the rows."""
        self.combined.update(zip(parameters, self.updates(parameters), strict=True))
        self.clear()


def _is_part(grad: Tensor) -> bool:
    return grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()


def _checked(features: object) -> list[Tensor]:
    """The features as a list of tensors that the trunk has computed."""
    many = isinstance(features, Iterable) and not isinstance(features, Mapping | Tensor | str)
    tensors = list(features) if isinstance(features, Iterable) and many else [features]
    if not tensors:
        raise ValueError("features must be a tensor or a sequence of them, got none")
    checked: list[Tensor] = []
    for i, z in enumerate(tensors):
        if not isinstance(z, Tensor):
            raise TypeError(
                f"features must be a tensor or a sequence of them, got {described(z)} as"
                f" features[{i}]"
            )
        if not z.is_floating_point() or z.layout is not torch.strided:
            raise ValueError(
                f"features must be dense tensors of real numbers, got a {z.layout} {z.dtype} one as"
                f" features[{i}]"
            )
        if z.grad_fn is None:
            raise ValueError(
                f"features must be outputs of trunk with a graph, got features[{i}] of shape"
                f" {tuple(z.shape)} {'that is a leaf' if z.requires_grad else 'without one'}: hand"
                " over the tensor that the trunk returned, not a detached copy"
            )
        if z._backward_hooks:
            raise ValueError(
                f"features must have no hooks, which would run in the passes of the heads and of"
                f" the trunk, got {len(z._backward_hooks)} on features[{i}]: remove them, or hand"
                " over the output of an operation behind them"
            )
        checked.append(z)
    return checked


def _without_trunk(i: int, z: Tensor) -> ValueError:
    return ValueError(
        f"features must depend on a shared parameter of trunk, got features[{i}] of shape"
        f" {tuple(z.shape)} that depends on none: was it computed without the trunk, or with a copy"
        " of it?"
    )


class Features:
    """The features of one call of `backward`, and the passes of its heads and its trunk.

    Args:
        features: A tensor, or a sequence of them.
        losses: The loss of each task.
        tasks: The names of all tasks.
        shared: The shared parameters of the trunk.
        names_of: Names parameters in errors.

    Raises:
        ValueError: The features do not separate the losses from the shared parameters; the message
            says how.
        TypeError: One is not a tensor.

    """

    def __init__(
        self,
        features: object,
        losses: Mapping[str, Tensor],
        tasks: Sequence[str],
        shared: Iterable[nn.Parameter],
        names_of: Callable[[Iterable[nn.Parameter]], list[str]],
    ) -> None:
        self._features = _checked(features)
        self._edges = {edge_of(z): i for i, z in enumerate(self._features)}
        self._shared: set[Tensor] = set(shared)
        self._names_of = names_of
        self._check_distinct()
        self._trunk = self._graph_of_trunk()
        heads = {task: self._reached_by(task, loss) for task, loss in losses.items()}
        self._check_shared(heads)
        self._behind = {leaf for reached in heads.values() for leaf in reached.leaves}
        self.gradients = FeatureGradients(self._features, tasks)

    def _check_distinct(self) -> None:
        for i, z in enumerate(self._features):
            if self._edges[edge_of(z)] != i:
                raise ValueError(
                    f"features must be different tensors, got one as features[{i}] and as"
                    f" features[{self._edges[edge_of(z)]}]"
                )
        if len(devices := {z.device for z in self._features}) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"features must be on one device, got some on {found}")

    def _graph_of_trunk(self) -> set[Any]:
        """The nodes that have led to the features."""
        nodes: set[Any] = set()
        for (node, _), i in self._edges.items():
            reached = walk(node.next_functions, self._edges.keys(), nodes)
            for other in reached.features:
                raise ValueError(
                    "features must not be computed from each other, or gradients would count twice,"
                    f" got features[{i}] that depends on features[{self._edges[other]}]"
                )
            # A `torch.autograd.Function` can hide parameters: reentrant checkpointing does.
            hidden = any(isinstance(n, BackwardCFunction) for n in (node, *reached.nodes))
            joins = not nodes.isdisjoint(reached.nodes)  # The graph of an earlier feature.
            if not (hidden or joins) and self._shared.isdisjoint(reached.leaves):
                raise _without_trunk(i, self._features[i])
            nodes |= reached.nodes | {node}
        return nodes

    def _reached_by(self, task: str, loss: Tensor) -> Reached:
        """The nodes between a loss and the features."""
        reached = walk([edge_of(loss)], self._edges.keys())
        if not reached.features:
            raise ValueError(
                f"a loss must depend on features, got one for {task!r} that depends on none: were"
                " they computed in the forward pass of the losses?"
            )
        past = reached.nodes & self._trunk
        if past:
            leaves = {node.variable for node in past if is_leaf(node)}
            raise ValueError(
                "losses must depend on what leads to features through features alone, or a part of"
                f" its gradient would not be weighed: that of {task!r} depends on"
                f" {self._described(leaves)} past them: hand over every output of the trunk that a"
                " loss depends on"
            )
        return reached

    def _described(self, leaves: Set[Tensor]) -> str:
        """One of some leaves, a parameter if there is one."""
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        if parameters:
            return min(self._names_of(parameters))
        shapes = [f"a leaf of shape {tuple(leaf.shape)}" for leaf in leaves]
        return (shapes or ["an output of trunk"])[0]

    def _check_shared(self, heads: Mapping[str, Reached]) -> None:
        """A shared parameter behind the features is a task's own, as in a trunk with its heads."""
        found: dict[Tensor, str] = {}
        for task, reached in heads.items():
            for leaf in self._shared.intersection(reached.leaves):
                other = found.setdefault(leaf, task)
                if other != task:
                    raise ValueError(
                        "features must lie behind every shared parameter that several losses reach,"
                        " or its gradients would not be weighed: those of"
                        f" {other!r} and {task!r} depend on {self._described({leaf})} past them"
                    )

    def head_passes(self, losses: Mapping[str, Tensor]) -> None:
        """A backward pass from each weighted loss to the features.

        The parameters on the way get its gradient; where two losses reach one, both.

        Raises:
            ValueError: A weighting's part of a loss reaches the trunk past the features; or no
                gradient gets to the features.

        """
        heads = {task: self._reached_by(task, loss) for task, loss in losses.items()}
        self._check_shared(heads)
        inner = {task: head.inner for task, head in heads.items()}
        number = len(self._features)
        for task, loss in losses.items():
            nodes = inner.pop(task)
            # Frees nodes that no other head needs; those of the trunk do not run.
            retains = any(not nodes.isdisjoint(others) for others in inner.values())
            leaves = {v: node for v, node in heads[task].leaves.items() if v.requires_grad}
            # Not `backward(inputs=...)`, which runs the node that has made a feature too.
            grads = torch.autograd.grad(
                loss, [*self._features, *leaves], retain_graph=retains, allow_unused=True
            )
            if all(grad is None for grad in grads[:number]):
                raise ValueError(
                    f"a loss must have a gradient with respect to features, got none for {task!r}"
                )
            self.gradients.put_features(task, grads[:number])
            with torch.no_grad():
                for accumulate, grad in zip(leaves.values(), grads[number:], strict=True):
                    if grad is not None:
                        accumulate(grad)

    def combine(self, method: Method, step: Step) -> None:
        """Makes one gradient of the features from those of all tasks.

        Raises:
            RuntimeError: The method assigns no update.

        """
        method.combine(self.gradients, _NO_LAYERS, step)
        self.gradients.clear()
        if not self.gradients.combined:
            raise RuntimeError(
                f"method must assign the updates, got none of features by {method!r}.combine: call"
                " gradients.assign(parameters) in it"
            )

    def trunk_pass(self) -> None:
        """The backward pass of the trunk, which frees its graph.

        Raises:
            ValueError: It reaches no shared parameter; without hidden ones, that was seen before.

        """
        combined = self.gradients.combined
        torch.autograd.backward([self._features[i] for i in combined], [*combined.values()])
        if all(p.grad is None for p in self._shared - self._behind):
            raise _without_trunk(min(combined), self._features[min(combined)])
        combined.clear()

    def close(self) -> None:
        """Leaves no gradient in `.grad` of a feature; one with `retain_grad()` has got some."""
        for z in self._features:
            z.grad = None
