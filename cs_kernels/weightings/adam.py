"""Adam for one number per task, without host synchronization."""

import torch
from torch import Tensor

BETAS, EPS = (0.9, 0.999), 1e-8
"""The defaults of `torch.optim.Adam`."""


def start(like: Tensor, value: float) -> Tensor:
    """Float64 [4], on the device of `like`: the Adam state of a number that starts at `value`."""
    state = torch.zeros(4, dtype=torch.float64, device=like.device)
    state[0] = value
    return state


def adam_step(states: Tensor, gradients: Tensor, lr: float, weight_decay: float = 0.0) -> Tensor:
    """The states after one step with the update rule of `torch.optim.Adam`.

    Args:
        states: [K, 4]; each row has a task's number, first moment, second moment and step count.
        gradients: [K].
        lr: The learning rate.
        weight_decay: The L2 penalty.

    Returns:
        A new tensor [K, 4].

    """
    value, first, second, steps = states.unbind(1)
    gradients = gradients + weight_decay * value
    steps = steps + 1
    first = first + (gradients - first) * (1 - BETAS[0])
    second = BETAS[1] * second + (1 - BETAS[1]) * gradients.square()
    unbiased = second.sqrt() / (1 - BETAS[1] ** steps).sqrt()
    value = value - lr / (1 - BETAS[0] ** steps) * first / (unbiased + EPS)
    return torch.stack([value, first, second, steps], 1)
