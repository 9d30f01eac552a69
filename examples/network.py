"""A shared convolutional encoder-decoder with batch normalization, and one head per task."""

import torch
from torch import Tensor, nn
from torch.nn import functional


def _normalized(layer: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(layer, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _normalized(nn.Conv2d(channels, channels, 3, padding=1, bias=False), channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        return torch.relu(x + self.norm(self.second(self.first(x))))


class Trunk(nn.Module):
    """The trunk: [B, 3, H, W] -> [B, 24, H/2, W/2]; H and W are multiples of 8."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 48, 96)
        self.stem = _normalized(nn.Conv2d(3, 24, 5, stride=2, padding=2, bias=False), 24)
        self.encoder = nn.ModuleList()
        inputs = 24
        for i, width in enumerate(widths):
            stride = 1 if i == 0 else 2
            down = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
            self.encoder.append(nn.Sequential(_normalized(down, width), Residual(width)))
            inputs = width
        self.decoder = nn.ModuleList()
        for width in reversed(widths[:-1]):
            up = nn.ConvTranspose2d(inputs, width, 2, stride=2, bias=False)
            self.decoder.append(nn.Sequential(_normalized(up, width), Residual(width)))
            inputs = width

    def forward(self, x: Tensor) -> Tensor:
        """Encodes, then decodes with skip connections from the encoder."""
        x = self.stem(x)
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        for stage in self.decoder:
            x = stage(x) + skips.pop()
        return x


class Head(nn.Module):
    """One task's output at the size of the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.output = nn.Conv2d(24, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 24, H/2, W/2] -> [B, channels, H, W]."""
        return functional.interpolate(self.output(x), scale_factor=2, mode="bilinear")
