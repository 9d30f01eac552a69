"""Accelerate with gradient accumulation: one more line names the task of a micro-batch.

In float64, parameters agree to 1e-7 with those of a plain loop that multiplies each task's exact
gradient of the trunk by the previous step's weights.
"""

from typing import Any

import torch
from accelerate import Accelerator
from toy import TASKS, Network, loss_of, make_network, make_task_batches

import cs_kernels as cs


def train(epochs: int = 4, **options: Any) -> tuple[Network, list]:
    """Makes two steps per epoch: with four micro-batches, and with the remaining two."""
    accelerator = Accelerator(gradient_accumulation_steps=4, **options)
    plain = make_network(normalized=False)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(make_task_batches(), batch_size=None)
    network, adam, loader = accelerator.prepare(plain, adam, loader)
    given = {"optimizer": adam, "scaler": accelerator.scaler}  # The scaler is for float16 only.
    balancer = cs.GradientBalancer(plain.trunk.parameters(), TASKS, **given)

    history = []
    for _ in range(epochs):
        for task, images, target in loader:
            with accelerator.accumulate(network):
                loss = loss_of(task, network(images, task), target)
                with balancer.task(task):
                    accelerator.backward(loss)
                adam.step()
                adam.zero_grad()
            if accelerator.sync_gradients:
                history.append(balancer.report().scalars())
    return plain, history


if __name__ == "__main__":
    for scalars in train()[1]:
        print({name: round(value, 4) for name, value in scalars.items()})
