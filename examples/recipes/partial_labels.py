"""Batches with labels for some tasks: other tasks' parameters and statistics stay unchanged.

In float64, parameters and running statistics match those of a plain loop to within 1e-12.
"""

import torch
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

LABELED = [["depth", "edges"], ["edges"], ["depth"]]
"""The tasks with labels, for each batch."""


def train(epochs: int = 4) -> tuple[Network, list]:
    """Trains two epochs of Phase 1, then Phase 2."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2, weight_decay=0.01)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=cs.Switch(2))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for (images, every_target), labeled in zip(make_batches(), LABELED, strict=True):
            targets = {task: every_target[task] for task in labeled}
            losses = opt.step(
                lambda task: loss_of(task, network(images, task), targets[task]), tasks=targets
            )
            history.append(losses)  # Contains only labeled tasks.
    return network, history


if __name__ == "__main__":
    for losses in train()[1]:
        print(numbers(losses))
