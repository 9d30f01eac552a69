"""Checks the first backward passes of every task; later passes are not checked.

Some code in networks relies on a single backward pass per step: auxiliary losses that inject a
gradient, functions that overwrite their saved tensors, optimizer steps in hooks, hooks that move
gradients elsewhere.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from cs_kernels.errors import first_of, noted
from cs_kernels.gradients import as_real
from cs_kernels.ranks.checksums import checksums
from cs_kernels.torch_internals.autograd import (
    Edge,
    arguments_of,
    edge_of,
    hooked,
    is_reentrant,
    walk,
)
from cs_kernels.torch_internals.fsdp import is_sharded
from cs_kernels.trunk.trunk import Trunk

_TOLERANCE, _FLOOR = 0.01, 1e-4
"""Tolerances for the differences that atomic additions on a GPU cause, relative to a gradient's
norm and to the largest norm: a gradient may cancel out, as a bias's does before a normalization."""
_HALF_TOLERANCE, _HALF_FLOOR = 0.1, 0.05
"""The tolerances for 16-bit gradients."""
_MOST_CHECKS = 4
"""The maximum number of new checks: a loop may freeze different parameters in every step."""

_OFF = "; check_passes=False leaves this check out"
_WAYS_OUT = (
    "use step(closure), which has a graph per task, or backward(losses, features=z), which runs"
    " the backward pass before z once"
)


