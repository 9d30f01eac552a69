"""Activation checkpointing: each backward pass recomputes the trunk's activations.

In float64, parameters and running statistics match those of a plain loop to within 1e-12, if that
loop also updates the statistics twice, as torch does when it recomputes.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


class Checkpointed(nn.Module):
    """A module that saves only its input for the backward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Uses non-reentrant checkpointing, whose graph shows the parameters to the optimizer."""
        return checkpoint(self.module, x, use_reentrant=False)


def train(epochs: int = 4) -> tuple[Network, list]:
    """Trains two epochs of Phase 1, then Phase 2."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    network.trunk = Checkpointed(network.trunk)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=cs.Switch(2))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():
            # A task stays active until its backward pass ends, so recomputation uses it too.
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
    return network, history


if __name__ == "__main__":
    for losses in train()[1]:
        print(numbers(losses))
