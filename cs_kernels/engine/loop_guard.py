"""Watches the torch optimizers: every update is used once, and only when it is complete.

An optimizer step before the update of `backward(..., update=False)` raises; so does a missing one
after the update, and one after `MultiTaskOptimizer.step`, which has made it.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from cs_kernels.engine.accumulation import Accumulation
from cs_kernels.engine.torch_optimizers import TorchOptimizers, held_by
from cs_kernels.gradients import TaskGradients


def ends_with_gradient(
    parameters: Sequence[nn.Parameter],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The first and the last parameter with a gradient, and these: marks that are seldom large."""
    for ordered in (parameters, reversed(parameters)):
        found = next((p for p in ordered if p.grad is not None), None)
        if found is not None and found.grad is not None:
            yield found, found.grad


def _gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The gradients of its parameters; of a sparse one, the values."""
    grads = (p.grad for p in held_by(optimizer) if p.grad is not None)
    return (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)


class LoopGuard:
    """Notices every step of the torch optimizers, and raises for one that is wrong."""

    def __init__(
        self, gradients: TaskGradients, optimizers: TorchOptimizers, accumulation: Accumulation
    ) -> None:
        self._gradients = gradients
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._unused: dict[int, tuple[nn.Parameter, int]] = {}
        """By index of an optimizer that has not stepped since: a parameter with an update of
        `backward` in `.grad`, and the parameter's version."""
        self._used: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        """By index of an optimizer that has made a step: parameters, and their `.grad` then."""
        self._shared = set(gradients.parameters)
        self._seen: list[int] = []
        """The indices of the optimizers whose steps are noticed."""
        self._passes = False
        """Whether passes of `MultiTaskOptimizer.step` run."""
        self._notice_steps()

    def clear(self) -> None:
        """Forgets an update that was not used, and those that were."""
        self._unused.clear()
        self._used.clear()

    def note_steps(self) -> None:
        """Notes that `MultiTaskOptimizer.step` has stepped the torch optimizers."""
        self._accumulation.forget_dropped()
        for n, optimizer in enumerate(self._optimizers):
            self._used[n] = [*ends_with_gradient(held_by(optimizer))]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around the passes of `MultiTaskOptimizer.step`, in which no optimizer may be stepped."""
        self._passes = True
        try:
            yield
        finally:
            self._passes = False

    def note_update(self) -> None:
        """Notes that the update is in `.grad`, for the torch optimizers to use."""
        # One alone that is not noticed may still change the versions of its parameters.
        for n in self._seen if len(self._optimizers) > 1 else [0]:
            held = held_by(self._optimizers[n])
            updated = (p for p in held if p.grad is not None and p in self._shared)
            parameter = next(updated, None)
            if parameter is not None:
                self._unused[n] = parameter, parameter._version

    def check_update_used(self) -> None:
        """Raises if the update of the last `backward` would be lost."""
        unused, self._unused = self._unused, {}
        unstepped = [n for n, (p, version) in unused.items() if p._version == version]
        # These host synchronizations are rare: gradients were set to zero, or a scaler or the loop
        # has skipped the step because they are not finite.
        if not any(grad.any() for n in unstepped for grad in _gradients_of(self._optimizers[n])):
            return
        if all(grad.isfinite().all() for one in self._optimizers for grad in _gradients_of(one)):
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
            if this._accumulation.is_open():
                raise RuntimeError(
                    "the gradients of backward(..., update=False) wait for their update: end these"
                    " with backward(...) before optimizer.step()"
                )
            if this._accumulation.step is not None:  # `zero_grad()` has dropped them.
                this._accumulation.clear()
                this.clear()
                this._gradients.clear()

        def used(n: int) -> None:
            this._unused.pop(n, None)
            this._accumulation.forget_dropped()

        for n, optimizer in enumerate(self._optimizers):
            inner = getattr(optimizer, "optimizer", optimizer)  # A wrapper has one inside.
            with contextlib.suppress(AttributeError):
                hook = inner.register_step_pre_hook(lambda *_, n=n: refuse(n))
                weakref.finalize(self, hook.remove)
                hook = inner.register_step_post_hook(lambda *_, n=n: used(n))
                weakref.finalize(self, hook.remove)
                self._seen.append(n)
