"""A warning about gradients that are zero, where they make a parameter a shared one."""

import warnings

import torch

from cs_kernels.gradients import TaskGradients
from cs_kernels.ops.checks import MOST_TASKS
from cs_kernels.step import Step


def warn_of_zero_gradients(gradients: TaskGradients, step: Step) -> bool:
    """Warns if a loss reaches parameters without an effect that other tasks would train alone.

    The idiom `loss + 0 * sum(all parameters)` does this to all heads. It reads the gradients once,
    and the host waits for the device.

    Returns:
        Whether that could be seen: not where a task has no gradient but zeros, as without labels.

    """
    reached = gradients.reached()
    if not reached or not 1 < len(step.tasks) <= MOST_TASKS:
        return False
    numbers, grads = list(range(len(reached))), gradients.of(reached, step.tasks)
    gramians = torch.ops.cs_kernels.gramian(grads, numbers, len(reached), len(step.tasks))
    energies = gradients.sum_over_ranks(gramians).diagonal(dim1=1, dim2=2).tolist()
    rows = [gradients.row_of(task) for task in step.tasks]
    if not all(map(sum, zip(*energies, strict=True))):
        return False
    found = []
    for i, of_tasks in zip(reached, energies, strict=True):
        has = [n for n, row in enumerate(rows) if row[i] is not None]
        zero = [n for n in has if of_tasks[n] == 0]
        if zero and len(has) - len(zero) == 1:
            (other,) = set(has) - set(zero)
            found.append((gradients.names[i], step.tasks[zero[0]], step.tasks[other]))
    if found:
        name, task, trains = found[0]
        warnings.warn(
            f"the gradient of {task!r} is zero in every element of {name} and {len(found) - 1}"
            f" others, which {trains!r} alone would train: they count as shared, so the method"
            f" changes their gradients. If the loss has a term like 0 * sum(parameters), leave it"
            " out, as parameters without a gradient are no error here",
            stacklevel=2,
        )
    return True
