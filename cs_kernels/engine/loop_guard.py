"""Checks that the torch optimizers use every gradient once, and only when it is complete.

These mistakes raise an error: an optimizer step in the closure of `step`, or before the update of
`backward(..., update=False)`; a missing optimizer step after an update; a second step with the same
update; and a call that would drop an unused gradient from elsewhere, such as the gradient of a loss
that belongs to no task.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cs_kernels.engine.accumulation import Accumulation
from cs_kernels.engine.torch_optimizers import TorchOptimizers, held_by
from cs_kernels.errors import first_of
from cs_kernels.gradients import TaskGradients
from cs_kernels.torch_internals.fsdp import counter_of

_MARK = "_cs_kernels_mark"
"""The name of the attribute with a mark: on a torch optimizer, a `_Mark`; on a gradient that an
update has left or an optimizer step has used, a `_Mark` and the gradient's version. (Weak
references to gradients would keep `Module.to` from swapping them, and addresses may be reused.)"""

_UNMARKED = (None, 0)


class _Mark:
    """A mark on a torch optimizer and its gradients.

    `owner` stands for the guard whose update waits for the optimizer's step; None if no update
    waits. Guards that share an optimizer replace each other's marks, so that each guard sees the
    other's updates.
    """

    def __init__(self, owner: object | None) -> None:
        self.owner = owner


def _inner(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper, if it has one."""
    return getattr(optimizer, "optimizer", optimizer)


def _values(grads: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """The gradients that are not None; for a sparse gradient, its values."""
    for grad in grads:
        if grad is not None:
            yield grad.coalesce().values() if grad.is_sparse else grad


def _mark_on(optimizer: Any) -> _Mark:
    mark: _Mark = getattr(_inner(optimizer), _MARK)
    return mark


def _is_zero(grads: Iterable[Tensor | None]) -> bool:
    """Whether all gradients are zero; makes one host synchronization."""
    found = [grad.any() for grad in _values(grads)]
    return not found or not bool(torch.stack([one.to(found[0].device) for one in found]).any())


def _is_finite(grads: Iterable[Tensor | None]) -> bool:
    """Whether all gradients are finite; otherwise a scaler or the loop skips the step."""
    return all(bool(grad.isfinite().all()) for grad in _values(grads))


def _kind_of(held: list[nn.Parameter]) -> object:
    return [(p.dtype, p.device) for p in (*held[:1], *held[-1:])]


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor | None]:
    return [p.grad for p in held_by(optimizer)]


