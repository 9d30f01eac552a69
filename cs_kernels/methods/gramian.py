"""What methods share that look at the gradients through their Gramian alone."""

from abc import abstractmethod
from typing import Literal

import torch
from torch import Tensor

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout
from cs_kernels.methods.method import Method

Groups = Literal["all", "layer"]


class GramianMethod(Method):
    """The update is a weighted sum of the gradients; the weights follow from their K x K products.

    The gradients are read once for the Gramian and once for the sum. Tasks that take no part in a
    step have no row in its Gramian.

    Args:
        groups: "all", one Gramian and one set of weights for the whole trunk; or "layer", each for
            the parameters of every module, as if it were a trunk of its own.

    Raises:
        ValueError: `groups` is something else.

    """

    def __init__(self, groups: Groups = "all") -> None:
        if groups not in ("all", "layer"):
            raise ValueError(f"groups must be 'all' or 'layer', got {groups!r}")
        self.groups = groups

    @abstractmethod
    def weights(self, gramian: Tensor) -> Tensor:
        """The weights of the update.

        Args:
            gramian: Float64 [K, K], the products of the gradients; with groups="layer"
                [layers, K, K]. It is not finite where a gradient is not: the weights must then be
                NaN.

        Returns:
            [K] or [layers, K].

        """

    def combine(self, gradients: TaskGradients, layout: Layout) -> None:
        """One operator call for the Gramian, one for the sum."""
        del layout
        parameters = gradients.reached()
        if not parameters:
            gradients.clear()
            return
        tasks = gradients.taking_part()
        grads = gradients.of(parameters, tasks)
        per_layer = self.groups == "layer"
        group_of = gradients.layers(parameters) if per_layer else [0] * len(parameters)
        gramian = torch.ops.cs_kernels.gramian(grads, group_of, max(group_of) + 1, len(tasks))
        if gradients.loss_scale is not None:
            gramian = gramian / gradients.loss_scale.double() ** 2
        weights = self.weights(gramian if per_layer else gramian[0])
        torch.ops.cs_kernels.combine_(
            gradients.updates(parameters),
            grads,
            weights if per_layer else weights.unsqueeze(0),
            group_of,
            len(tasks),
        )
        gradients.assign(parameters)

    def _repr(self, **options: object) -> str:
        """`Name(option=value)`, with `groups` where it is not the default."""
        if self.groups != "all":
            options["groups"] = self.groups
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__name__}({arguments})"

    def __repr__(self) -> str:
        return self._repr()
