"""Adds a task in the middle of training: normalization, head, and a new MultiTaskOptimizer.

In float64, parameters and running statistics match those of a plain loop to within 1e-12.
"""

import copy

import torch
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

EPOCHS = 6
ADDED = 3
"""The first epoch with the new task."""


def with_normals(targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds targets of a third task."""
    return {**targets, "normals": -targets["depth"]}


def train(epochs: int = EPOCHS) -> tuple[Network, list]:
    """Trains two tasks, then three."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    # The phase depends only on the epoch, so both MultiTaskOptimizers can use one schedule. (Steps
    # of the new one start from 0: with draw="step", or a random method, draws would repeat.)
    schedule = cs.Mixed(epochs=EPOCHS, seed=9)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=schedule)

    history = []
    for epoch in range(epochs):
        if epoch == ADDED:
            new = cs.nn.add_task(network.trunk, "normals", like="depth")
            network.heads["normals"] = copy.deepcopy(network.heads["depth"])
            new += network.heads["normals"].parameters()
            # The torch optimizer keeps its state: the moments of all other parameters. The old
            # MultiTaskOptimizer's state has two tasks, and cannot be loaded for three.
            adam.add_param_group({"params": new})
            tasks = [*TASKS, "normals"]
            opt = cs.MultiTaskOptimizer(network.trunk, adam, tasks, schedule=schedule)
        opt.start_epoch(epoch)
        for images, two in make_batches():
            targets = with_normals(two)
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
    return network, history


if __name__ == "__main__":
    for losses in train()[1]:
        print(numbers(losses))
