"""A plain loop with a data loader per task: task weights, a log, and a checkpoint.

In float64, parameters agree to 1e-7 with those of a loop that multiplies each task's exact gradient
of the trunk by the previous step's weights. A resumed run is bit-equal to an uninterrupted one.
"""

import argparse
from pathlib import Path

import torch
from atomic import atomic_write
from torch.utils.data import DataLoader
from toy import TASKS, Network, loss_of, make_network, make_task_batches

import cs_kernels as cs


def make_loader(task: str) -> DataLoader:
    """Images and targets of one task."""
    batches = [(images, target) for name, images, target in make_task_batches() if name == task]
    return DataLoader(batches, batch_size=None)


def train(epochs: int = 4, checkpoint: Path | None = None) -> tuple[Network, list]:
    """Trains up to an epoch; resumes from the checkpoint, if there is one, and writes it."""
    network = make_network(normalized=False)
    adam = torch.optim.AdamW(network.parameters(), lr=1e-2)
    balancer = cs.GradientBalancer(network.trunk.parameters(), TASKS, cs.UPGrad(), adam)
    parts = {"network": network, "adam": adam, "balancer": balancer}
    first = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epoch"]

    loaders = [make_loader(task) for task in TASKS]
    history = []
    for epoch in range(first, epochs):
        for batches in zip(*loaders, strict=True):
            adam.zero_grad()
            for task, (images, target) in zip(TASKS, batches, strict=True):
                with balancer.task(task):
                    loss_of(task, network(images, task), target).backward()
            adam.step()
            history.append(balancer.report().scalars())
        if checkpoint is not None:
            state = {name: part.state_dict() for name, part in parts.items()}
            with atomic_write(checkpoint) as file:
                torch.save({**state, "epoch": epoch + 1}, file)
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    for scalars in train(options.epochs, options.checkpoint)[1]:
        print({name: round(value, 4) for name, value in scalars.items()})
