"""Accelerate with gradient accumulation: MultiTaskOptimizer gets all micro-batches of an update.

Parameters and running statistics match those of a plain loop on all the data: in float64 to within
1e-12, and in mixed precision, with the same autocast, to within 1e-6.
"""

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

MICRO_BATCHES = 2


def batch_loss(network: Network, images: Tensor, targets: dict[str, Tensor], task: str) -> Tensor:
    """The undivided loss: accelerator.backward divides by gradient_accumulation_steps."""
    return loss_of(task, network(images, task), targets[task])


def loader_of(batches: int) -> torch.utils.data.DataLoader:
    """A data loader; the accelerator that prepares it moves the batches to its device."""
    return torch.utils.data.DataLoader(make_batches(batches), batch_size=None)


def train(epochs: int = 4, batches: int = 6, **options: Any) -> tuple[Network, list]:
    """With task-specific normalization: `step` takes all micro-batches, without `accumulate`."""
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, **options)
    plain = make_network()
    cs.nn.convert_task_batchnorm(plain.trunk, TASKS)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    network, adam, loader = accelerator.prepare(plain, adam, loader_of(batches))
    given = plain.trunk, adam, TASKS
    opt = cs.MultiTaskOptimizer(*given, schedule=cs.Switch(2), backward=accelerator.backward)

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        closures = []
        for images, targets in loader:
            closures.append(partial(batch_loss, network, images, targets))
            last = accelerator.gradient_state.end_of_dataloader
            if last or len(closures) == MICRO_BATCHES:
                history.append(opt.step(closures))
                closures = []
    return plain, history


def train_unnormalized(epochs: int = 4, batches: int = 6, **options: Any) -> tuple[Network, list]:
    """Without normalization: `backward` for each micro-batch, inside `accumulate`."""
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, **options)
    plain = make_network(normalized=False)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    network, adam, loader = accelerator.prepare(plain, adam, loader_of(batches))
    given = plain.trunk, adam, TASKS
    opt = cs.MultiTaskOptimizer(*given, cs.PCGrad(), backward=accelerator.backward)

    history = []
    for _ in range(epochs):
        for images, targets in loader:
            with accelerator.accumulate(network):
                losses = {task: batch_loss(network, images, targets, task) for task in TASKS}
                history.append(opt.backward(losses, update=accelerator.sync_gradients))
                adam.step()
                adam.zero_grad()
    return plain, history


if __name__ == "__main__":
    for function in (train, train_unnormalized):
        print(function.__name__)
        for losses in function()[1]:
            print(numbers(losses))
