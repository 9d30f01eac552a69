"""A stacked pass: one forward and one backward pass of a trunk for several tasks.

The batch is repeated for every task along dimension 0. Each task-specific normalization applies a
task's module to that task's part, and each layer that needs surgery passes the gradients of all
tasks to `LayerUpdates` during its backward pass (`task_layers`, `layer_updates`).
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cs_kernels.engine.stacked.layer_updates import LayerUpdates, used_otherwise
from cs_kernels.engine.stacked.parts_check import PartsCheck
from cs_kernels.engine.stacked.task_layers import Stack, TaskWeight, is_task_layer
from cs_kernels.errors import described
from cs_kernels.nn.task_norm import TaskBatchNorm, recorded_norms
from cs_kernels.step import Step
from cs_kernels.torch_internals.autograd import (
    Edge,
    Reached,
    edge_of,
    has_hooks,
    is_custom,
    is_leaf,
    walk,
)


class Pattern(NamedTuple):
    """The outputs, layers and normalizations that determine the graph of a stacked pass."""

    outputs: tuple[tuple[str, frozenset[int]], ...]
    """Each task that takes part, in order, and the indices of the outputs that its loss uses."""
    ran: frozenset[object]
    """The layers that ran, each as a tuple of its parameters, and the normalizations that ran."""


_PLAIN = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


def _check_leaves(tree: Any, who: str) -> None:
    """Raises ValueError for an object that may contain tensors that `tree_leaves` misses."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, _PLAIN):
            raise ValueError(
                f"{who} tensors in lists, tuples and dictionaries for step_together, got"
                f" {described(leaf)}: use step"
            )


