"""A stacked pass: one forward and one backward pass of a trunk for several tasks.

The batch is repeated for every task along dimension 0. Each task-specific normalization treats a
task's part with that task's module, and each prioritized layer makes its update from the tasks'
gradients as soon as its backward pass has them (`task_layers`).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_kernels.checks import described
from cs_kernels.graphs import Edge, Reached, edge_of, is_leaf, walk
from cs_kernels.layout import LayerLists, Layout
from cs_kernels.methods import Method
from cs_kernels.nn import TaskBatchNorm
from cs_kernels.separation import Separation
from cs_kernels.step import Step, Surgery
from cs_kernels.task_layers import Stack, TaskWeight, UpdateOf, is_task_layer

Run = Callable[..., dict[str, Any]]
"""Takes the arguments of the trunk, and gives each task its output."""
Forward = Callable[[Run], Mapping[str, Tensor]]
"""Makes the losses of the tasks from the outputs."""


def run_of_one(trunk: nn.Module, task: str) -> Run:
    """Runs the trunk for a task that is active in it."""

    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {task: trunk(*args, **kwargs)}

    return run


Pattern = frozenset[tuple[str, frozenset[int]]]
"""Each task that takes part, and the numbers of the outputs on which its loss depends."""

_PLAIN = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _check_leaves(tree: Any, who: str) -> None:
    """Tensors are found in nests that torch knows, and not in other objects."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, _PLAIN):
            raise ValueError(
                f"{who} tensors in lists, tuples and dictionaries for step_together, got"
                f" {described(leaf)}: use step"
            )


