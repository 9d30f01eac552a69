"""Lightning Fabric: it places the network, casts for mixed precision and runs the backward pass.

Parameters and running statistics match those of a plain loop: in float64 to within 1e-12, and in
mixed precision, with the same autocast, to within 1e-6.
"""

import argparse
from typing import Any

import torch
from lightning.fabric import Fabric
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train(
    epochs: int = 4, precision: Any = "32-true", accelerator: str = "auto"
) -> tuple[Network, list]:
    """Trains two epochs of Phase 1, then Phase 2."""
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    plain = make_network()
    cs.nn.convert_task_batchnorm(plain.trunk, TASKS)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    network, adam = fabric.setup(plain, adam)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(make_batches(), batch_size=None))
    # Fabric's optimizer and its backward pass handle the precision.
    opt = cs.MultiTaskOptimizer(
        plain.trunk, adam, TASKS, schedule=cs.Switch(2), backward=fabric.backward
    )

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in loader:
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
    return plain, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="32-true")
    for losses in train(precision=parser.parse_args().precision)[1]:
        print(numbers(losses))