class LoopGuard:
    """Watches every step of the torch optimizers, and raises for a mistake."""

    def __init__(
        self, gradients: TaskGradients, optimizers: TorchOptimizers, accumulation: Accumulation
    ) -> None:
        self._gradients = gradients
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._unused: dict[int, tuple[nn.Parameter, int]] = {}
        """By index of an optimizer that has not used the last update of `backward`: a parameter
        with this update in `.grad`, and the parameter's version."""
        self._owner = object()
        """Stands for this guard in the marks of its updates."""
        self._kinds: dict[int, object] = {}
        """By index of an optimizer: the dtype and device of its first and last parameter at the
        last mark."""
        self._updated: set[int] = set()
        """The indices of the optimizers whose last step has used an update."""
        self._shared = set(gradients.parameters)
        self._seen: list[int] = []
        """The indices of the optimizers with our step hooks."""
        self._replayed = False
        """Whether a CUDA graph has written the gradients, which then have no marks."""
        self._now: Literal["passes", "steps"] | None = None
        """What `MultiTaskOptimizer.step` is running: passes, or the torch optimizers' steps."""
        self._notice_steps()
        self._mark()

    def clear(self) -> None:
        """Forgets all updates, used or not."""
        self._unused.clear()
        self._updated.clear()
        for mark in map(_mark_on, self._optimizers):
            mark.owner = None if mark.owner is self._owner else mark.owner

    def note_steps(self) -> None:
        """Notes that `MultiTaskOptimizer.step` has stepped the torch optimizers."""
        self._accumulation.forget_dropped()
        self._updated.update(range(len(self._optimizers)))
        self._mark()

    def note_replay(self) -> None:
        """Notes that a CUDA graph has replayed a step, and left gradients without marks."""
        self._replayed = True

    def _mark(self, owner: object | None = None) -> None:
        self._replayed = False
        for n in range(len(self._optimizers)):
            self._mark_one(n, owner)

    def _mark_one(self, n: int, owner: object | None = None) -> None:
        mark, held = _Mark(owner), held_by(self._optimizers[n])
        setattr(_inner(self._optimizers[n]), _MARK, mark)
        for parameter in held:
            grad: Any = parameter.grad
            if grad is not None:
                counter = grad if type(grad) is Tensor else counter_of(grad)
                grad._cs_kernels_mark = mark, counter._version  # As setattr(grad, _MARK, ...).
        self._kinds[n] = _kind_of(held)

    @contextlib.contextmanager
    def during(self, now: Literal["passes", "steps"]) -> Iterator[None]:
        """Wraps passes of `MultiTaskOptimizer.step`, or its steps of the torch optimizers."""
        self._now = now
        try:
            yield
        finally:
            self._now = None

    def note_update(self) -> None:
        """Notes that the update is in `.grad`, for the torch optimizers to use."""
        # An optimizer without our hooks is watched by the versions of its parameters, which a step
        # changes, and only if it is the only optimizer.
        for n in self._seen if len(self._optimizers) > 1 else [0]:
            held = held_by(self._optimizers[n])
            updated = (p for p in held if p.grad is not None and p in self._shared)
            parameter = next(updated, None)
            if parameter is not None:
                self._unused[n] = parameter, parameter._version
        self._mark(self._owner)

    def check_gradients(self) -> None:
        """Checks that no gradient is lost if `.grad` is cleared now.

        Raises:
            RuntimeError: An unused update, or an unused gradient of another loss, is in `.grad`.

        """
        own = [p for n in self._seen for p in self._unused_by(n)] if not self._replayed else []
        grads = [p.grad for p in own]
        # `zero_grad(set_to_none=False)` leaves zeros.
        if own and not _is_zero(grads) and _is_finite(grads):
            names = [self._gradients.name_of(p) for p in own]
            raise RuntimeError(
                "gradients must be None or used by optimizer.step() before step or backward clears"
                f" them, but the gradients of {first_of(names)} come from a loss outside this"
                " MultiTaskOptimizer: add this loss to a task's, or call its backward() between"
                " opt.backward(...) and optimizer.step(), or drop it with zero_grad(). (Clip before"
                " optimizer.step(), not after it; for a norm alone, use get_total_norm)"
            )
        self._check_other_used()
        self._check_update_used()

    def _check_other_used(self) -> None:
        """Raises if another `MultiTaskOptimizer`'s update waits for the same torch optimizer."""
        seen = [self._optimizers[n] for n in self._seen]
        waits = [one for one in seen if _mark_on(one).owner not in (None, self._owner)]
        grads = [grad for one in waits for grad in _gradients_of(one)]
        if waits and not self._replayed and not _is_zero(grads) and _is_finite(grads):
            raise RuntimeError(
                "the update of another MultiTaskOptimizer's backward(...) is still in .grad, and"
                " both share a torch optimizer: call optimizer.step() or zero_grad() between them,"
                " or give each a torch optimizer of its own"
            )

    def _unused_by(self, n: int) -> list[nn.Parameter]:
        """The parameters whose gradient was replaced or changed since the last mark.

        An update that waits for its step may be changed in place.
        """
        held = held_by(self._optimizers[n])
        if self._kinds[n] != _kind_of(held):
            return []  # `Module.to` has replaced the gradients, so their marks are gone.
        last, found = _mark_on(self._optimizers[n]), []
        waits = last.owner is self._owner
        for parameter in held:
            grad = parameter.grad
            if grad is not None:
                mark, version = getattr(grad, _MARK, _UNMARKED)
                counter = grad if type(grad) is Tensor else counter_of(grad)
                if mark is not last or not (waits or version == counter._version):
                    found.append(parameter)
        return found

    def _is_there(self, n: int) -> bool:
        """Whether a gradient with the last mark is still in `.grad`."""
        last = _mark_on(self._optimizers[n])
        grads = _gradients_of(self._optimizers[n])
        return any(getattr(grad, _MARK, _UNMARKED)[0] is last for grad in grads)

    def _check_update_used(self) -> None:
        unused, self._unused = self._unused, {}
        unstepped = [n for n, (p, version) in unused.items() if p._version == version]
        # These host synchronizations are rare: they happen only if gradients were zeroed, or if a
        # scaler or the loop skipped the step because gradients are non-finite.
        if _is_zero(grad for n in unstepped for grad in _gradients_of(self._optimizers[n])):
            return
        if _is_finite(grad for one in self._optimizers for grad in _gradients_of(one)):
            self._unused = unused
            raise RuntimeError(
                "the update of the last backward(...) is still in .grad: call optimizer.step() or"
                " zero_grad() first; to add up micro-batches, use backward(..., update=False)"
            )

    def _notice_steps(self) -> None:
        """Registers step hooks, since a step that writes into `.data` changes no version."""
        this = weakref.proxy(self)  # The optimizer must not keep the guard alive.

        def refuse(n: int) -> None:
            if this._now == "passes":
                raise RuntimeError(
                    "closure must not step the optimizer, since step(closure) does so after"
                    " all passes: leave out optimizer.step()"
                )
            waits = _mark_on(this._optimizers[n]).owner is not None
            if n in this._updated and not waits and this._is_there(n):
                raise RuntimeError(
                    "optimizer has already used the update in .grad: after step(closure), which"
                    " makes the step itself, drop this optimizer.step(); otherwise call zero_grad()"
                    " and compute new gradients first"
                )
            if this._accumulation.is_open():
                raise RuntimeError(
                    "the gradients of backward(..., update=False) wait for their update: call"
                    " backward(...) before optimizer.step()"
                )
            if this._accumulation.step is not None:  # `zero_grad()` has dropped the gradients.
                this._accumulation.clear()
                this.clear()
                this._gradients.clear()

        def used(n: int) -> None:
            if this._unused.pop(n, None) is not None:
                this._updated.add(n)
            else:
                this._updated.discard(n)
            if this._now != "steps":  # Otherwise, `note_steps` marks all gradients.
                this._mark_one(n)
                this._accumulation.forget_dropped()

        for n, optimizer in enumerate(self._optimizers):
            inner = _inner(optimizer)
            with contextlib.suppress(AttributeError):
                hook = inner.register_step_pre_hook(lambda *_, n=n: refuse(n))
                weakref.finalize(self, hook.remove)
                hook = inner.register_step_post_hook(lambda *_, n=n: used(n))
                weakref.finalize(self, hook.remove)
                self._seen.append(n)
