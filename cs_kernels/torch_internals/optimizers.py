"""Hooks and abilities of torch optimizers."""

from collections.abc import Iterator

import torch


def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[object]:
    """The hooks before and after an optimizer's steps; wrappers of optimizers may have none."""
    yield from getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    yield from getattr(optimizer, "_optimizer_step_post_hooks", {}).values()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler's skipped step needs no host synchronization: fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
