"""Exports one task's network, without task-specific normalization, with torch.export.

In float64, outputs of the exported program match those of the converted network, with this task
active, to within 1e-12. In its state dict, the trunk has the keys from before the conversion.
"""

import torch
from torch import nn
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train(epochs: int = 2) -> tuple[Network, list]:
    """Trains an epoch of Phase 1, then Phase 2."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, schedule=cs.Switch(1))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
    return network, history


def export(network: Network, task: str) -> torch.export.ExportedProgram:
    """The trunk of one task with its head, for batches of any size."""
    plain = nn.Sequential(cs.nn.extract_task(network.trunk, task), network.heads[task]).eval()
    images = make_batches()[0][0]
    batch = torch.export.Dim("batch", min=1, max=65535)  # The largest batch on CUDA.
    return torch.export.export(plain, (images,), dynamic_shapes=({0: batch},))


if __name__ == "__main__":
    network, history = train()
    for losses in history:
        print(numbers(losses))
    network.eval()
    images = make_batches(1, size=7)[0][0]
    for task in TASKS:
        exported = export(network, task).module()
        with torch.no_grad(), cs.nn.active_task(network.trunk, task):
            difference = (exported(images) - network(images, task)).abs().max()
        print(task, "largest difference", difference.item())
