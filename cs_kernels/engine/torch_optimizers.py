"""The torch optimizers of a training loop, used as one."""

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import nn

from cs_kernels.errors import described
from cs_kernels.torch_internals.fsdp import is_sharded
from cs_kernels.torch_internals.optimizers import step_hooks


class TorchOptimizers(tuple[torch.optim.Optimizer, ...]):
    """One torch optimizer, or several without a common parameter."""

    @classmethod
    def of(cls, optimizer: object) -> "TorchOptimizers":
        """Checks the argument `optimizer`, and returns all torch optimizers in it.

        Raises:
            TypeError: An entry is not a torch optimizer.
            ValueError: There is none, one needs a closure, or two hold the same parameter.

        """
        several = isinstance(optimizer, Sequence)
        given: Any = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
        optimizers = cls(given)
        seen: set[nn.Parameter] = set()
        if not optimizers:
            raise ValueError("optimizer must be a torch optimizer or a sequence of them, got none")
        for one in optimizers:
            if not hasattr(one, "param_groups") or not callable(getattr(one, "step", None)):
                raise TypeError(
                    "optimizer must be a torch optimizer or a sequence of them, got"
                    f" {described(one)}{' in the sequence' if several else ''}"
                )
            closure = inspect.signature(one.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise ValueError(
                    f"optimizer must step without a closure, got {type(one).__name__}: train with"
                    f" Adam and surgery first, then with {type(one).__name__} on the sum of the"
                    " losses, without MultiTaskOptimizer"
                )
            held = set(held_by(one))
            if seen & held:
                raise ValueError(
                    f"optimizer must hold each parameter once, got {len(seen & held)} held twice"
                )
            seen |= held
        return optimizers

    def held(self) -> list[nn.Parameter]:
        """The parameters of all torch optimizers."""
        return [*chain.from_iterable(map(held_by, self))]

    def options(self) -> Iterator[tuple[int, str, object]]:
        """The options of each parameter group, such as learning rates: group, name, value."""
        groups = (group for one in self for group in one.param_groups)
        for n, group in enumerate(groups):
            yield from ((n, name, value) for name, value in group.items() if name != "params")

    def numbers(self) -> list[object]:
        """The options that are numbers on the host."""
        found: list[object] = []
        for n, name, value in self.options():
            values = value if isinstance(value, tuple | list) else (value,)
            if all(isinstance(v, Real) for v in values):
                found.append((n, name, *map(float, values)))
        return found

    def state(self) -> Iterator[tuple[str, object]]:
        """The entries of the torch optimizers' states, by name."""
        for one in self:
            for of_parameter in one.state.values():
                yield from of_parameter.items()

    def hooks(self) -> Iterator[object]:
        """The hooks of the torch optimizers' steps, which may clip gradients."""
        for one in self:
            yield from step_hooks(one)

    def step(self, scaler: torch.amp.GradScaler | None) -> None:
        """Steps each torch optimizer; a scaler skips the step if a gradient is non-finite."""
        if scaler is None:
            for one in self:
                one.step()
        else:
            for one in self:
                # The scaler raises for an optimizer without any gradient, such as the optimizer
                # of another task's head.
                if any(p.grad is not None for p in held_by(one)):
                    scaler.step(one)
            scaler.update()
        # An enclosing autocast would keep using cached casts of the old weights.
        torch.clear_autocast_cache()

    def check_scales(self) -> None:
        """Raises if a scaler would have to unscale sharded and other gradients together."""
        for one in self:
            sharded = sum(map(is_sharded, held_by(one)))
            others = len(held_by(one)) - sharded
            if sharded and others:
                raise ValueError(
                    "optimizer must not hold both sharded and other parameters with a scaler, got"
                    f" {type(one).__name__} with {sharded} sharded and {others} others: call"
                    " fully_shard on the heads too, or build a second optimizer"
                )

    def check_step_now(self) -> None:
        """Raises inside `accelerator.accumulate`, which delays steps to the last micro-batch."""
        for one in self:
            state = getattr(one, "gradient_state", None)
            if not getattr(state, "sync_gradients", True):
                raise RuntimeError(
                    f"optimizer must step now, but {type(one).__name__} waits for"
                    " more micro-batches: use step([closure, ...]) without accelerator.accumulate,"
                    " or backward(losses, update=accelerator.sync_gradients)"
                )


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of one torch optimizer."""
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
