"""The joint update from the gradients with respect to a shared representation.

K backward passes of the heads end at the features; a method combines the K gradients that arrive
there, and one backward pass of the trunk propagates the combination (MGDA-UB, Sener and Koltun
2018, section 3.3; IMTL-G, Liu et al. 2021). Memory holds K gradients of the features in place of
K gradients of all shared parameters.

Each rank has the features of its own samples. Dot products of gradients are sums over all samples,
so they are summed over the ranks, and the task weights are equal on all ranks. Each rank propagates
its samples' combined gradient through the trunk, whose gradients are reduced once.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.engine.engine import Engine
from cs_kernels.engine.features import Features, tensors_of
from cs_kernels.engine.one_graph import weighted_losses
from cs_kernels.stage import Passes


def found_features(engine: Engine, given: object, losses: Mapping[str, Tensor]) -> Features:
    """The features of a call.

    Raises:
        TypeError: A feature is not a tensor.
        ValueError: The features do not separate the losses from the trunk.

    """
    trunk = engine.trunk
    tensors = tensors_of(given)
    # If only other ranks have labels, only the number of this rank's features matters.
    if not losses:
        tensors = [torch.empty(0, device=trunk.device) for _ in tensors]
    shared: dict[Tensor, nn.Parameter] = {p: p for p in trunk.shared}
    shared |= {whole: p for whole, p in engine.graph.sharded().items() if p in shared}
    names_of = trunk.watcher.names_of
    return Features(tensors, losses, trunk.tasks, shared, names_of, engine.ranks)


def passes_to_features(
    engine: Engine, passes: Passes, losses: Mapping[str, Tensor], features: Features
) -> None:
    """Runs the backward passes of the heads, down to the features."""
    weighted = weighted_losses(engine, passes, losses)
    engine.ranks.before_backward(retains=True)
    scaled = {task: engine.graph.scaled(loss) for task, loss in weighted.items()}
    features.head_passes(scaled, engine.pass_checks)
    passes.reached = features.gradients.reached_here()
    engine.graph.passed(*losses)


def combine_features(engine: Engine, passes: Passes, features: Features) -> None:
    """Lets the method combine the gradients that have arrived at the features."""
    timer = engine.monitor.timer(engine.trunk.device, eager=True)
    with record_function("cs_kernels.surgery"), torch.no_grad(), timer:
        features.combine(engine.method, passes)
    passes.step.elapsed = timer


def pass_of_trunk(
    engine: Engine, passes: Passes, losses: Mapping[str, Tensor], features: Features
) -> None:
    """Runs the backward pass from the features, on a rank that has losses."""
    if losses:
        ranks = engine.ranks
        ranks.last_backward([task for task in passes.tasks if task in losses][-1])
        ranks.before_backward(retains=False)
        features.trunk_pass()
