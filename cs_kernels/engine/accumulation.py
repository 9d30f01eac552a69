"""Gradients of `backward(update=False)` that wait for their update.

An exception in `backward` drops these gradients, and the next call warns.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from cs_kernels.engine.torch_optimizers import TorchOptimizers
from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Step


class Accumulation:
    """The gradients that calls of `backward(update=False)` have left for a later call.

    An accumulation is open from the first such call (`wait`) until the update (`clear`), an
    exception (`dropped_on_error`), or a `zero_grad()`, which `is_open` detects.
    """

    def __init__(self, gradients: TaskGradients, optimizers: TorchOptimizers) -> None:
        self.step: Step | None = None
        """The step that the first call has begun; None if no gradients wait."""
        self._calls = 0
        """The number of calls whose gradients wait for the update."""
        self._dropped = ""
        """The beginning of the next call's warning, if an exception has dropped gradients."""
        self._gradients = gradients
        self._optimizers = optimizers
        self._marks: list[tuple[nn.Parameter, Tensor | None, int]] = []
        """Each optimizer parameter, its `.grad` after the last call, and the version of `.grad`."""
        self._lent: nn.Parameter | None = None
        """The parameter with a lent tensor in `.grad` (`TaskGradients.lend`), or None."""

    def clear(self) -> None:
        """Forgets gradients that wait for their update."""
        self.step = self._lent = None
        self._calls = 0
        self._marks = []

    def forget_dropped(self) -> None:
        """Cancels the warning about dropped gradients, since another update was made."""
        self._dropped = ""

    def begin(self) -> None:
        """Begins an update; warns if an exception has dropped the previous update's gradients."""
        self.clear()
        if self._dropped:
            dropped, self._dropped = self._dropped, ""
            warnings.warn(f"{dropped}: this call begins a new update", stacklevel=5)

    def wait(self, step: Step) -> None:
        """Keeps the gradients of a call of `backward(update=False)` for the next call."""
        # Leaves a tensor in one `.grad`, so that `is_open` notices a `zero_grad()`.
        lent = self._gradients.lend()
        self.step = step
        self._calls += 1
        self._mark(lent)

    @contextlib.contextmanager
    def dropped_on_error(self, drop: Callable[[], None]) -> Iterator[None]:
        """Wraps `backward`: an exception drops the waiting gradients."""
        calls = self._calls
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

    def _mark(self, lent: tuple[int, Tensor] | None) -> None:
        """Puts the lent tensor into `.grad`, and records all gradients there."""
        held = self._optimizers.held()
        if lent is not None:
            self._lent = self._gradients.parameters[lent[0]]
            self._lent.grad = lent[1]
            held.insert(0, self._lent)
        grads = ((parameter, parameter.grad) for parameter in held)
        self._marks = [(p, grad, 0 if grad is None else grad._version) for p, grad in grads]

    def unmark(self) -> None:
        """Removes the tensor that `_mark` put into `.grad`."""
        if self._lent is not None:
            self._lent.grad = None
        self._marks, self._lent = [], None

    def is_open(self) -> bool:
        """Whether gradients wait for their update; False after a `zero_grad()`.

        Raises:
            RuntimeError: The gradients were changed, but not set to zero.

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
        name = self._gradients.name_of(changed[0])
        raise RuntimeError(
            "the gradients of backward(..., update=False) must stay unchanged until the update, but"
            f" the gradient of {name} was changed: clip, unscale or add your own gradient only"
            " after the update"
        )
