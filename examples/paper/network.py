"""A multi-task network: a trunk that several tasks' losses reach, and one head a task."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """[B, C, h, w] -> [B, C, *size], bilinear."""
    if maps.shape[-2:] == torch.Size(size):
        return maps
    return functional.interpolate(maps, tuple(size), mode="bilinear")


class Network(nn.Module):
    """Predicts each task from a picture [B, 3, H, W]; H and W are multiples of 32.

    Args:
        trunk: Returns the one argument of all heads, or a dictionary: task -> the arguments of its
            head, a tuple. Everything that several tasks' losses reach is in it.
        heads: By task; a head returns its predictions, a list, at any size.

    """

    run_trunk: Callable[[Tensor], Any]
    """The trunk as `forward` calls it. Replace it by a compiled or wrapped trunk: it is no
    submodule, so parameters keep their names and are not listed twice."""

    def __init__(self, trunk: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict(heads)
        self.run_trunk = trunk

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; `run_trunk` is not registered as a submodule."""
        if name == "run_trunk":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def predict(self, shared: Any, task: str, size: Sequence[int]) -> list[Tensor]:
        """The predictions of one task, at this size, from what the trunk has returned."""
        own = shared[task] if isinstance(shared, dict) else (shared,)
        return [resized(prediction, size) for prediction in self.heads[task](*own)]

    def forward(
        self, picture: Tensor, tasks: Sequence[str] | None = None
    ) -> dict[str, list[Tensor]]:
        """The predictions of some tasks, all by default; only their heads run.

        Returns:
            For each task its predictions [B, channels, H, W]. The last one is final; those before
            it are from intermediate scales, for deep supervision (none for most networks). They
            are raw: no softmax, no sigmoid, and normals are not normalized.

        Raises:
            ValueError: A task is not one of the network.

        """
        chosen = list(self.heads) if tasks is None else list(tasks)
        for task in chosen:
            if task not in self.heads:
                raise ValueError(f"tasks must be among {list(self.heads)}, got {task!r}")
        shared = self.run_trunk(picture)
        return {task: self.predict(shared, task, picture.shape[-2:]) for task in chosen}


def narrowed(channels: int, width: float) -> int:
    """The number of channels at a width in (0, 1], at least 1."""
    return max(1, round(channels * width))
