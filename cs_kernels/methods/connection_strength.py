"""Phase 2 of connection-strength-based optimization."""

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import Layout, gammas, running_vars
from cs_kernels.methods.method import Method


class ConnectionStrength(Method):
    """Keeps what each task has learned to depend on (Algorithm 1, Phase 2).

    In every layer with a task-specific normalization behind it, output channels are grouped by the
    task with the greatest normalized connection strength there; within a group, gradients in
    conflict with that task's are projected. All other shared parameters get the plain sum.
    """

    prioritizes = True

    def combine(self, gradients: TaskGradients, layout: Layout) -> None:
        """One operator call for the whole trunk."""
        reached = dict.fromkeys(gradients.reached())
        layers = [layer for layer in layout.layers if layer.weight_index in reached]
        # The prioritized ones first.
        order = list(dict.fromkeys([layer.weight_index for layer in layers]) | reached)
        torch.ops.cs_kernels.phase2_update_(
            gradients.updates(order),
            gradients.of(order),
            [layer.weight for layer in layers],
            torch.cat(gammas(layers)),
            torch.cat(running_vars(layers)),
            [eps for layer in layers for eps in layer.epsilons],
            [layer.out_channel_dim for layer in layers],
            [layer.groups for layer in layers],
            len(gradients.rows),
        )
        gradients.assign(order)