class TrunkPass:
    """The stacked passes of one step.

    Args:
        trunk: The shared module.
        modules: Its modules outside task-specific normalizations, with names.
        norms: Its task-specific normalizations.
        step: The step, whose tasks take part.
        updates: Makes the updates of the parameters that it takes.
        candidates: The layers' weights and biases that `updates` may take, with their names.

    """

    def __init__(
        self,
        trunk: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        norms: Sequence[TaskBatchNorm],
        step: Step,
        updates: LayerUpdates,
        candidates: Mapping[nn.Parameter, str],
    ) -> None:
        self._trunk = trunk
        self._parts = len(step.tasks)
        self._stack = stack = Stack(self._parts, updates, self._problem_of)
        self._with_buffers = [(name, module) for name, module in modules if module._buffers]
        self._entries = [
            (
                module._parameters,
                key,
                parameter,
                TaskWeight.of(parameter, candidates[parameter], stack),
            )
            for _, module in modules
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter in candidates
        ]
        """For each candidate in a module: `_parameters`, the key, the candidate, its stand-in."""
        self._norms = norms
        self._chosen = step.tasks
        self._updates = updates
        self._edges: dict[Edge, tuple[str, int] | None] = {}
        """For each task's part of an output: the task, and the output's index; None for tensors
        inside the trunk."""
        self._outputs: list[Tensor] = []
        self._reached: dict[str, Reached] = {}
        """By task, the graph between its loss and the outputs."""
        self._norms_ran: set[TaskBatchNorm] = set()
        self._batches: set[int] = set()
        """The batch sizes of the calls of `run`."""
        self._parts_check: PartsCheck | None = None
        """Set during the passes that check whether tasks' parts are independent."""

    @contextlib.contextmanager
    def in_trunk(self, *, recomputes: bool = False) -> Iterator[None]:
        """Wraps the passes: layers and normalizations treat each task's part separately.

        This includes the backward pass, in which checkpointing recomputes the trunk.
        """
        self._stack.runs = recomputes
        try:
            for parameters, key, _, stand_in in self._entries:
                parameters[key] = cast("nn.Parameter", stand_in)  # Layers read this entry.
            for norm in self._norms:
                object.__setattr__(norm, "_stack", self)
            yield
        finally:
            for parameters, key, parameter, _ in self._entries:
                parameters[key] = parameter
            for norm in self._norms:
                norm.__dict__.pop("_stack", None)

    def close(self) -> None:
        """Forgets the graph, whose nodes hold this object: a cycle that Python cannot collect."""
        for kept in (self._outputs, self._edges, self._reached, self._stack.inputs):
            kept.clear()
        self._updates.close()
        del self._stack, self._entries  # They form another such cycle.

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runs one forward pass of the trunk; returns each task's outputs."""
        _check_leaves((args, kwargs), "run must get")
        sizes = {t.shape[:1] for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if len(sizes) != 1 or () in sizes:
            raise ValueError(
                "run must get tensors with one batch size in dimension 0, got the sizes"
                f" {sorted(map(tuple, sizes))} there"
            )
        ((batch,),) = sizes
        self._batches.add(batch)
        args, kwargs = tree_map_only(Tensor, self._repeated, (args, kwargs))
        before = [(name, buffer, buffer._version) for name, buffer in self._buffers()]
        self._stack.runs = True
        try:
            outputs = self._trunk(*args, **kwargs)
        finally:
            self._stack.runs = False
        self._check_unchanged(before)
        _check_leaves(outputs, "trunk must return")
        leaves = {id(t): t for t in tree_leaves(outputs) if isinstance(t, Tensor)}
        parts = {key: self._parts_of(output) for key, output in leaves.items()}

        def output_of(number: int) -> Any:
            return tree_map_only(Tensor, lambda output: parts[id(output)][number], outputs)

        return {task: output_of(number) for number, task in enumerate(self._chosen)}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers outside task-specific normalization."""
        for prefix, module in self._with_buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{prefix}.{name}".removeprefix("."), buffer

    def _check_unchanged(self, before: Sequence[tuple[str, Tensor, int]]) -> None:
        now = dict(self._buffers())
        for name, buffer, version in before:
            if now.get(name) is not buffer or buffer._version != version:
                raise ValueError(
                    "trunk must not change its buffers in step_together, which runs one forward"
                    f" pass for all tasks, but {name} changed: use step"
                )

    def _repeated(self, x: Tensor) -> Tensor:
        repeated = x.repeat(self._parts, *[1] * (x.dim() - 1))
        if self._parts_check is not None:
            return self._parts_check.changed_input(repeated)
        self._stack.inputs[id(repeated)] = repeated, repeated._version, x, x._version
        return repeated

    def _parts_of(self, output: Tensor) -> tuple[Tensor, ...]:
        self._check_parts(output, "the output of trunk")
        parts = output.chunk(self._parts)
        if output.requires_grad:
            for part, task in zip(parts, self._chosen, strict=True):
                self._edges[edge_of(part)] = task, len(self._outputs)
            self._outputs.append(output)
        return parts

    def check_parts(
        self, restored: Callable[[], AbstractContextManager[None]], *args: Any, **kwargs: Any
    ) -> None:
        """Runs forward passes, and raises if a task's part of a tensor depends on another task's.

        Args:
            restored: Returns a context that undoes the side effects of a pass.
            *args: As in `run`.
            **kwargs: As in `run`.

        """
        if self._parts == 1:
            return
        self._parts_check = parts_check = PartsCheck(self._parts)
        try:
            for kept in (None, 0, self._parts - 1):
                parts_check.begin(kept)
                # The real pass shows all warnings; here, no_grad makes checkpointing warn, too.
                with restored(), recorded_norms(), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.run(*args, **kwargs)
        finally:
            self._parts_check = None
            self._stack.layers.clear()
            self._norms_ran.clear()

    def _check_parts(self, x: Tensor, name: str) -> None:
        problem = self._problem_of(x, name)
        if problem is not None:
            raise problem

    def _problem_of(self, x: Tensor, name: str) -> Exception | None:
        parts = [self._parts * max(1, batch) for batch in self._batches]
        if x.dim() < 1 or all(x.shape[0] % number for number in parts):
            return ValueError(
                "trunk must keep the tasks' batches concatenated in dimension 0, but"
                f" {name} has a tensor of shape {tuple(x.shape)} for {self._parts} tasks: use step"
            )
        if self._parts_check is not None and not self._parts_check.keeps(x):
            return ValueError(
                "trunk must keep the tasks' batches concatenated in dimension 0 and compute nothing"
                f" across them, but {name} has a tensor of shape {tuple(x.shape)} in which one"
                " task's part depends on another's: use step"
            )
        return None

    def normalize(self, norm: TaskBatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        """Normalizes each task's part with that task's module."""
        if not self._stack.runs:
            raise ValueError(
                "forward must call run(...) in place of trunk(...), because run repeats the batch"
                " for every task, but a task-specific normalization ran outside run"
            )
        given = (kwargs.pop("input"),) if "input" in kwargs else args
        x, rest = given[0], given[1:]
        self._check_parts(x, "a task-specific normalization")
        self._norms_ran.add(norm)
        parts = zip(self._chosen, x.chunk(self._parts), strict=True)
        normalized = [norm.of(task)(part, *rest, **kwargs) for task, part in parts]
        result = torch.cat(normalized)
        if self._parts_check is not None:
            return self._parts_check.changed(result)
        if result.requires_grad:
            self._edges[edge_of(result)] = None
        return result

    def find_outputs(self, losses: Mapping[str, Tensor], *, trains: bool) -> Pattern:
        """The pattern of the pass, from the graphs of the losses.

        Args:
            losses: By task.
            trains: Whether a parameter of the trunk requires a gradient.

        Raises:
            ValueError: A loss depends on an output of another task, on a tensor inside the trunk,
                or, if the trunk trains, on no output.

        """
        outputs = []
        for task in self._chosen:
            reached = self._reached[task] = walk([edge_of(losses[task])], self._edges.keys())
            ends = [self._edges[edge] for edge in reached.features]
            if None in ends or any(map(is_task_layer, reached.nodes)):
                raise ValueError(
                    "a loss must depend on the trunk through the outputs of run alone, but the loss"
                    f" of {task!r} depends on a tensor inside the trunk, where the batches of all"
                    " tasks are concatenated: let the trunk return it, or use step"
                )
            others = {end[0] for end in ends if end is not None} - {task}
            if others:
                raise ValueError(
                    "a loss must depend on the outputs of its own task for step_together, but"
                    f" the loss of {task!r} depends on the outputs of {min(others)!r}: use step"
                )
            if not ends and trains:
                raise ValueError(
                    f"a loss must depend on an output of run, but the loss of {task!r} depends on"
                    " none"
                )
            outputs.append((task, frozenset(end[1] for end in ends if end is not None)))
        return Pattern(tuple(outputs), frozenset([*self._stack.layers, *self._norms_ran]))

    def uses_all(self, pattern: Pattern) -> bool:
        """Whether every loss depends on all outputs."""
        return all(len(numbers) == len(self._outputs) for _, numbers in pattern.outputs)

    def reached_by_tasks(self, pattern: Pattern) -> tuple[dict[str, set[Tensor]], bool]:
        """The leaves that each loss reaches, and whether the graph may hide further leaves.

        A `torch.autograd.Function` may hide leaves.
        """
        graphs = [walk([edge_of(output)], frozenset()) for output in self._outputs]
        hidden = any(
            is_custom(node) and not is_task_layer(node)
            for graph in (*graphs, *self._reached.values())
            for node in graph.nodes
        )
        found = {}
        for task, numbers in pattern.outputs:
            others = {t for t in self._chosen if t != task}
            of_others = {p for n in self._norms for t in others for p in n.of(t).parameters()}
            inside = {leaf for number in numbers for leaf in graphs[number].leaves}
            found[task] = (inside - of_others) | self._reached[task].leaves.keys()
        return found, hidden

    def begin_updates(
        self, taken: Mapping[Tensor, int], reached: Mapping[str, set[Tensor]], *, counts: bool
    ) -> None:
        """Begins the backward pass; the method makes the updates of the parameters in `taken`.

        Args:
            taken: The parameters whose update is made, and their indices.
            reached: By task, the leaves that its loss reaches; empty if the graph may hide leaves.
            counts: Whether to count the uses of parameters in the graph.

        Raises:
            ValueError: A parameter in `taken` has a hook or is not used by exactly one layer, or
                several layers use parameters of one module.

        """
        self._updates.begin(taken, self._stack.layers, reached)
        name_of, stack = self._updates.name_of, self._stack
        for parameter, how in stack.other_uses.items():
            if parameter in taken:
                raise used_otherwise(name_of(parameter), how)
        for parameter, problem in stack.problems.items():
            if parameter in taken:
                raise problem
        for task, of_loss in self._reached.items():
            for leaf in of_loss.leaves:
                if leaf in taken:
                    raise used_otherwise(name_of(leaf), f"by the loss of {task!r}")
        for leaf in taken:
            if has_hooks(leaf):
                raise ValueError(
                    f"trunk must have no hook on {name_of(leaf)} for step_together, where the"
                    " hook would get the update, not the tasks' gradients: use step"
                )
        if counts:
            if self._updates.by_module:
                self._check_modules(taken)
            uses = self._uses()
            for leaf in taken:
                if uses[leaf] > 1:
                    raise used_otherwise(name_of(leaf), "more than once or outside such a layer")

    @property
    def layers(self) -> dict[Tensor, tuple[nn.Parameter, ...]]:
        """For each parameter that a layer has used, all parameters of this layer."""
        return {parameter: layer for layer in self._stack.layers for parameter in layer}

    def _check_modules(self, taken: Mapping[Tensor, int]) -> None:
        """Raises unless each module's parameters belong to a single layer."""
        name_of, layer_of = self._updates.name_of, self.layers
        uses = Counter(parameter for layer in self._stack.layers for parameter in layer)
        modules: dict[str, list[Tensor]] = {}
        for parameter in taken:
            if uses[cast("nn.Parameter", parameter)] > 1:
                raise used_otherwise(name_of(parameter), "more than once")
            modules.setdefault(name_of(parameter).rpartition(".")[0], []).append(parameter)
        for parameters in modules.values():
            if not set(layer_of.get(parameters[0], ())).issuperset(parameters):
                other = next((p for p in parameters if p not in layer_of), parameters[0])
                raise ValueError(
                    "trunk must have all parameters that train in modules that are convolutions or"
                    " linear layers, each used once, for step_together with groups='layer', got"
                    f" {name_of(other)} elsewhere: use step, or freeze it"
                )

    def _uses(self) -> Counter[Tensor]:
        """How often the outputs' graph uses each leaf; a use outside of layers counts twice."""
        uses: Counter[Tensor] = Counter()
        for node in walk(map(edge_of, self._outputs), frozenset()).nodes:
            count = 1 if is_task_layer(node) else 2
            for following, _ in node.next_functions:
                if following is not None and is_leaf(following):
                    uses[following.variable] += count
        return uses
