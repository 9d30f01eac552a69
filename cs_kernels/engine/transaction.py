"""All or nothing: prepares the passes of a step, and undoes them after an exception."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs_kernels.engine.accumulation import Accumulation
from cs_kernels.engine.loop_guard import LoopGuard
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.stateful import Stateful
from cs_kernels.trunk.trunk import Trunk


def _copied(state: Any) -> Any:
    """A copy of a state and of its tensors, because the step may change them."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if type(state) in (list, tuple) else state


class Transaction:
    """Undoes a failed stage: sets gradients to None, and restores running statistics."""

    def __init__(
        self, trunk: Trunk, ranks: Ranks, accumulation: Accumulation, guard: LoopGuard
    ) -> None:
        self._trunk = trunk
        self._ranks = ranks
        self._accumulation = accumulation
        self._guard = guard

    @contextlib.contextmanager
    def part(
        self, tasks: Sequence[str], *, clears: bool, restores: bool
    ) -> Iterator[list[nn.Parameter]]:
        """Wraps the passes of these tasks and their update.

        The last step's gradients are not restored, since a copy would need memory for another row.

        Args:
            tasks: The tasks of the passes.
            clears: Whether to set gradients to None first.
            restores: Whether to restore running statistics after an exception; False in a capture,
                which only records changes.

        Yields:
            The parameters of the torch optimizers.

        """
        statistics = self._trunk.unchanged(tasks) if restores else contextlib.nullcontext()
        with statistics:
            held = self._trunk.held()
            # The normalizations' gradients are kept during the passes: without these few kilobytes
            # between freed blocks, glibc would trim the heap in each pass, costing 5% of a step.
            kept = [p.grad for p in self._trunk.of_norms]
            try:
                if clears:
                    self.clear(held)
                yield held
                kept.clear()
            except BaseException:
                self.drop()
                raise

    @staticmethod
    @contextlib.contextmanager
    def states(*owners: Stateful) -> Iterator[None]:
        """Wraps changes to states of methods or weightings; an exception undoes these changes."""
        before = [(one, _copied(one.state_dict())) for one in owners if one.is_undone()]
        try:
            yield
        except BaseException:
            for owner, state in before:
                owner.load_state_dict(state)
            raise

    def clear(self, held: Sequence[nn.Parameter]) -> None:
        """Sets all gradients to None."""
        self._ranks.gradients.clear()
        self._accumulation.clear()
        self._guard.clear()
        for parameter in held:
            parameter.grad = None

    def drop(self) -> None:
        """Sets all gradients to None after an exception."""
        held = self._trunk.held()
        self.clear(held)
        self._ranks.recover(held)

    @contextlib.contextmanager
    def without_traces(self, tasks: Sequence[str]) -> Iterator[None]:
        """Wraps passes, and restores buffers and random states after them."""
        device = self._trunk.device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        with (
            torch.random.fork_rng(devices, device_type=kind),
            self._trunk.unchanged(tasks, always=True),
        ):
            yield
        # Cached casts may have no graph, and weights may change before the next pass.
        torch.clear_autocast_cache()
