"""Phase 2 of connection-strength-based optimization."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cs_kernels.distributed.partial import PartialGradients
from cs_kernels.distributed.phase2 import phase2_of_parts
from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import LayerLists, Layout, epsilons, gammas, running_vars
from cs_kernels.methods.method import Method
from cs_kernels.ops.backends import direct
from cs_kernels.step import Step, Surgery


class ConnectionStrength(Method):
    """Conserves the task priority of output channels (Algorithm 1, Phase 2).

    In every layer with a task-specific normalization behind it, the channel group CG_i has the
    output channels with the greatest normalized connection strength for task i; in CG_i, gradients
    in conflict with task i's are projected. All other shared parameters get the plain sum.
    """

    prioritizes = True
    layerwise = True

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """One operator call for the whole trunk."""
        reached = dict.fromkeys(gradients.reached())
        if not reached:
            gradients.clear()
            return
        lists = layout.lists_of(reached)
        # The prioritized ones first.
        order = list(dict.fromkeys(lists.weight_indices) | reached)
        if isinstance(gradients, PartialGradients):
            priorities, products = phase2_of_parts(gradients, lists, order, step)
        else:
            priorities, products = self._update(gradients, lists, order)
        gradients.assign(order)
        step.surgery = Surgery(
            gradients.tasks, prioritized=lists, priorities=priorities, products=products
        )

    @staticmethod
    def _update(
        gradients: TaskGradients, lists: LayerLists, order: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Writes the updates; returns priorities and products."""
        updates, grads = gradients.updates(order), gradients.of(order)
        tasks = len(gradients.rows)
        products = updates[0].new_empty((len(lists.layers), tasks, tasks), dtype=torch.float64)
        of_trunk = direct("phase2_of_trunk_", updates[0].device)
        priorities: Tensor | None = None
        if of_trunk is not None:
            priorities = of_trunk(updates, grads, *lists[2:], tasks, products)
        if priorities is None:
            none = [updates[0].new_empty(0)]
            priorities = torch.ops.cs_kernels.phase2_update_(
                updates,
                grads,
                lists.weights,
                torch.cat(gammas(lists.layers) or none),
                torch.cat(running_vars(lists.layers) or none),
                epsilons(lists.layers),
                lists.out_channel_dims,
                lists.groups,
                tasks,
                products,
            )
        return priorities, products
