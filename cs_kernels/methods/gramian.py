"""The base class of methods that need only the gradients' Gramian."""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.method import Method
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.options import checked_integer
from cs_kernels.step import Step, Surgery
from cs_kernels.trunk.layers import Layout

Groups = Literal["all", "layer"]


def nan_unless_finite(weights: Tensor, gramian: Tensor) -> Tensor:
    """The weights, or NaN if the Gramian is non-finite."""
    finite = gramian.isfinite().all(-1).all(-1, keepdim=True)
    return torch.where(finite, weights, torch.nan)


class GramianMethod(Method):
    """A method whose update is a weighted sum of gradients, with weights from their K x K Gramian.

    The gradients are read once for the Gramian and once for the sum. Tasks that take no part in a
    step have no row in its Gramian.

    With `update_every` above 1, one step solves for the task weights, and the following steps reuse
    them. With groups="all", these steps need no separate gradients: the weighted gradients of all
    tasks add up in `.grad`, in one backward pass if the losses come from one forward pass. Task
    weights are reused only in steps with the same tasks. They are discarded if any is non-finite or
    any gradient is zero.

    Args:
        groups: "all" for one Gramian and one set of task weights for the whole trunk; "layer" for
            one of each per module, as if every module were a trunk of its own.
        update_every: The interval between two solves for task weights, in steps of both phases.

    Raises:
        ValueError: `groups` is neither "all" nor "layer", or `update_every` is below 1.

    """

    has_gramian = True
    most_tasks = MOST_TASKS
    groups: Groups = "all"

    def __init__(self, groups: Groups = "all", update_every: int = 1) -> None:
        if groups not in ("all", "layer"):
            raise ValueError(f"groups must be 'all' or 'layer', got {groups!r}")
        self.groups = groups
        self.update_every = checked_integer("update_every", update_every, 1)

    @property
    def layerwise(self) -> bool:
        """Whether the updates of a module depend only on that module's gradients.

        True with groups="layer" and built-in `weights`; a layerwise subclass with its own
        `weights` must override this property.
        """
        built_in = type(self).weights.__module__.startswith("cs_kernels.")
        return self.groups == "layer" and built_in

    def check(self, tasks: Sequence[str]) -> None:
        """Checks the number of tasks, and that `weights` accepts a step.

        Raises:
            ValueError: There are too many tasks.
            TypeError: `weights` does not accept a step.

        """
        super().check(tasks)
        try:
            inspect.signature(self.weights).bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"method must have weights(gramian, step), got {type(self).__name__}.weights"
                f"{inspect.signature(self.weights)}"
            ) from error

    @abstractmethod
    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights of the update.

        Args:
            gramian: The dot products of the gradients, float64 [K, K], or [layers, K, K] with
                groups="layer". A non-finite gradient makes it non-finite; the weights must then be
                NaN. For a `layerwise` method, `step_together` makes several calls per step, each
                with zeros for the layers of the other calls.
            step: The tasks of the Gramian's rows, their losses and the step number; rows of
                `step.anchors` follow. It is None outside a training loop, where equal Gramians must
                give equal weights.

        Returns:
            [K] or [layers, K].

        """

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Calls one operator for the Gramian, unless weights are reused, and one for the sum."""
        parameters = gradients.reached()
        if not parameters:
            gradients.clear()
            return
        tasks = len(step.tasks) + len(step.anchors)
        grads = gradients.of(parameters, step.tasks)
        gramian_of = [0] * len(parameters)
        if self.groups == "layer":
            gramian_of, step.layers = gradients.layers(parameters)
        cached = step.kept
        if cached is not None and (cached.tasks, cached.layers) != (step.tasks, step.layers):
            cached = step.kept = None
        if cached is not None:
            weights = cached.weights.to(gradients.parameters[0].device)
            step.surgery = cached.surgery()
        else:
            gramians = len(step.layers) or 1
            gramian = torch.ops.cs_kernels.gramian(grads, gramian_of, gramians, tasks)
            gramian = gradients.sum_over_ranks(gramian)
            if step.loss_scale is not None:
                gramian = gramian / step.loss_scale.double() ** 2
            gramian = gramian if step.layers else gramian[0]
            weights = self.weights(gramian, step)
            if not isinstance(weights, Tensor):
                raise TypeError(
                    f"method must return weights as a tensor, got {weights!r} from {self!r}"
                )
            step.surgery = Surgery(step.rows, step.layers, gramian, weights)
        torch.ops.cs_kernels.combine_(
            gradients.updates(parameters, in_place=True),
            grads,
            weights if step.layers else weights.unsqueeze(0),
            gramian_of,
            tasks,
        )
        del grads  # So that `assign` can free the views that batched passes leave.
        gradients.assign(parameters)

    def _repr(self, **options: object) -> str:
        """`Name(option=value)`; defaults of `groups` and `update_every` are omitted."""
        if self.groups != "all":
            options["groups"] = self.groups
        if self.update_every != 1:
            options["update_every"] = self.update_every
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__name__}({arguments})"

    def __repr__(self) -> str:
        return self._repr()
