"""A stacked pass: one forward and one backward pass of a trunk for several tasks.

The batch is repeated for every task along dimension 0. Each task-specific normalization treats a
task's part with that task's module, and each prioritized layer makes its update from the tasks'
gradients as soon as its backward pass has them (`task_layers`).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_kernels.graphs import Edge, edge_of, is_leaf, walk
from cs_kernels.layout import Layer, LayerLists, Layout
from cs_kernels.methods import Method
from cs_kernels.nn import TaskBatchNorm
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


class StackedPass:
    """The passes of one step.

    Args:
        trunk: The shared module.
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
        norms: Sequence[TaskBatchNorm],
        tasks: Sequence[str],
        step: Step,
        method: Method,
        weights: Mapping[nn.Parameter, str],
        find_layout: Callable[[], Layout],
    ) -> None:
        self._trunk = trunk
        self._parts = len(step.tasks)
        self._norms = norms
        self._tasks = tasks
        self._chosen = step.tasks
        self._step = step
        self._method = method
        self._weights = weights
        self._find_layout = find_layout
        self._layers: dict[Tensor, Layer] = {}
        """By weight, the prioritized layers."""
        self._updated: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """By weight, priorities and products of the updates that are made."""
        self._edges: dict[Edge, str] = {}
        """The task of each output."""
        self._outputs: list[Tensor] = []
        self._marks_parts = False
        """Whether the first part of every tensor is NaN, to show where parts mix."""
        self._stack = Stack(self._parts, self._update_of, self._check_parts)

    @contextlib.contextmanager
    def in_trunk(self) -> Iterator[None]:
        """Around the passes: layers make their updates, normalizations treat tasks' parts.

        Around the backward pass too: checkpointing recomputes the trunk there.
        """
        entries = [
            (module._parameters, key, parameter, self._weights[parameter])
            for module in self._trunk.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter in self._weights
        ]
        try:
            for parameters, key, parameter, name in entries:
                # Not a parameter, but what a layer's forward pass reads.
                stand_in: Any = TaskWeight.of(parameter, name, self._stack)
                parameters[key] = stand_in
            for norm in self._norms:
                object.__setattr__(norm, "_stack", self)
            yield
        finally:
            for parameters, key, parameter, _ in entries:
                parameters[key] = parameter
            for norm in self._norms:
                object.__setattr__(norm, "_stack", None)

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The outputs of the trunk by task, in one forward pass."""
        sizes = {t.shape[:1] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "run must get tensors with the batch in dimension 0, got the sizes"
                f" {sorted(map(tuple, sizes))} there"
            )
        args, kwargs = tree_map_only(Tensor, self._repeated, (args, kwargs))
        before = [(name, buffer, buffer._version) for name, buffer in self._buffers()]
        outputs = self._trunk(*args, **kwargs)
        self._check_unchanged(before)
        parts = {id(t): self._parts_of(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)}

        def output_of(number: int) -> Any:
            return tree_map_only(Tensor, lambda output: parts[id(output)][number], outputs)

        return {task: output_of(number) for number, task in enumerate(self._chosen)}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers outside task-specific normalization."""
        own = {module for norm in self._norms for module in norm.modules()}
        for prefix, module in self._trunk.named_modules():
            if module._buffers and module not in own:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        yield f"{prefix}.{name}", buffer

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
        if self._marks_parts:
            return self._marked(repeated)
        self._stack.inputs[id(repeated)] = repeated, x
        return repeated

    def _parts_of(self, output: Tensor) -> tuple[Tensor, ...]:
        self._check_parts(output, "the output of trunk")
        parts = output.chunk(self._parts)
        if output.requires_grad:
            self._outputs.append(output)
            for part, task in zip(parts, self._chosen, strict=True):
                self._edges[edge_of(part)] = task
        return parts

    def marked_run(self, *args: Any, **kwargs: Any) -> None:
        """A forward pass that raises if a task's part of a tensor depends on another task's.

        Dimension 0 could come to hold the batch in another order, or the trunk may compute
        something over the whole batch. The first part of inputs and of normalized tensors is NaN
        here, and must not get into another one.
        """
        self._marks_parts = True
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The pass itself warns; checkpointing of no_grad.
                self.run(*args, **kwargs)
        finally:
            self._marks_parts = False

    def _marked(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        first = x.shape[0] // self._parts
        return torch.cat([torch.full_like(x[:first], torch.nan), x[first:]])

    def _check_parts(self, x: Tensor, name: str) -> None:
        if x.dim() < 1 or x.shape[0] % self._parts:
            raise ValueError(
                f"trunk must keep the batches of the tasks one after the other in dimension 0, got"
                f" {name} with a tensor of shape {tuple(x.shape)} for {self._parts} tasks:"
                " use step"
            )
        if self._marks_parts and x.is_floating_point():
            rest = x[x.shape[0] // self._parts :]
            if rest.isnan().any():
                raise ValueError(
                    "trunk must keep the batches of the tasks one after the other in dimension 0"
                    f" and compute nothing over them, got {name} with a tensor of shape"
                    f" {tuple(x.shape)} in which one task's part depends on another's: use step"
                )

    def normalize(self, norm: TaskBatchNorm, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalizes each task's part with that task's module."""
        self._check_parts(x, "a task-specific normalization")
        parts = zip(self._chosen, x.chunk(self._parts), strict=True)
        normalized = [norm.of(task)(part, *args, **kwargs) for task, part in parts]
        result = torch.cat(normalized)
        return self._marked(result) if self._marks_parts else result

    def find_layers(self) -> None:
        """Finds the prioritized layers, after the forward pass.

        Raises:
            ValueError: A weight of one was used in another way than by a layer.

        """
        if self._method.prioritizes:
            self._layers = {layer.weight: layer for layer in self._find_layout().layers}
        for weight, function in self._stack.other_uses.items():
            if weight in self._layers:
                raise _used_otherwise(self._layers[weight].name, f"in {function}")

    def check_losses(self, losses: Mapping[str, Tensor], *, trains: bool) -> None:
        """Each loss depends on its own task's outputs alone.

        Args:
            losses: By task.
            trains: Whether a parameter of the trunk requires a gradient.

        """
        for task, loss in losses.items():
            reached = walk([edge_of(loss)], self._edges.keys())
            others = {self._edges[edge] for edge in reached.features} - {task}
            if others:
                raise ValueError(
                    "a loss must depend on the outputs of its own task for step_together, got one"
                    f" for {task!r} that depends on those of {min(others)!r}: use step"
                )
            if not reached.features and trains:
                raise ValueError(
                    f"a loss must depend on an output of run, got one for {task!r} that depends on"
                    " none"
                )
            for leaf in reached.leaves:
                if leaf in self._layers:
                    raise _used_otherwise(self._layers[leaf].name, f"by the loss of {task!r}")

    def check_uses(self) -> list[nn.Parameter]:
        """The parameters in the graph of the outputs; a prioritized weight is there once."""
        reached = walk(map(edge_of, self._outputs), frozenset())
        uses: Counter[Tensor] = Counter()
        for node in reached.nodes:
            count = 1 if is_task_layer(node) else 2
            for following, _ in node.next_functions:
                if following is not None and is_leaf(following):
                    uses[following.variable] += count
        for weight, layer in self._layers.items():
            if uses[weight] > 1:
                raise _used_otherwise(layer.name, "several times or in another way")
        return [leaf for leaf in reached.leaves if isinstance(leaf, nn.Parameter)]

    def _update_of(self, weight: nn.Parameter) -> UpdateOf | None:
        layer = self._layers.get(weight)
        if layer is None:
            return None
        if weight in self._updated:
            raise _used_otherwise(layer.name, "several times")

        def update(grads: list[Tensor]) -> Tensor:
            of_task = dict(zip(self._chosen, grads, strict=True))
            grads.clear()
            rows = [of_task.pop(task, None) for task in self._tasks]
            update, *numbers = self._method.update_layer(LayerLists.of([layer]), rows)
            self._updated[weight] = numbers[0], numbers[1]
            return update

        return update

    def surgery(self) -> Surgery:
        """The numbers of the updates, for a report."""
        layers = [layer for layer in self._layers.values() if layer.weight in self._updated]
        if not layers:
            return Surgery()
        priorities, products = zip(*(self._updated[layer.weight] for layer in layers), strict=True)
        return Surgery(
            tuple(self._tasks),
            prioritized=LayerLists.of(layers),
            priorities=torch.cat(priorities),
            products=torch.cat(products),
        )


def _used_otherwise(name: str, how: str) -> ValueError:
    return ValueError(
        f"trunk must use the weight of {name} in one convolution or linear layer for step_together,"
        f" which makes its update there, got it used {how}: use step"
    )
