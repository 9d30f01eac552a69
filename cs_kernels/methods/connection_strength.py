"""Phase 2 of connection-strength-based optimization."""

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.method import Method
from cs_kernels.step import Step, Surgery
from cs_kernels.trunk.layers import Layout


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
        priorities, products = gradients.phase2(lists, order, step.tasks)
        gradients.assign(order)
        step.surgery = Surgery(
            gradients.tasks, prioritized=lists, priorities=priorities, products=products
        )
