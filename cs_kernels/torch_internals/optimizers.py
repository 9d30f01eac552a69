"""The hooks of torch optimizers."""

from collections.abc import Iterator

import torch


def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """The hooks before and after an optimizer's steps; wrappers of optimizers may have none."""
    yield from getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    yield from getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
