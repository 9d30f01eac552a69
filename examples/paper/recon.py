"""Recon: Reducing Conflicting Gradients from the Root (Shi et al., ICLR 2023).

A first training of the shared network counts conflicts with `opt.count_conflicts(S)`. Then the
layers with the highest `opt.conflicts().by_module().scores()` become task-specific, and training
starts again.
"""

import copy
from collections.abc import Mapping, Sequence

from torch import nn

import cs_kernels as cs
from paper.network import Network

LAYERS = 40
"""The authors' number of task-specific layers."""
SHARE = 0.2
"""The share of epochs in which conflicts are counted: the authors' 40 of 200."""
THRESHOLD = 0.0
"""Two gradients conflict if their cosine is below this S, as in S-conflict."""


def choose(scores: Mapping[str, int], layers: int = LAYERS) -> list[str]:
    """The modules that become task-specific, the highest score first.

    Modules with score 0 are never chosen. Equal scores keep the order of `scores`.

    Args:
        scores: By the names of modules in the trunk, from `opt.conflicts().by_module().scores()`.
        layers: The largest number of modules.

    """
    ranked = sorted(scores, key=lambda name: -scores[name])
    return [name for name in ranked if scores[name] > 0][:layers]


class TaskModule(cs.nn.TaskBatchNorm):
    """One copy of a layer per task; only the active task's copy runs.

    This works for any layer: `MultiTaskOptimizer.step`, `cs.nn.active_task` and
    `cs.nn.extract_task` choose the copy as they choose a task's normalization.
    """


def specialize(network: Network, layers: Sequence[str], tasks: Sequence[str]) -> Network:
    """Replaces layers of the trunk, in place, by one copy per task.

    Build the optimizer afterwards, since the copies have new parameters. The trunk then runs once
    per task, with this task active.

    Args:
        network: The shared network.
        layers: Names of modules in the trunk, none of them inside another.
        tasks: The names of the tasks.

    Returns:
        The network.

    Raises:
        AttributeError: The trunk has no module with such a name.

    """
    for name in layers:
        module: nn.Module = network.trunk.get_submodule(name)
        copies = TaskModule({task: copy.deepcopy(module) for task in tasks})
        copies.training = module.training
        network.trunk.set_submodule(name, copies)
    return network