class PassChecks:
    """Checks that backward passes leave gradients in `.grad`, and change nothing else.

    Args:
        trunk: The shared module.
        enabled: Whether to check at all.
        alone: Whether this is the only process; otherwise, collectives change `.grad` in a pass.

    """

    def __init__(self, trunk: Trunk, *, enabled: bool, alone: bool) -> None:
        self._trunk = trunk
        self.enabled = enabled
        self._alone = alone
        self._tasks: set[str] = set()
        """The tasks whose first passes have been watched."""
        self._arrived: dict[str, set[int]] = {}
        """By task whose first pass is in this stage: the shared parameters that got a gradient."""
        self._left = _MOST_CHECKS
        """The number of times that passes may still be checked again."""
        self._together: dict[str, set[str]] = {}
        """By task: the tasks with which passes through one graph have proved repeatable."""

    def forget(self) -> None:
        """Schedules a new check of every task's next passes, at most `_MOST_CHECKS` times."""
        if not self._left:
            return
        self._left -= 1
        self._tasks.clear()
        self._together.clear()

    def watching(
        self, tasks: Iterable[str], *, as_made: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Wraps a backward pass of these tasks, and checks it if it is any task's first pass.

        Args:
            tasks: The tasks.
            as_made: Whether gradients must arrive in `.grad` unmodified.

        Raises:
            RuntimeError: The pass has changed a shared parameter or a tensor attribute of one, or a
                hook has moved or changed a gradient.

        """
        new = [task for task in tasks if task not in self._tasks]
        checks = self.enabled and new
        return self._watching(new, as_made=as_made) if checks else contextlib.nullcontext()

    @contextlib.contextmanager
    def _watching(self, new: Sequence[str], *, as_made: bool) -> Iterator[None]:
        arrived = set[int]()
        expected: dict[int, Tensor] = {}

        def note(i: int, grad: Tensor | None) -> None:
            if grad is None:
                return
            arrived.add(i)
            if self._alone and as_made and grad.layout is torch.strided:
                before = self._trunk.shared[i].grad
                expected[i] = _fingerprint(grad if before is None else before + grad)

        shared = enumerate(self._trunk.shared)
        leaves = [(p, i) for i, p in shared if p.requires_grad and not is_sharded(p)]
        names: dict[Tensor, str] = dict(zip(self._trunk.shared, self._trunk.names, strict=True))
        attributes = _attributes(names)
        of_attributes = {value: name for name, value in attributes.items()}
        before = checksums([*names, *of_attributes], {**names, **of_attributes})
        with hooked([(p, partial(note, i)) for p, i in leaves]):
            yield
        after = checksums([*names, *of_attributes], {**names, **of_attributes})
        differing = [name for name in before if before[name] != after[name]]
        changed = [name for name in differing if name not in attributes]
        if changed:
            raise RuntimeError(
                f"a backward pass must not change parameters, but {first_of(changed)}"
                f" changed during the pass of {new[0]!r}: a hook must not step an optimizer; remove"
                f" the hook, and load the last checkpoint{_OFF}"
            )
        self._check_left(new[0], expected)
        now = _attributes(names)
        rebound = [name for name, value in now.items() if attributes.get(name) is not value]
        written = [*rebound, *(name for name in differing if name in attributes)]
        if written:
            raise RuntimeError(
                "a backward pass must leave gradients in .grad, but the pass of"
                f" {new[0]!r} has changed {first_of(written)}, where a"
                " function or a hook may add gradients up, which the method would not see: let the"
                f" function return them{_OFF}"
            )
        self._tasks.update(new)
        self._arrived |= dict.fromkeys(new, arrived)

    def _check_left(self, task: str, expected: Mapping[int, Tensor]) -> None:
        """Raises RuntimeError if hooks have moved or changed gradients that have arrived."""
        grads = {i: self._trunk.shared[i].grad for i in sorted(expected)}
        self._check_moved(task, [i for i, grad in grads.items() if grad is None])
        dense = ((i, g) for i, g in grads.items() if g is not None and g.layout is torch.strided)
        changed = [
            self._trunk.names[i] for i, grad in dense if not _agree(_fingerprint(grad), expected[i])
        ]
        if changed:
            raise RuntimeError(
                "gradients in .grad must stay as the backward pass made them, but in the pass of"
                f" {task!r} a hook changed those of {first_of(changed)}:"
                " such a hook runs in every task's pass, and where passes accumulate in .grad, it"
                " sees their sum; use register_hook, which sees the gradient of one pass, or a hook"
                f" of the torch optimizer, which sees the update{_OFF}"
            )

    def collected(self, task: str, unreached: Iterable[int]) -> None:
        """Checks the gradients that were collected after the passes of one task.

        Raises:
            RuntimeError: A gradient has arrived, but was not in `.grad`.

        """
        arrived = self._arrived.pop(task, None)
        if arrived:
            self._check_moved(task, [i for i in unreached if i in arrived])

    def _check_moved(self, task: str, moved: Sequence[int]) -> None:
        if moved:
            raise RuntimeError(
                "a backward pass must leave gradients in .grad, but the gradients of"
                f" {first_of([self._trunk.names[i] for i in moved])} are gone after the"
                f" pass of {task!r}: a hook has moved them, so the method would not see them;"
                f" remove the hook, or freeze these parameters{_OFF}"
            )

    def end_passes(self) -> None:
        """Forgets which gradients have arrived, after the passes of a stage."""
        self._arrived.clear()

    def check_repeatable(
        self, losses: Mapping[str, Tensor], features: Sequence[Tensor] = ()
    ) -> None:
        """Checks that a graph allows several passes, unless it was checked for the same tasks.

        Runs three passes through the part of the graph that several tasks share. One pass starts
        from a zero gradient.

        Args:
            losses: The loss of each task.
            features: Where the passes end, if not at the leaves.

        Raises:
            RuntimeError: Two passes differ, the pass from zero gives a nonzero gradient, or a
                later pass fails.

        """
        tasks, unseen = set(losses), set[str]()
        known = all(tasks <= self._together.get(task, unseen) for task in tasks)
        if not self.enabled or known or len(tasks) < 2:
            return
        if not any(map(is_sharded, self._trunk.shared)):
            held = self._trunk.held()
            names: dict[Tensor, str] = {z: f"features[{i}]" for i, z in enumerate(features)}
            names |= zip(held, self._trunk.watcher.names_of(held), strict=True)
            names |= zip(self._trunk.shared, self._trunk.names, strict=True)
            # Checkpointing runs normalizations again, which changes their statistics.
            with self._trunk.unchanged(self._trunk.tasks, always=True):
                check_shared_part(losses, names, held, features)
        for task in tasks:
            self._together.setdefault(task, set()).update(tasks)


def check_shared_part(
    losses: Mapping[str, Tensor],
    names: Mapping[Tensor, str],
    held: Sequence[nn.Parameter],
    features: Sequence[Tensor] = (),
    ways_out: str = _WAYS_OUT,
) -> None:
    """Checks with three passes that the part of a graph that several tasks share is repeatable.

    One pass starts from a zero gradient.

    Args:
        losses: The loss of each task.
        names: The names of the parameters and features whose gradients are compared.
        held: The parameters whose `.grad` must not change.
        features: Where the passes end, if not at the leaves.
        ways_out: The remedy that messages recommend.

    Raises:
        RuntimeError: Two passes differ, the pass from zero gives a nonzero gradient, or a later
            pass fails.

    """
    part = _shared_part(losses, features)
    for task, edges in part.starts.items():
        _check_repeatable(task, edges, names, held, ways_out, is_half=part.is_half)


def _attributes(names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """By name: parameters' tensor attributes of the parameter's shape, such as `main_grad`."""
    return {
        f"{name}.{key}": value
        for p, name in names.items()
        for key, value in vars(p).items()
        if isinstance(value, Tensor) and value not in names and _is_like(value, p)
    }


def _is_like(value: Tensor, p: Tensor) -> bool:
    """Whether a tensor has the shape and device of a parameter, and readable memory."""
    plain = value.layout is torch.strided and not (value.is_quantized or value.is_neg())
    if not plain or is_sharded(value) or (value.shape, value.device) != (p.shape, p.device):
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


class _SharedPart(NamedTuple):
    """The part of a graph that passes of several tasks visit."""

    starts: dict[str, set[Edge]]
    """By task: the edges by which its pass enters the shared part. A task is left out if earlier
    tasks' passes visit all its shared nodes."""
    is_half: bool
    """Whether any gradient in the shared part has 16 bits."""


def _shared_part(losses: Mapping[str, Tensor], features: Sequence[Tensor]) -> _SharedPart:
    ends = {edge_of(z) for z in features}
    nodes = {task: walk([edge_of(loss)], ends).nodes for task, loss in losses.items()}
    visits = Counter(node for of_task in nodes.values() for node in of_task)
    shared = {node for node, number in visits.items() if number > 1}
    # The check uses `torch.autograd.grad`, which leaves `.grad` alone, but does not support
    # reentrant checkpointing.
    if any(map(is_reentrant, shared)):
        warnings.warn(
            "reentrant checkpointing prevents the check that backward passes are repeatable: use"
            " checkpoint(..., use_reentrant=False)",
            stacklevel=2,
        )
        return _SharedPart({}, is_half=False)
    if not all(map(_is_plain, shared)):
        return _SharedPart({}, is_half=False)
    is_half = any(like.dtype in _HALF for node in shared for like in arguments_of(node))
    left, starts = set(shared), dict[str, set[Edge]]()
    for task, of_task in nodes.items():
        if not left.isdisjoint(of_task):
            edges = [edge for node in of_task - shared for edge in node.next_functions]
            entries = {edge for edge in (edge_of(losses[task]), *edges) if edge[0] in shared}
            starts[task] = entries - ends
            left -= of_task
    return _SharedPart(starts, is_half)


_HALF = torch.bfloat16, torch.float16


def _is_plain(node: Any) -> bool:
    """Whether gradients that arrive at a node are not nested, and have known sizes."""
    return all(
        not like.is_cpp_nested_tensor and all(isinstance(size, int) for size in like.shape)
        for like in arguments_of(node)
    )


def _check_repeatable(
    task: str,
    starts: Set[Edge],
    names: Mapping[Tensor, str],
    held: Sequence[nn.Parameter],
    ways_out: str,
    *,
    is_half: bool,
) -> None:
    remedy = (
        f": {ways_out}; an auxiliary loss belongs in a task's loss, or is a task of its own{_OFF}"
    )
    targets = [target for target in names if target.requires_grad]
    edges = [GradientEdge(*edge) for edge in starts]
    with noted("raised in a check of backward passes" + _OFF):
        # Copies, because a function may write every pass's gradients into the same buffer.
        first = [g if g is None else g.clone() for g in _gradients(edges, 1, targets, held)]
    try:
        leaks = [_norm(g, nan=0.0) for g in _gradients(edges, 0, targets, held)]
        second = _gradients(edges, 1, targets, held)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RuntimeError(
            "backward makes a pass per task through one graph, so a pass must be repeatable, got"
            f" {type(error).__name__}: {error} in a second pass of {task!r}{remedy}"
        ) from error
    norms = list(map(_norm, first))
    largest = max(norms, default=0.0)
    tolerance, floor = (_HALF_TOLERANCE, _HALF_FLOOR) if is_half else (_TOLERANCE, _FLOOR)
    for t, before, after, leak, norm in zip(targets, first, second, leaks, norms, strict=True):
        if leak > 0:
            raise RuntimeError(
                "backward makes a pass per task through one graph, so a gradient that the pass"
                f" itself adds would count once per task: a pass of {task!r} that started from zero"
                f" gave {names[t]} a gradient of norm {leak:.3g}{remedy}"
            )
        if before is None or after is None:
            difference = norm + _norm(after)
        else:
            difference = _norm(after - before)
        if difference > max(tolerance * norm, floor * largest):
            raise RuntimeError(
                "backward makes a pass per task through one graph, so a pass must be repeatable,"
                f" but two passes of {task!r} gave gradients of {names[t]} that differ by"
                f" {difference:.3g}, and the first has a norm of {norm:.3g}{remedy}"
            )


def _gradients(
    edges: Sequence[GradientEdge],
    factor: int,
    targets: Sequence[Tensor],
    held: Sequence[nn.Parameter],
) -> list[Tensor | None]:
    """The gradients of a pass that begins at these edges, and leaves `.grad` unchanged.

    A pass from the loss would also run nodes that only its task visits, and these may allow only
    one pass.
    """
    starts = [_any_gradient(edge) * factor for edge in edges]
    before = [p.grad for p in held]
    for p in held:
        p.grad = None
    try:
        found = torch.autograd.grad(edges, targets, starts, retain_graph=True, allow_unused=True)
        # A function that runs a backward pass of its own accumulates gradients in `.grad`.
        inner = [target.grad if target.is_leaf else None for target in targets]
    finally:
        for p, grad in zip(held, before, strict=True):
            p.grad = grad
    pairs = zip(found, inner, strict=True)
    sums = (b if a is None else a if b is None else a + b for a, b in pairs)
    return [None if g is None or g.layout is not torch.strided else g for g in sums]


def _any_gradient(edge: GradientEdge) -> Tensor:
    """Varied numbers as an edge's gradient: hardly any operation maps all of them to zero."""
    like = arguments_of(edge.node)[edge.output_nr]
    numbers = torch.arange(math.prod(like.shape), device=like.device, dtype=torch.float32)
    return (0.01 + 0.005 * (0.7 * numbers + 0.3).sin()).to(like.dtype).reshape(like.shape)


def _fingerprint(grad: Tensor) -> Tensor:
    """Float64 [2]: the sum and the norm."""
    grad = as_real(grad)
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return torch.stack([grad.sum(dtype=torch.float64), norm])


def _agree(now: Tensor, before: Tensor) -> bool:
    """Whether two fingerprints differ by rounding alone, relative to the norm."""
    # The sum may be zero up to rounding, which depends on the memory layout.
    near = (now - before).abs() <= 1e-6 * before[1]
    return bool((near | (now == before) | (now.isnan() & before.isnan())).all())


def _norm(grad: Tensor | None, nan: float | None = None) -> float:
    """The norm of a gradient; `nan`, if given, replaces non-finite elements."""
    if grad is None:
        return 0.0
    grad = as_real(grad)
    grad = grad if nan is None else grad.nan_to_num(nan, nan, nan)
    return float(torch.linalg.vector_norm(grad, dtype=torch.float64))
