"""Warns of zero gradients that make a parameter count as shared."""

import warnings

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.step import Step


def warn_of_zero_gradients(gradients: TaskGradients, step: Step) -> bool:
    """Warns if a task has only zero gradients for parameters that exactly one other task trains.

    The idiom `loss + 0 * sum(all parameters)` causes such gradients in all heads. The check reads
    the gradients once and synchronizes with the device.

    Returns:
        Whether the step was conclusive. A step is inconclusive if all gradients of a task are zero,
        such as for a batch without labels.

    """
    parameters = gradients.reached()
    if not parameters or not 1 < len(step.tasks) <= MOST_TASKS:
        return False
    groups, grads = list(range(len(parameters))), gradients.of(parameters, step.tasks)
    gramians = torch.ops.cs_kernels.gramian(grads, groups, len(parameters), len(step.tasks))
    energies = gradients.sum_over_ranks(gramians).diagonal(dim1=1, dim2=2).tolist()
    rows = [gradients.row_of(task) for task in step.tasks]
    if not all(map(sum, zip(*energies, strict=True))):
        return False
    suspects = []
    for i, task_energies in zip(parameters, energies, strict=True):
        present = [n for n, row in enumerate(rows) if row[i] is not None]
        zero = [n for n in present if task_energies[n] == 0]
        if zero and len(present) - len(zero) == 1:
            (other,) = set(present) - set(zero)
            suspects.append((gradients.names[i], step.tasks[zero[0]], step.tasks[other]))
    if suspects:
        name, task, owner = suspects[0]
        others = f" (likewise for {len(suspects) - 1} more)" if suspects[1:] else ""
        warnings.warn(
            f"the gradient of {task!r} is zero in every element of {name}, which only {owner!r}"
            f" trains{others}: the parameter counts as shared, so the method changes its gradient."
            " If the loss has a term like 0 * sum(parameters), remove it: a parameter need not have"
            " a gradient",
            stacklevel=2,
        )
    return True
