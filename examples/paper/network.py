"""A multi-task network: a trunk that several tasks' losses reach, and one head per task."""

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
        trunk: Returns the single argument of all heads, or a dictionary from each task to a tuple
            of its head's arguments. Contains everything that several tasks' losses reach.
        heads: By task; a head returns a list of predictions of any size.

    """

    run_trunk: Callable[[Tensor], Any]
    """The trunk that `forward` calls; may be replaced by a compiled or wrapped trunk.

    It is not a submodule, so parameters keep their names and are not listed twice.
    """

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
        """The predictions of one task, resized to `size`, from the trunk's output."""
        own = shared[task] if isinstance(shared, dict) else (shared,)
        return [resized(prediction, size) for prediction in self.heads[task](*own)]

    def forward(
        self, picture: Tensor, tasks: Sequence[str] | None = None
    ) -> dict[str, list[Tensor]]:
        """The predictions of some tasks, by default of all; only their heads run.

        Returns:
            For each task, a list of predictions [B, channels, H, W]. The last one is final; any
            others are from intermediate scales, for deep supervision. Predictions are raw: no
            softmax, no sigmoid, and normals are not normalized.

        Raises:
            ValueError: The network does not have a task.

        """
        chosen = list(self.heads) if tasks is None else list(tasks)
        for task in chosen:
            if task not in self.heads:
                raise ValueError(f"tasks must be among {list(self.heads)}, got {task!r}")
        shared = self.run_trunk(picture)
        return {task: self.predict(shared, task, picture.shape[-2:]) for task in chosen}


def narrowed(channels: int, width: float) -> int:
    """The number of channels scaled by a width in (0, 1], at least 1."""
    return max(1, round(channels * width))
