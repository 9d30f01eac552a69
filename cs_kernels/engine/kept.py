"""Task weights that are kept for the steps after the one that has solved for them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cs_kernels.methods import GramianMethod, Method
from cs_kernels.step import KeptWeights, Step


class Kept:
    """The weights of the last joint step that has solved for them, if they may be used again."""

    def __init__(self) -> None:
        self._weights: KeptWeights | None = None
        self._method: Method | None = None
        """The method that has solved for them."""

    @property
    def since(self) -> int | None:
        """The number of their step."""
        return None if self._weights is None else self._weights.number

    def weights_for(self, step: Step, method: Method) -> KeptWeights | None:
        """The kept weights, if they are recent enough and of the step's tasks and method."""
        kept = self._weights
        if kept is None or step.counter is not None or self._method not in (None, method):
            return None
        by_layer = isinstance(method, GramianMethod) and method.groups == "layer"
        known = kept.tasks, kept.at_features, bool(kept.layers)
        fits = known == (step.tasks, step.at_features, by_layer)
        return kept if fits and 0 < step.number - kept.number < method.update_every else None

    def observe(self, step: Step, method: Method) -> None:
        """Keeps the weights of a joint step that has solved for them; the host waits to check them.

        Neither weights that are not finite are kept, nor those of a task with a zero gradient: some
        methods give it the weight 0, others all of it.
        """
        if step.kept is not None:
            return
        self.forget()
        solved = step.surgery
        if method.update_every == 1 or step.counter is not None:
            return
        if solved.task_weights is None or solved.gramian is None:
            return
        weights = solved.task_weights.detach().clone()
        energies = solved.gramian.diagonal(dim1=-2, dim2=-1).reshape(-1, len(solved.rows)).sum(0)
        if weights.isfinite().all() & (energies > 0).all():
            known = step.number, solved.rows, solved.layers, step.at_features
            self._weights, self._method = KeptWeights(*known, weights), method

    def forget(self) -> None:
        """Solves anew in the next joint step."""
        self._weights = self._method = None

    def state_dict(self) -> dict[str, Any] | None:
        """The weights, with their step, tasks and layers, if there are any."""
        return None if self._weights is None else asdict(self._weights)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the weights of a `state_dict`."""
        self.forget()
        if state is not None:
            tasks, layers = tuple(state["tasks"]), tuple(state["layers"])
            known = int(state["number"]), tasks, layers, bool(state["at_features"])
            self._weights = KeptWeights(*known, state["weights"].clone())
