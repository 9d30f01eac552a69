"""Recon: Reducing Conflicting Gradients from the Root (Shi et al., ICLR 2023).

Training begins with the shared network and counts conflicts, `opt.count_conflicts(S)`. The layers
with the highest scores, `opt.conflicts().by_module().scores()`, then become task-specific, and
training starts anew.
"""

import copy
from collections.abc import Mapping, Sequence

from torch import nn

import cs_kernels as cs
from paper.network import Network

LAYERS = 40
"""As many of the highest scores as the authors take."""
SHARE = 0.2
"""The part of the epochs in which conflicts are counted: the authors' 40 of 200."""
THRESHOLD = 0.0
"""Two gradients conflict where their cosine is below it: S in S-conflict."""


def choose(scores: Mapping[str, int], layers: int = LAYERS) -> list[str]:
    """The modules that become task-specific, the highest score first.

    A module with score 0 is never taken. Equal scores go in the order of `scores`.

    Args:
        scores: By name of a module in the trunk: `opt.conflicts().by_module().scores()`.
        layers: The largest number of modules.

    """
    ranked = sorted(scores, key=lambda name: -scores[name])
    return [name for name in ranked if scores[name] > 0][:layers]


class TaskModule(cs.nn.TaskBatchNorm):
    """One copy of a layer a task; only the active task's runs.

    Any layer will do, not only a normalization: `MultiTaskOptimizer.step`, `cs.nn.active_task` and
    `cs.nn.extract_task` choose the copy as they choose the normalization of a task.
    """


def specialize(network: Network, layers: Sequence[str], tasks: Sequence[str]) -> Network:
    """Replaces layers of the trunk by a copy for each task, in place.

    Build the optimizer afterwards: the copies have new parameters. The trunk then runs once for
    each task, which is active meanwhile.

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
