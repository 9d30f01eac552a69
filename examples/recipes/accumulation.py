"""Gradient accumulation: surgery happens once, on the gradients of all micro-batches.

In float64, parameters and running statistics match those of a plain loop to within 1e-12.
"""

from functools import partial

import torch
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

MICRO_BATCHES = 2


def batch_loss(network: Network, images: Tensor, targets: dict[str, Tensor], task: str) -> Tensor:
    """A micro-batch's loss divided by the number of micro-batches, so that losses sum to a mean."""
    return loss_of(task, network(images, task), targets[task]) / MICRO_BATCHES


def train(epochs: int = 4) -> tuple[Network, list]:
    """With task-specific normalization: `step` takes a list of closures, one per micro-batch."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=cs.Switch(2))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        batches = make_batches(6)
        for first in range(0, len(batches), MICRO_BATCHES):
            # Uses partial, because lambdas in a loop would all see the last micro-batch.
            closures = [
                partial(batch_loss, network, images, targets)
                for images, targets in batches[first : first + MICRO_BATCHES]
            ]
            history.append(opt.step(closures))
    return network, history


def train_unnormalized(epochs: int = 4) -> tuple[Network, list]:
    """Without normalization: one forward pass for all tasks; only the last micro-batch updates."""
    network = make_network(normalized=False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, cs.PCGrad())

    history = []
    for _ in range(epochs):
        batches = make_batches(6)
        for number, (images, targets) in enumerate(batches, 1):
            features = network.trunk(images)
            losses = {
                task: loss_of(task, network.heads[task](features), targets[task]) / MICRO_BATCHES
                for task in TASKS
            }
            update = number % MICRO_BATCHES == 0 or number == len(batches)
            history.append(opt.backward(losses, update=update))
            if update:
                adam.step()
    return network, history


if __name__ == "__main__":
    for function in (train, train_unnormalized):
        print(function.__name__)
        for losses in function()[1]:
            print(numbers(losses))
