"""Logs each step's report, from `opt.report()`, to TensorBoard.

Reports do not change training: in float64, parameters and running statistics match those of a plain
loop to within 1e-12. Show the logs with tensorboard --logdir runs
"""

import argparse
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

EVERY = 2  # Reading a report synchronizes with the device; log every 50 steps or so in real runs.


def train(epochs: int = 4, folder: Path = Path("runs")) -> tuple[Network, list]:
    """Logs losses, shares of channels and conflicts every few steps, and histograms every epoch."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    schedule = cs.Mixed(epochs=4, seed=0, draw="step")
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=schedule)
    step, history = 0, []
    with SummaryWriter(folder) as writer:
        for epoch in range(epochs):
            opt.start_epoch(epoch)
            for images, targets in make_batches():
                losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
                if step % EVERY == 0:
                    for name, value in opt.report().scalars().items():
                        writer.add_scalar(name, value, step)
                step += 1
                history.append(losses)
            for layer, priority in opt.priority().items():
                writer.add_histogram(f"priority/{layer}", priority, epoch)
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    for losses in train(folder=parser.parse_args().folder)[1]:
        print(numbers(losses))
