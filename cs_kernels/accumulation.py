"""Gradients of `backward(update=False)` that wait for their update, and updates not yet used.

They must not get lost: an optimizer step before the update raises, and so does a missing one after.
No update must be used twice: an optimizer step after `MultiTaskOptimizer.step` raises.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

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
        self._gradients = gradients
        self._optimizers = optimizers
        self._mark: tuple[nn.Parameter, Tensor, int] | None = None
        """A parameter, its gradient in `.grad`, and the gradient's version."""
        self._lent: str | None = None
        """The name of that parameter, if its gradient is in the rows too."""
        self._unused: tuple[nn.Parameter, int] | None = None
        """A parameter with an update of `backward` in `.grad`, and the parameter's version."""
        self._used: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        """By index of an optimizer that has made a step: parameters, and their `.grad` then."""
        self._passes = False
        """Whether passes of `MultiTaskOptimizer.step` run."""
        self._notice_steps()

    def clear(self) -> None:
        """Forgets gradients that wait for their update, and an update that was not used."""
        self.step = self._mark = self._lent = self._unused = None
        self._used.clear()

    def note_steps(self) -> None:
        """Notes that `MultiTaskOptimizer.step` has stepped the torch optimizers."""
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
        """Remembers one gradient in `.grad`, where `zero_grad()` shows."""
        lent = self._gradients.lend()
        if lent is not None:
            parameter, grad = self._gradients.parameters[lent[0]], lent[1]
            self._lent = self._gradients.names[lent[0]]
            parameter.grad = grad
            self._mark = parameter, grad, grad._version
            return
        for parameter in held_parameters(self._optimizers):
            held = parameter.grad
            if held is not None and held.layout is torch.strided:
                self._mark = parameter, held, held._version
                return

    def unmark(self) -> None:
        """Takes a gradient of the rows out of `.grad` again."""
        if self._mark is not None and self._lent is not None:
            self._mark[0].grad = None
        self._mark = self._lent = None

    def is_open(self) -> bool:
        """Whether gradients wait for their update, and `zero_grad()` has not dropped them.

        Raises:
            RuntimeError: They were changed, but not set to zero.

        """
        if self.step is None or self._mark is None:
            return self.step is not None
        parameter, grad, version = self._mark
        if parameter.grad is not grad:
            return False
        if grad._version == version:
            return True
        if not grad.any():
            return False
        if self._lent is not None:
            raise RuntimeError(
                "the gradients of backward(..., update=False) must stay as they are until their"
                f" update, got a changed one for {self._lent}: clip or unscale after the update"
            )
        return True

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
            this._unused = None

        for n, optimizer in enumerate(self._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # A wrapper has one inside.
            with contextlib.suppress(AttributeError):
                hook = inner.register_step_pre_hook(lambda *_, n=n: refuse(n))
                weakref.finalize(self, hook.remove)
                weakref.finalize(self, inner.register_step_post_hook(used).remove)
