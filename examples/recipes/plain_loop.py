"""A training loop: conversion, two phases, a checkpoint, and predictions of one task.

In float64, parameters and running statistics match those of a plain loop to within 1e-12, whether
or not the run was resumed.
"""

import argparse
from pathlib import Path

import torch
from atomic import atomic_write
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train(epochs: int = 4, checkpoint: Path | None = None) -> tuple[Network, list]:
    """Trains up to an epoch; resumes from the checkpoint, if there is one, and writes it."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)  # Before the optimizer is built.
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    # `epochs` includes those of resumed runs: the share of Phase 2 grows until the last epoch.
    schedule = cs.Mixed(epochs=4, seed=0, draw="step")
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=schedule)
    first = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        adam.load_state_dict(state["adam"])
        opt.load_state_dict(state["opt"])
        first = state["epoch"]

    history = []
    for epoch in range(first, epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
        if checkpoint is not None:
            parts = {"network": network, "adam": adam, "opt": opt}
            state = {name: part.state_dict() for name, part in parts.items()}
            with atomic_write(checkpoint) as file:
                torch.save({**state, "epoch": epoch + 1}, file)
    return network, history


@torch.no_grad()
def predict(network: Network, images: Tensor) -> dict[str, Tensor]:
    """The predictions of every task, in evaluation mode."""
    network.eval()
    predictions = {}
    for task in TASKS:
        with cs.nn.active_task(network.trunk, task):
            predictions[task] = network(images, task)
    return predictions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    trained, history = train(options.epochs, options.checkpoint)
    for losses in history:
        print(numbers(losses))
    print({task: tuple(y.shape) for task, y in predict(trained, make_batches()[0][0]).items()})
