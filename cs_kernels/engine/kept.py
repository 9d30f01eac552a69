"""Caches the task weights of one step for later steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cs_kernels.methods import GramianMethod, Method
from cs_kernels.options import checked_integer
from cs_kernels.step import KeptWeights, Step


class Kept:
    """The task weights of the last joint step that solved for them, if they may be reused."""

    def __init__(self, weights: KeptWeights | None = None, method: Method | None = None) -> None:
        self._weights = weights
        self._method = method
        """The method that solved for the weights; None if they come from a checkpoint."""

    @property
    def since(self) -> int | None:
        """The number of the step that solved for the weights."""
        return None if self._weights is None else self._weights.number

    def weights_for(self, step: Step, method: Method) -> KeptWeights | None:
        """The cached weights, if they are recent enough and fit the step and the method."""
        kept = self._weights
        if kept is None or step.counter is not None or self._method not in (None, method):
            return None
        by_layer = isinstance(method, GramianMethod) and method.groups == "layer"
        solved_for = kept.tasks, kept.at_features, bool(kept.layers), len(kept.trains)
        fits = solved_for == (step.tasks, step.at_features, by_layer, len(step.trains)) and all(
            before in (None, now) for before, now in zip(kept.trains, step.trains, strict=True)
        )
        return kept if fits and 0 < step.number - kept.number < method.update_every else None

    def after(self, step: Step, method: Method, trains: Sequence[bool], *, unknown: bool) -> "Kept":
        """The cached weights after a joint step; checking new weights synchronizes with the device.

        Weights are discarded if any is non-finite or any task's gradient is zero: for a zero
        gradient, some methods give the task the weight 0, and others give it all the weight.

        Args:
            step: The step.
            method: The method that made its update.
            trains: As `Step.trains`, at the end of the step.
            unknown: Whether a parameter that no task is known to reach has a gradient in `.grad`.

        """
        if step.kept is not None:
            return Kept() if unknown else self
        solved = step.surgery
        if method.update_every == 1 or step.counter is not None:
            return Kept()
        energies = solved.energies
        if solved.task_weights is None or energies is None:
            return Kept()
        weights = solved.task_weights.detach().clone()
        if not weights.isfinite().all() & (energies > 0).all():
            return Kept()
        facts = step.number, solved.rows, solved.layers, step.at_features
        last = step.trains if self._weights is None else self._weights.trains
        last = last if len(last) == len(trains) else step.trains
        unchanged = tuple(
            None if earlier is None or before != after else before
            for earlier, before, after in zip(last, step.trains, trains, strict=True)
        )
        return Kept(KeptWeights(*facts, weights, unchanged), method)

    def forget(self) -> None:
        """Makes the next joint step solve for new weights."""
        self._weights = self._method = None

    def state_dict(self) -> dict[str, Any] | None:
        """The weights, with their step, tasks and layers, if there are any."""
        return None if self._weights is None else asdict(self._weights)

    @staticmethod
    def check_state(state: Mapping[str, Any] | None, tasks: Sequence[str]) -> None:
        """Raises ValueError for weights that are non-finite, misshapen or for unknown tasks."""
        if state is None:
            return
        found, layers, weights = state["tasks"], state["layers"], state["weights"]
        checked_integer("number", state["number"], 0, 1 << 63)
        if not found or not set(found) <= set(tasks):
            raise ValueError(
                f"state must have task weights for tasks in {list(tasks)}, got {found!r}"
            )
        shape = (len(layers), len(found)) if layers else (len(found),)
        if weights.shape != shape or not weights.isfinite().all():
            raise ValueError(
                f"state must have finite task weights of shape {shape}, got {weights!r}"
            )

    def load_state_dict(self, state: Mapping[str, Any] | None, trains: Sequence[bool]) -> None:
        """Loads the weights of a `state_dict`.

        Args:
            state: The `state_dict`; None for no weights.
            trains: As `Step.trains`, for a state that was saved without it.

        """
        self.forget()
        if state is not None:
            tasks, layers = tuple(state["tasks"]), tuple(state["layers"])
            facts = int(state["number"]), tasks, layers, bool(state["at_features"])
            before = tuple(state.get("trains", trains))
            self._weights = KeptWeights(*facts, state["weights"].clone(), before)