class StackedPass:
    """The passes of one step.

    Args:
        trunk: The shared module.
        modules: Its modules, by name.
        norms: Its task-specific normalizations.
        tasks: The names of all tasks.
        step: Its tasks take part.
        method: Makes the update of a layer.
        weights: By weight, the names of those that may turn out to be of prioritized layers.
        find_layout: Finds the prioritized layers, after the forward pass.

    """

    def __init__(
        self,
        trunk: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        norms: Sequence[TaskBatchNorm],
        tasks: Sequence[str],
        step: Step,
        method: Method,
        weights: Mapping[nn.Parameter, str],
        find_layout: Callable[[], Layout],
    ) -> None:
        self._trunk = trunk
        own = {module for norm in norms for module in norm.modules()}
        self._outside = [(name, m) for name, m in modules if m._buffers and m not in own]
        """The modules with buffers outside task-specific normalization."""
        self._entries = [
            (module._parameters, key, parameter, weights[parameter])
            for _, module in modules
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter in weights
        ]
        """Where weights of layers are: a module's parameters, the key, the weight and its name."""
        self._parts = len(step.tasks)
        self._norms = norms
        self._tasks = tasks
        self._chosen = step.tasks
        self._method = method
        self._weights = weights
        self._find_layout = find_layout
        self._layers: dict[Tensor, LayerLists] = {}
        """By weight, the prioritized layers."""
        self._updated: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """By weight, priorities and products of the updates that are made."""
        self._edges: dict[Edge, tuple[str, int] | None] = {}
        """The task and the number of each output's parts; None for tensors inside the trunk."""
        self._outputs: list[Tensor] = []
        self._reached: dict[str, Reached] = {}
        """By task, the graph between its loss and the outputs."""
        self._batch = 0
        self._separation: Separation | None = None
        """While passes are made that show whether the parts stay apart."""
        self._stack = Stack(self._parts, self._update_of, self._problem_of)

    @contextlib.contextmanager
    def in_trunk(self, *, recomputes: bool = False) -> Iterator[None]:
        """Around the passes: layers make their updates, normalizations treat tasks' parts.

        Around the backward pass too: checkpointing recomputes the trunk there.
        """
        self._stack.runs = recomputes
        try:
            for parameters, key, parameter, name in self._entries:
                # Not a parameter, but what a layer's forward pass reads.
                stand_in: Any = TaskWeight.of(parameter, name, self._stack)
                parameters[key] = stand_in
            for norm in self._norms:
                object.__setattr__(norm, "_stack", self)
            yield
        finally:
            for parameters, key, parameter, _ in self._entries:
                parameters[key] = parameter
            for norm in self._norms:
                norm.__dict__.pop("_stack", None)

    def close(self) -> None:
        """Forgets the graph, which knows this object: Python cannot collect such a circle."""
        for kept in (self._outputs, self._edges, self._reached, self._updated):
            kept.clear()
        self._layers = {}
        for of_stack in (self._stack.inputs, self._stack.other_uses, self._stack.problems):
            of_stack.clear()

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The outputs of the trunk by task, in one forward pass."""
        _check_leaves((args, kwargs), "run must get")
        sizes = {t.shape[:1] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "run must get tensors with the batch in dimension 0, got the sizes"
                f" {sorted(map(tuple, sizes))} there"
            )
        ((self._batch,),) = sizes
        args, kwargs = tree_map_only(Tensor, self._repeated, (args, kwargs))
        before = [(name, buffer, buffer._version) for name, buffer in self._buffers()]
        self._stack.runs = True
        try:
            outputs = self._trunk(*args, **kwargs)
        finally:
            self._stack.runs = False
        self._check_unchanged(before)
        _check_leaves(outputs, "trunk must return")
        parts = {id(t): self._parts_of(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)}

        def output_of(number: int) -> Any:
            return tree_map_only(Tensor, lambda output: parts[id(output)][number], outputs)

        return {task: output_of(number) for number, task in enumerate(self._chosen)}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers outside task-specific normalization."""
        for prefix, module in self._outside:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}".removeprefix("."), buffer

    def _check_unchanged(self, before: Sequence[tuple[str, Tensor, int]]) -> None:
        now = dict(self._buffers())
        for name, buffer, version in before:
            if now.get(name) is not buffer or buffer._version != version:
                raise ValueError(
                    "trunk must not change its buffers in step_together, which has one forward"
                    f" pass for all tasks, got a new {name}: use step"
                )

    def _repeated(self, x: Tensor) -> Tensor:
        repeated = x.repeat(self._parts, *[1] * (x.dim() - 1))
        if self._separation is not None:
            return self._separation.changed_input(repeated)
        self._stack.inputs[id(repeated)] = repeated, repeated._version, x, x._version
        return repeated

    def _parts_of(self, output: Tensor) -> tuple[Tensor, ...]:
        self._check_parts(output, "the output of trunk", self._batch)
        parts = output.chunk(self._parts)
        if output.requires_grad:
            for part, task in zip(parts, self._chosen, strict=True):
                self._edges[edge_of(part)] = task, len(self._outputs)
            self._outputs.append(output)
        return parts

    def check_parts(
        self, restored: Callable[[], AbstractContextManager[None]], *args: Any, **kwargs: Any
    ) -> None:
        """Forward passes that raise if a task's part of a tensor depends on another task's.

        Args:
            restored: Gives the context of a pass that leaves nothing behind.
            *args: As of `run`.
            **kwargs: As of `run`.

        """
        if self._parts == 1:
            return
        self._separation = separation = Separation(self._parts)
        try:
            for kept in (None, 0, self._parts - 1):
                separation.begin(kept)
                # The pass itself warns; and checkpointing warns of no_grad.
                with restored(), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.run(*args, **kwargs)
        finally:
            self._separation = None

    def _check_parts(self, x: Tensor, name: str, batch: int = 1) -> None:
        problem = self._problem_of(x, name, batch)
        if problem is not None:
            raise problem

    def _problem_of(self, x: Tensor, name: str, batch: int = 1) -> Exception | None:
        if x.dim() < 1 or x.shape[0] % max(1, self._parts * batch):
            return ValueError(
                "trunk must keep the batches of the tasks one after the other in dimension 0, got"
                f" {name} with a tensor of shape {tuple(x.shape)} for {self._parts} tasks: use step"
            )
        if self._separation is not None and not self._separation.keeps(x):
            return ValueError(
                "trunk must keep the batches of the tasks one after the other in dimension 0 and"
                f" compute nothing over them, got {name} with a tensor of shape {tuple(x.shape)} in"
                " which one task's part depends on another's: use step"
            )
        return None

    def normalize(self, norm: TaskBatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        """Normalizes each task's part with that task's module."""
        if not self._stack.runs:
            raise ValueError(
                "forward must run trunk by run, which repeats the batch for every task, got a"
                " task-specific normalization that was run in another way"
            )
        given = (kwargs.pop("input"),) if "input" in kwargs else args
        x, rest = given[0], given[1:]
        self._check_parts(x, "a task-specific normalization")
        parts = zip(self._chosen, x.chunk(self._parts), strict=True)
        normalized = [norm.of(task)(part, *rest, **kwargs) for task, part in parts]
        result = torch.cat(normalized)
        if self._separation is not None:
            return self._separation.changed(result)
        if result.requires_grad:
            self._edges[edge_of(result)] = None
        return result

    def find_outputs(self, losses: Mapping[str, Tensor], *, trains: bool) -> Pattern:
        """The outputs on which the losses depend; each loss depends on its own task's alone.

        Args:
            losses: By task.
            trains: Whether a parameter of the trunk requires a gradient.

        """
        pattern = set()
        for task in self._chosen:
            reached = self._reached[task] = walk([edge_of(losses[task])], self._edges.keys())
            ends = [self._edges[edge] for edge in reached.features]
            if None in ends or any(map(is_task_layer, reached.nodes)):
                raise ValueError(
                    f"a loss must depend on the trunk through what run returns, got one for"
                    f" {task!r} that depends on another tensor of the trunk, which has the batches"
                    " of all tasks: let the trunk return it, or use step"
                )
            others = {end[0] for end in ends if end is not None} - {task}
            if others:
                raise ValueError(
                    "a loss must depend on the outputs of its own task for step_together, got one"
                    f" for {task!r} that depends on those of {min(others)!r}: use step"
                )
            if not ends and trains:
                raise ValueError(
                    f"a loss must depend on an output of run, got one for {task!r} that depends on"
                    " none"
                )
            pattern.add((task, frozenset(end[1] for end in ends if end is not None)))
        return frozenset(pattern)

    def reached_by_tasks(self, pattern: Pattern) -> tuple[dict[str, set[Tensor]], bool]:
        """The leaves that each loss reaches, and whether there may be others."""
        graphs = [walk([edge_of(output)], frozenset()) for output in self._outputs]
        hidden = any(
            isinstance(node, BackwardCFunction) and not is_task_layer(node)
            for graph in (*graphs, *self._reached.values())
            for node in graph.nodes
        )
        found = {}
        for task, numbers in pattern:
            others = {t for t in self._chosen if t != task}
            of_others = {p for n in self._norms for t in others for p in n.of(t).parameters()}
            inside = {leaf for number in numbers for leaf in graphs[number].leaves}
            found[task] = (inside - of_others) | self._reached[task].leaves.keys()
        return found, hidden

    def find_layers(self, *, counts: bool) -> None:
        """Finds the prioritized layers, after the forward pass.

        Args:
            counts: Whether to count the uses of weights in the graph.

        Raises:
            ValueError: A weight of one was used in another way than by one layer.

        """
        if not self._method.prioritizes:
            return
        layers = self._find_layout().by_weight
        for weight, how in self._stack.other_uses.items():
            if weight in layers:
                raise _used_otherwise(layers[weight], how)
        for weight, problem in self._stack.problems.items():
            if weight in layers:
                raise problem
        for task, reached in self._reached.items():
            for leaf in reached.leaves:
                if leaf in layers:
                    raise _used_otherwise(layers[leaf], f"by the loss of {task!r}")
        for weight in self._weights:
            hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
            if hooks and weight in layers:
                raise ValueError(
                    f"trunk must have no hook on the weight of {layers[weight].layers[0].name} for"
                    " step_together, which gives it the update in place of the tasks' gradients:"
                    " use step"
                )
        if counts:
            uses = self._uses()
            for leaf, layer in layers.items():
                if uses[leaf] > 1:
                    raise _used_otherwise(layer, "several times or in another way")
        self._layers = layers

    def _uses(self) -> Counter[Tensor]:
        """How often the graph of the outputs uses each leaf; twice if not in a layer."""
        uses: Counter[Tensor] = Counter()
        for node in walk(map(edge_of, self._outputs), frozenset()).nodes:
            count = 1 if is_task_layer(node) else 2
            for following, _ in node.next_functions:
                if following is not None and is_leaf(following):
                    uses[following.variable] += count
        return uses

    def _update_of(self, weight: nn.Parameter) -> UpdateOf | None:
        layer = self._layers.get(weight)
        if layer is None:
            return None
        if weight in self._updated:
            raise _used_otherwise(layer, "several times")

        def update(grads: list[Tensor]) -> Tensor:
            of_task = dict(zip(self._chosen, grads, strict=True))
            grads.clear()
            rows = [of_task.pop(task, None) for task in self._tasks]
            update, *numbers = self._method.update_layer(layer, rows)
            self._updated[weight] = numbers[0], numbers[1]
            return update

        return update

    def surgery(self) -> Surgery:
        """The numbers of the updates, for a report."""
        layers = [lists.layers[0] for w, lists in self._layers.items() if w in self._updated]
        if not layers:
            return Surgery()
        priorities, products = zip(*(self._updated[layer.weight] for layer in layers), strict=True)
        return Surgery(
            tuple(self._tasks),
            prioritized=LayerLists.of(layers),
            priorities=torch.cat(priorities),
            products=torch.cat(products),
        )


def _used_otherwise(layer: LayerLists, how: str) -> ValueError:
    return ValueError(
        f"trunk must use the weight of {layer.layers[0].name} in one convolution or linear layer"
        f" for step_together, which makes its update there, got it used {how}: use step"
    )
