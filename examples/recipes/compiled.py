"""torch.compile of the trunk: one graph per task, from the second step on.

In float64, parameters and running statistics match an uncompiled plain loop's to within 1e-12.
"""

import argparse

import torch
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train(epochs: int = 4, backend: str = "inductor") -> tuple[Network, list]:
    """Trains two epochs of Phase 1, then Phase 2."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)  # Before compilation.
    # Call this trunk instead of network.trunk. (network.trunk.compile() would not compile the
    # convolutions, because torch does not compile an nn.Sequential in place.)
    trunk = torch.compile(network.trunk, backend=backend, fullgraph=True)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=cs.Switch(2))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():

            def loss(task: str) -> Tensor:
                return loss_of(task, network.heads[task](trunk(images)), targets[task])

            history.append(opt.step(loss))
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    for losses in train(backend=parser.parse_args().backend)[1]:
        print(numbers(losses))
