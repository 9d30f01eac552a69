"""Phase 2 of connection-strength-based optimization."""

from cs_kernels.gradients import TaskGradients
from cs_kernels.methods.method import Method
from cs_kernels.step import Step, Surgery
from cs_kernels.trunk.layers import Layout


class ConnectionStrength(Method):
    """Conserves the task priority of output channels (Algorithm 1, Phase 2).

    In every layer followed by task-specific normalization, the channel group CG_i consists of the
    output channels whose normalized connection strength is greatest for task i. Within CG_i, each
    gradient that conflicts with task i's is projected to be orthogonal to it. All other shared
    parameters get the plain sum.
    """

    prioritizes = True
    layerwise = True

    def combine(self, gradients: TaskGradients, layout: Layout, step: Step) -> None:
        """Makes one operator call for the whole trunk."""
        parameters = dict.fromkeys(gradients.reached())
        if not parameters:
            gradients.clear()
            return
        lists = layout.lists_of(parameters)
        # Prioritized weights come first.
        order = list(dict.fromkeys(lists.weight_indices) | parameters)
        priorities, products = gradients.phase2(lists, order, step.tasks)
        gradients.assign(order)
        step.surgery = Surgery(
            gradients.tasks, prioritized=lists, priorities=priorities, products=products
        )
