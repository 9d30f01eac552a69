"""Two loss weightings that change during training, with logs of their weights and checkpoints.

In float64, parameters match those of a plain loop to within 1e-12. A resumed run is bit-equal to an
uninterrupted one.
"""

import argparse
from pathlib import Path

import torch
from atomic import atomic_write
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def make_weighting(name: str) -> cs.Weighting:
    """Weights that follow the decrease of each epoch's mean loss, or that are learned."""
    if name == "dynamic":
        return cs.DynamicWeightAverage(temperature=1.0)
    return cs.UncertaintyWeights({"depth": "regression", "edges": "classification"})


def weights_of(report: cs.Report) -> dict[str, Tensor]:
    """The weighting's factor for each loss; `report.task_weights` are the method's factors."""
    return {task: report.weighted_losses[task] / report.losses[task] for task in report.tasks}


def train(
    name: str, epochs: int = 5, checkpoint: Path | None = None
) -> tuple[Network, list, cs.MultiTaskOptimizer]:
    """Trains up to an epoch; resumes from the checkpoint, if there is one, and writes it."""
    network = make_network(normalized=False)
    weighting = make_weighting(name)
    # UncertaintyWeights has parameters to train; DynamicWeightAverage has none.
    adam = torch.optim.Adam([*network.parameters(), *weighting.parameters()], lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, cs.PCGrad(), weighting=weighting)
    first = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        adam.load_state_dict(state["adam"])
        opt.load_state_dict(state["opt"])  # Contains the weighting's state.
        first = state["epoch"]

    history = []
    for epoch in range(first, epochs):
        opt.start_epoch(epoch)  # DynamicWeightAverage computes new weights.
        for images, targets in make_batches():
            features = network.trunk(images)
            predictions = {task: network.heads[task](features) for task in TASKS}
            losses = opt.backward({t: loss_of(t, predictions[t], targets[t]) for t in TASKS})
            adam.step()
            history.append((losses, weights_of(opt.report())))
        if checkpoint is not None:
            parts = {"network": network, "adam": adam, "opt": opt}
            state = {part: value.state_dict() for part, value in parts.items()}
            with atomic_write(checkpoint) as file:
                torch.save({**state, "epoch": epoch + 1}, file)
    return network, history, opt


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weighting", choices=["dynamic", "uncertainty"], default="dynamic")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    for losses, weights in train(options.weighting, checkpoint=options.checkpoint)[1]:
        print("losses", numbers(losses), "weights", numbers(weights))
