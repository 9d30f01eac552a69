"""Whole training steps: a trunk, one head per task, and a batch of samples."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import network
import torchvision_operators


def timm_model(name: str, **options: Any) -> Any:
    """A network of timm, even if torchvision's operators do not load."""
    torchvision_operators.define()
    import timm

    return timm.create_model(name, **options)


@dataclass(frozen=True)
class Setting:
    """The networks and the batch of a training run."""

    name: str
    trunk: Callable[[], nn.Module]
    head: Callable[[int], nn.Module]
    channels: dict[str, int]
    """The channels of each task's output."""
    batch: int
    shape: tuple[int, ...]
    """The shape of one input."""
    device: str = "cpu"

    def facts(self) -> dict[str, Any]:
        """The setting's entries in a record."""
        tasks, size = len(self.channels), self.shape[-1]
        return {"network": self.name, "tasks": tasks, "batch": self.batch, "size": size}


class Training:
    """The networks and the batch of a setting, and its training steps.

    Args:
        setting: The networks and the batch.
        method: As in `MultiTaskOptimizer`.
        schedule: As in `MultiTaskOptimizer`.
        adam: Whether to use Adam, which has a state, instead of SGD.
        convert: Whether to make normalization task-specific.
        dtype: The dtype of all parameters and inputs.

    """

    def __init__(
        self,
        setting: Setting,
        method: cs.Method | None = None,
        schedule: cs.Schedule | None = None,
        *,
        adam: bool = False,
        convert: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self.setting = setting
        tasks = list(setting.channels)
        self.trunk = setting.trunk()
        if convert:
            cs.nn.convert_task_batchnorm(self.trunk, tasks)
        for norm in cs.nn.task_norms(self.trunk):  # With equal scales, rounding sets priorities.
            for child in norm.children():
                nn.init.uniform_(child.weight, 0.5, 1.5)
        self.heads = nn.ModuleDict({t: setting.head(n) for t, n in setting.channels.items()})
        for part in (self.trunk, self.heads):
            part.to(setting.device, dtype)
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        make = torch.optim.Adam if adam else torch.optim.SGD
        self.optimizer = make(self.parameters, lr=1e-4)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.optimizer, tasks, method, schedule)
        self.x = torch.randn(setting.batch, *setting.shape, dtype=dtype).to(setting.device)
        self.targets = {}
        for task, head in self.heads.items():
            with torch.no_grad(), cs.nn.active_task(self.trunk, task):
                self.targets[task] = torch.randn_like(head(self.trunk(self.x)))

    def loss(self, task: str, z: Any = None) -> Tensor:
        """A task's loss, from an output of the trunk or from a new forward pass."""
        output = self.heads[task](self.trunk(self.x) if z is None else z)
        loss: Tensor = (output - self.targets[task]).abs().mean()
        return loss

    def losses(self, of_tasks: dict[str, Any]) -> dict[str, Tensor]:
        """The losses, from the trunk's output for each task."""
        return {task: self.loss(task, z) for task, z in of_tasks.items()}

    def step(self) -> None:
        self.opt.step(self.loss)

    def step_together(self) -> None:
        self.opt.step_together(lambda run: self.losses(run(self.x)))


class FusedHead(nn.Module):
    """Predicts one task from HRNet's four maps, which are resized to the finest map's size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inputs = 18 + 36 + 72 + 144
        hidden = nn.Conv2d(inputs, inputs, 1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()
        self.layers = nn.Sequential(*hidden, nn.Conv2d(inputs, channels, 1))

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Four maps, the first [B, 18, H/4, W/4] -> [B, channels, H, W]."""
        size = maps[0].shape[-2:]
        same_size = [functional.interpolate(m, size, mode="bilinear") for m in maps[1:]]
        output = self.layers(torch.cat([maps[0], *same_size], dim=1))
        return functional.interpolate(output, scale_factor=4, mode="bilinear")


DEMO = Setting(
    name="demo",
    trunk=network.Trunk,
    head=network.Head,
    channels={"disparity": 1, "normals": 3, "edges": 1},
    batch=6,
    shape=(3, 96, 96),
)

HRNET18 = Setting(
    name="hrnet18",
    trunk=lambda: timm_model(
        "hrnet_w18", features_only=True, feature_location="", out_indices=(1, 2, 3, 4)
    ),
    head=FusedHead,
    channels={"segmentation": 40, "depth": 1, "normals": 3, "edges": 1},
    batch=8,
    shape=(3, 256, 256),
    device="cuda",
)
