"""Phase 2 of connection-strength-based optimization."""

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout, epsilons, gammas, running_vars
from cs_kernels.methods.method import Method
from cs_kernels.step import Step


class ConnectionStrength(Method):
    """Conserves the task priority of output channels (Algorithm 1, Phase 2).

    In every layer with a task-specific normalization behind it, the channel group CG_i has the
    output channels with the greatest normalized connection strength for task i; in CG_i, gradients
    in conflict with task i's are projected. All other shared parameters get the plain sum.
    """

    prioritizes = True

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """One operator call for the whole trunk."""
        del step
        reached = dict.fromkeys(gradients.reached())
        if not reached:
            gradients.clear()
            return
        layers = [layer for layer in layout.layers if layer.weight_index in reached]
        # The prioritized ones first.
        order = list(dict.fromkeys([layer.weight_index for layer in layers]) | reached)
        updates = gradients.updates(order)
        none = [updates[0].new_empty(0)]
        torch.ops.cs_kernels.phase2_update_(
            updates,
            gradients.of(order),
            [layer.weight for layer in layers],
            torch.cat(gammas(layers) or none),
            torch.cat(running_vars(layers) or none),
            epsilons(layers),
            [layer.out_channel_dim for layer in layers],
            [layer.groups for layer in layers],
            len(gradients.rows),
        )
        gradients.assign(order)
