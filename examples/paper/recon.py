"""Recon: Reducing Conflicting Gradients from the Root (Shi et al., ICLR 2023).

Training starts with the shared network and counts conflicts with `opt.count_conflicts(S)`. The
layers with the highest scores, `opt.conflicts().by_module().scores()`, then become task-specific,
and training starts again.
"""

import copy
from collections.abc import Mapping, Sequence

from torch import nn

import cs_kernels as cs
from paper.network import Network

LAYERS = 40
"""The authors' number of layers that become task-specific."""
SHARE = 0.2
"""The fraction of epochs in which conflicts are counted: 40 of 200, as in the authors' code."""
THRESHOLD = 0.0
"""Two gradients conflict if their cosine is below this: S in S-conflict."""


def choose(scores: Mapping[str, int], layers: int = LAYERS) -> list[str]:
    """The modules that become task-specific, the highest score first.

    A module with score 0 is never chosen. Modules with equal scores keep the order of `scores`.

    Args:
        scores: Scores by module of the trunk, from `opt.conflicts().by_module().scores()`.
        layers: The maximum number of modules.

    """
    ranked = sorted(scores, key=lambda name: -scores[name])
    return [name for name in ranked if scores[name] > 0][:layers]


class TaskModule(cs.nn.TaskBatchNorm):
    """One copy of a layer per task; only the active task's copy runs.

    The layer need not be a normalization: `MultiTaskOptimizer.step`, `cs.nn.active_task` and
    `cs.nn.extract_task` select the copy in the same way as a task's normalization.
    """


def specialize(network: Network, layers: Sequence[str], tasks: Sequence[str]) -> Network:
    """Replaces layers of the trunk by one copy per task, in place.

    Build the optimizer afterwards, because the copies have new parameters. The trunk then runs once
    per task, with that task active.

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
