"""GradVac."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, Groups
from cs_kernels.options import checked_seed, is_finite_number
from cs_kernels.step import Step


class GradVac(GramianMethod):
    """Gradient vaccine (Wang et al., 2021): PCGrad with a target cosine per pair, instead of zero.

    Each task's gradient is compared with the original gradients of the other tasks in a random
    order. If the cosine of a pair is below its target, enough of the other gradient is added to
    reach the target. Then the changed gradients are added.

    Targets are moving averages of the observed cosines, starting at zero. A step changes neither
    the targets of tasks that take no part in it nor any target of a non-finite Gramian. A target is
    at most 1 - 1e-6.

    Args:
        target: One fixed target for all pairs, in [-1, 1); None for moving averages.
        beta: The weight of a step's cosines in the moving averages, in [0, 1].
        seed: The seed of the random orders, which also depend on the step number.
        groups: "all", or "layer" for separate targets in each layer, as in the paper.
        update_every: As in `GramianMethod`.

    Raises:
        ValueError: `target` or `beta` is out of range, the seed is outside [0, 2^63), or another
            option has an invalid value.

    """

    def __init__(
        self,
        target: float | None = None,
        beta: float = 0.01,
        seed: int = 0,
        groups: Groups = "all",
        update_every: int = 1,
    ) -> None:
        super().__init__(groups, update_every)
        if target is not None and not (is_finite_number(target) and -1 <= target < 1):
            raise ValueError(f"target must be None or lie in [-1, 1), got {target!r}")
        if not (is_finite_number(beta) and 0 <= beta <= 1):
            raise ValueError(f"beta must lie in [0, 1], got {beta!r}")
        self.target = target
        self.beta = beta
        self.seed = checked_seed(seed)
        self._tasks: tuple[str, ...] = ()
        self._layers: tuple[str, ...] = ()
        self._targets: Tensor | None = None
        """Float64 [layers, tasks, tasks], for all tasks and layers seen so far."""
        self._indices: dict[tuple[tuple[str, ...], ...], tuple[Tensor, ...]] = {}
        """Indices into the targets by tasks and layers, on the device of the targets."""

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights of the sum of the changed gradients; every step draws new orders.

        Without a step, the targets are the initial ones, and the moving averages are unchanged.
        """
        number, counter = (0, None) if step is None else step.draw
        averages, index = None, None
        if self.target is None and step is not None:
            averages, index = self._averages(gramian, step)
        if averages is None:
            targets = torch.full_like(gramian, self.target or 0.0, dtype=torch.float64)
        else:
            targets = (averages if index is None else averages[index]).reshape(gramian.shape)
        weights: Tensor = torch.ops.cs_kernels.gradvac_weights(
            gramian,
            targets,
            0.0 if averages is None else float(self.beta),
            self.seed,
            number,
            counter,
        )
        if averages is not None and index is not None:
            averages[index] = targets.reshape(-1, *gramian.shape[-2:])
        return weights

    def _averages(self, gramian: Tensor, step: Step) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """All moving averages, and the step's indices into them; None selects all."""
        tasks = step.tasks or tuple(map(str, range(gramian.shape[-1])))
        numbers = tuple(map(str, range(gramian.shape[:-2].numel())))
        layers = step.layers or (numbers if gramian.ndim > 2 else ("",))
        if not (set(tasks) <= set(self._tasks) and set(layers) <= set(self._layers)):
            self._grow(tasks, layers)
        if self._targets is None or self._targets.device != gramian.device:
            self._targets = self._grown(gramian.device)
            self._indices.clear()
        if (tasks, layers) == (self._tasks, self._layers):
            return self._targets, None
        if (tasks, layers) not in self._indices:
            rows = _positions(tasks, self._tasks, gramian.device)
            modules = _positions(layers, self._layers, gramian.device)
            self._indices[tasks, layers] = modules[:, None, None], rows[:, None], rows
        return self._targets, self._indices[tasks, layers]

    def _grow(self, tasks: Sequence[str], layers: Sequence[str]) -> None:
        """Adds tasks and layers, with targets of zero."""
        self._tasks = tuple(dict.fromkeys([*self._tasks, *tasks]))
        self._layers = tuple(dict.fromkeys([*self._layers, *layers]))
        if self._targets is not None:
            self._targets = self._grown(self._targets.device)
        self._indices.clear()

    def _grown(self, device: torch.device) -> Tensor:
        shape = len(self._layers), len(self._tasks), len(self._tasks)
        targets = torch.zeros(shape, dtype=torch.float64, device=device)
        if self._targets is not None:
            layers, tasks, _ = self._targets.shape
            targets[:layers, :tasks, :tasks] = self._targets
        return targets

    def state_dict(self) -> dict[str, Any]:
        """The moving averages, with their tasks and layers."""
        targets = None if self._targets is None else self._targets.clone()
        return {
            "groups": self.groups,
            "tasks": self._tasks,
            "layers": self._layers,
            "targets": targets,
        }

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the groups, and that all pairs of tasks have a target in each layer."""
        if state["groups"] != self.groups:
            raise ValueError(f"state must have groups={self.groups!r}, got {state['groups']!r}")
        number, targets = len(state["tasks"]), state["targets"]
        shape = len(state["layers"]), number, number
        if not set(state["tasks"]) <= set(tasks):
            raise ValueError(
                f"state must have targets for no tasks other than {list(tasks)}, got"
                f" {state['tasks']!r}"
            )
        if targets is not None and (targets.shape != shape or not targets.isfinite().all()):
            raise ValueError(f"state must have finite targets of shape {shape}, got {targets!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        targets = state["targets"]
        self._tasks, self._layers = tuple(state["tasks"]), tuple(state["layers"])
        self._targets = None if targets is None else targets.clone()
        self._indices.clear()

    def captured_state(self) -> list[Tensor]:
        """The moving averages, which steps update in place."""
        return [] if self._targets is None else [self._targets]

    def __repr__(self) -> str:
        if self.target is None:
            return self._repr(beta=self.beta, seed=self.seed)
        return self._repr(target=self.target, seed=self.seed)


def _positions(names: Sequence[str], among: Sequence[str], device: torch.device) -> Tensor:
    return torch.tensor([among.index(name) for name in names], device=device)
