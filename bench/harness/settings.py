"""Settings of whole training steps: a trunk, a head a task, and the size of a batch."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import network
import torchvision_operators


@dataclass(frozen=True)
class Setting:
    """Dense tasks: a picture in, a map of each task's channels out."""

    name: str
    device: str
    channels: dict[str, int]
    """The channels of each task's output."""
    batch: int
    size: int
    """Height and width of the pictures."""
    trunk: Callable[[], nn.Module]
    head: Callable[[int], nn.Module]


class FusedHead(nn.Module):
    """One task's output from HRNet's four maps, brought to the finest one's size."""

    def __init__(self, channels: int, inputs: int = 18 + 36 + 72 + 144) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, inputs, 1, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, channels, 1),
        )

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Four maps, the first [B, 18, H/4, W/4] -> [B, channels, H, W]."""
        size = maps[0].shape[-2:]
        same_size = [functional.interpolate(m, size, mode="bilinear") for m in maps[1:]]
        output = self.layers(torch.cat([maps[0], *same_size], dim=1))
        return functional.interpolate(output, scale_factor=4, mode="bilinear")


def timm_model(name: str, **options: Any) -> nn.Module:
    """A network of timm, which does without torchvision here."""
    torchvision_operators.define()
    import timm

    model: nn.Module = timm.create_model(name, **options)
    return model


def hrnet18() -> nn.Module:
    """HRNet-18's stem and four stages."""
    options = {"feature_location": "", "out_indices": (1, 2, 3, 4)}
    return timm_model("hrnet_w18", features_only=True, **options)


DEMO = Setting(
    name="demo",
    device="cpu",
    channels={"disparity": 1, "normals": 3, "edges": 1},
    batch=6,
    size=96,
    trunk=network.Trunk,
    head=network.Head,
)

HRNET18 = Setting(
    name="hrnet18",
    device="cuda",
    channels={"segmentation": 40, "depth": 1, "normals": 3, "edges": 1},
    batch=8,
    size=256,
    trunk=hrnet18,
    head=FusedHead,
)
