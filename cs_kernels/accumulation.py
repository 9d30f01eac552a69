"""Gradients of `backward(update=False)` that wait for their update, and updates not yet used.

They must not get lost: an optimizer step before the update raises, and so does a missing one after.
No update must be used twice: an optimizer step after `MultiTaskOptimizer.step` raises. An exception
in `backward` drops all gradients that wait, and the next call says so.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from cs_kernels.checks import held_parameters
from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Step


def ends_with_gradient(
    parameters: Sequence[nn.Parameter],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The first and the last parameter with a gradient, and these: marks that are seldom large."""
    for ordered in (parameters, reversed(parameters)):
        found = next((p for p in ordered if p.grad is not None), None)
        if found is not None and found.grad is not None:
            yield found, found.grad


class Accumulation:
    """The gradients or the update that `backward` has left for a later call or the optimizer."""

    def __init__(
        self, gradients: TaskGradients, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.step: Step | None = None
        """The step that `backward(update=False)` has begun."""
        self.calls = 0
        """The calls of `backward(update=False)` whose gradients wait."""
        self._dropped = ""
        """The gradients that an exception has dropped, until a call says so."""
        self._gradients = gradients
        self._optimizers = optimizers
        self._marks: list[tuple[nn.Parameter, Tensor | None, int]] = []
        """All parameters, their gradients in `.grad`, and the gradients' versions."""
        self._lent: nn.Parameter | None = None
        """The first of them, if its gradient is in the rows too."""
        self._unused: tuple[nn.Parameter, int] | None = None
        """A parameter with an update of `backward` in `.grad`, and the parameter's version."""
        self._used: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        """By index of an optimizer that has made a step: parameters, and their `.grad` then."""
        self._passes = False
        """Whether passes of `MultiTaskOptimizer.step` run."""
        self._notice_steps()

    def clear(self) -> None:
        """Forgets gradients that wait for their update, and an update that was not used."""
        self.step = self._lent = self._unused = None
        self.calls = 0
        self._marks = []
        self._used.clear()

    def restart(self) -> None:
        """As `clear`, and does not say what an exception has dropped."""
        self.clear()
        self._dropped = ""

    def begin(self) -> None:
        """Begins a new update; warns if an exception has dropped the gradients of the last one."""
        self.clear()
        if self._dropped:
            dropped, self._dropped = self._dropped, ""
            warnings.warn(f"{dropped}: this call begins a new update", stacklevel=4)

    def wait(self, step: Step) -> None:
        """Keeps the gradients of a call of `backward(update=False)` for the next one."""
        self.step = step
        self.calls += 1
        self.mark()

    @contextlib.contextmanager
    def dropped_on_error(self, drop: Callable[[], None]) -> Iterator[None]:
        """Around `backward`: an exception drops the gradients that wait."""
        calls = self.calls
        try:
            calls *= self.is_open()
            yield
        except BaseException as error:
            if calls:
                drop()
                self._dropped = (
                    f"{type(error).__name__} in backward has dropped the gradients of {calls}"
                    " calls with update=False before it"
                )
            raise

    def note_steps(self) -> None:
        """Notes that `MultiTaskOptimizer.step` has stepped the torch optimizers."""
        self._dropped = ""
        for n, optimizer in enumerate(self._optimizers):
            self._used[n] = [*ends_with_gradient(held_parameters([optimizer]))]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around the passes of `MultiTaskOptimizer.step`, in which no optimizer may be stepped."""
        self._passes = True
        try:
            yield
        finally:
            self._passes = False

    def mark(self) -> None:
        """Remembers the gradients in `.grad`, and puts one there, so that `zero_grad()` shows."""
        lent = self._gradients.lend()
        held = held_parameters(self._optimizers)
        if lent is not None:
            self._lent = self._gradients.parameters[lent[0]]
            self._lent.grad = lent[1]
            held.insert(0, self._lent)
        grads = ((parameter, parameter.grad) for parameter in held)
        self._marks = [(p, grad, 0 if grad is None else grad._version) for p, grad in grads]

    def unmark(self) -> None:
        """Takes a gradient of the rows out of `.grad` again."""
        if self._lent is not None:
            self._lent.grad = None
        self._marks, self._lent = [], None

    def is_open(self) -> bool:
        """Whether gradients wait for their update, and `zero_grad()` has not dropped them.

        Raises:
            RuntimeError: They were changed, but not set to zero.

        """
        dense = (
            p for p, grad, _ in self._marks if grad is not None and grad.layout is torch.strided
        )
        first = next(dense, None)
        if self.step is None or first is None:
            return self.step is not None
        changed = [
            p
            for p, grad, version in self._marks
            if p.grad is not grad or (grad is not None and grad._version != version)
        ]
        if not changed:
            return True
        if first.grad is None or (any(p is first for p in changed) and not first.grad.any()):
            return False
        names = dict(zip(self._gradients.parameters, self._gradients.names, strict=True))
        name = names.get(changed[0], f"a parameter of shape {tuple(changed[0].shape)}")
        raise RuntimeError(
            "the gradients of backward(..., update=False) must stay as they are until their update,"
            f" got a changed one for {name}: clip or unscale after the update"
        )

    def note_update(self) -> None:
        """Notes that the update is in `.grad`, for the torch optimizer to use."""
        updated = (p for p in self._gradients.parameters if p.grad is not None)
        self._unused = next(((p, p._version) for p in updated), None)

    def check_update_used(self) -> None:
        """Raises if the update of the last `backward` would be lost."""
        unused, self._unused = self._unused, None
        if unused is None or unused[0]._version != unused[1]:
            return
        # These host synchronizations are rare: gradients were set to zero, or a scaler has skipped
        # the step because they are not finite.
        grads = [
            p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for p in held_parameters(self._optimizers)
            if p.grad is not None
        ]
        if any(grad.any() for grad in grads) and all(grad.isfinite().all() for grad in grads):
            self._unused = unused
            raise RuntimeError(
                "the update of the last backward(...) is still in .grad: call optimizer.step() or"
                " zero_grad() first; to add up micro-batches, backward(..., update=False)"
            )

    def _notice_steps(self) -> None:
        """Notes optimizer steps, also those that write into `.data` and change no version."""
        this = weakref.proxy(self)  # The optimizer must not keep this alive.

        def refuse(n: int) -> None:
            if this._passes:
                raise RuntimeError(
                    "closure must not step the optimizer, which step(closure) does after all"
                    " passes: leave out optimizer.step()"
                )
            if any(parameter.grad is grad for parameter, grad in this._used.get(n, ())):
                raise RuntimeError(
                    "optimizer has made this step in step(closure): leave out optimizer.step(), or"
                    " set gradients to None by zero_grad() before gradients of your own"
                )
            if this.is_open():
                raise RuntimeError(
                    "the gradients of backward(..., update=False) wait for their update: end these"
                    " with backward(...) before optimizer.step()"
                )
            if this.step is not None:  # `zero_grad()` has dropped them.
                this.clear()
                this._gradients.clear()

        def used(*_: object) -> None:
            this._unused, this._dropped = None, ""

        for n, optimizer in enumerate(self._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # A wrapper has one inside.
            with contextlib.suppress(AttributeError):
                hook = inner.register_step_pre_hook(lambda *_, n=n: refuse(n))
                weakref.finalize(self, hook.remove)
                weakref.finalize(self, inner.register_step_post_hook(used).remove)
