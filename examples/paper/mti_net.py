"""MTI-Net: Multi-Scale Task Interaction Networks (Vandenhende et al., ECCV 2020)."""

from collections.abc import Mapping, Sequence

import timm
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FeaturePyramidNetwork

from paper.network import Network, narrowed, resized
from paper.tasks import Task

PYRAMID = 256
"""Channels of a ResNet's pyramid at width 1."""
_REDUCTION = 16
"""The factor by which a squeeze-and-excitation reduces channels."""


class HRNet(nn.Module):
    """HRNet-18 of the published MTI-Net: 4 maps at strides 4 to 32.

    The backbone is timm's `hrnet_w18_small_v2`, without the layers that widen the maps for
    classification.
    """

    channels = (18, 36, 72, 144)

    def __init__(self, *, pretrained: bool = False) -> None:
        super().__init__()
        self.body = timm.create_model(
            "hrnet_w18_small_v2",
            pretrained=pretrained,
            features_only=True,
            feature_location="",
            out_indices=(1, 2, 3, 4),  # Without the stem's map.
        )

    def forward(self, picture: Tensor) -> list[Tensor]:
        """[B, 3, H, W] -> the maps, finest first."""
        return list(self.body(picture))


class ResNetPyramid(nn.Module):
    """ResNet-18 with a feature pyramid: 4 maps at strides 4 to 32, with equal channels."""

    def __init__(self, *, width: float = 1.0, pretrained: bool = False) -> None:
        super().__init__()
        self.body = timm.create_model(
            "resnet18", pretrained=pretrained, features_only=True, out_indices=(1, 2, 3, 4)
        )
        channels = narrowed(PYRAMID, width)
        self.channels = (channels,) * 4
        self.pyramid = FeaturePyramidNetwork(self.body.feature_info.channels(), channels)

    def forward(self, picture: Tensor) -> list[Tensor]:
        """[B, 3, H, W] -> the maps, finest first."""
        maps = {str(scale): x for scale, x in enumerate(self.body(picture))}
        return list(self.pyramid(maps).values())


def _residual(inputs: int, channels: int) -> BasicBlock:
    """Two 3 x 3 convolutions with a skip connection, projected if the channels change."""
    skip = nn.Sequential(nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels))
    return BasicBlock(inputs, channels, downsample=None if inputs == channels else skip)


class InitialPredictions(nn.Module):
    """At one scale: each task's features, and its initial prediction from them."""

    def __init__(self, tasks: Mapping[str, Task], inputs: int, channels: int) -> None:
        super().__init__()
        self.refine = nn.ModuleDict(
            {
                name: nn.Sequential(_residual(inputs, channels), _residual(channels, channels))
                for name in tasks
            }
        )
        self.predict = nn.ModuleDict(
            {name: nn.Conv2d(channels, task.channels, 1) for name, task in tasks.items()}
        )

    def forward(
        self, maps: Tensor, coarser: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Features and predictions by task, from the maps and the next coarser scale's features."""
        features = {}
        for task, refine in self.refine.items():
            x = maps
            if coarser is not None:
                x = torch.cat([maps, resized(coarser[task], maps.shape[-2:])], 1)
            features[task] = refine(x)
        return features, {task: predict(features[task]) for task, predict in self.predict.items()}


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        between = max(1, channels // _REDUCTION)
        self.factors = nn.Sequential(
            nn.Linear(channels, between), nn.ReLU(), nn.Linear(between, channels), nn.Sigmoid()
        )

    def forward(self, maps: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        return maps * self.factors(maps.mean((2, 3)))[:, :, None, None]


class Propagation(nn.Module):
    """Feature propagation: from all tasks' features at one scale to the next finer scale."""

    def __init__(self, tasks: Sequence[str], channels: int) -> None:
        super().__init__()
        together = len(tasks) * channels
        self.attend = nn.Sequential(
            _residual(together, together // 4),
            _residual(together // 4, together // 4),
            nn.Conv2d(together // 4, together, 1),
        )
        self.reduce = _residual(together, channels)
        self.excite = nn.ModuleDict({task: SqueezeExcitation(channels) for task in tasks})

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Features by task -> the same shapes."""
        together = torch.cat([features[task] for task in self.excite], 1)
        # The published network takes the softmax over K neighboring channels of the concatenation,
        # not over the tasks; its published results come from that form.
        mask = self.attend(together).unflatten(1, (-1, len(features))).softmax(2).flatten(1, 2)
        shared = self.reduce(mask * together)
        return {task: excite(shared) + features[task] for task, excite in self.excite.items()}


class Gate(nn.Module):
    """Spatial attention: a convolution, masked by the sigmoid of another."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mask = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.value = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """[B, C, H, W] -> the same."""
        return self.value(maps) * self.mask(maps).sigmoid()


class Distillation(nn.Module):
    """At one scale: each task's features, plus the gated features of every other task."""

    def __init__(self, tasks: Sequence[str], channels: int) -> None:
        super().__init__()
        self.gates = nn.ModuleDict(
            {
                task: nn.ModuleDict({other: Gate(channels) for other in tasks if other != task})
                for task in tasks
            }
        )

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Features by task -> the same shapes."""
        distilled = {}
        for task, gates in self.gates.items():
            others = [gate(features[other]) for other, gate in gates.items()]
            distilled[task] = features[task] + torch.stack(others).sum(0)
        return distilled


class MTINet(nn.Module):
    """The trunk: a backbone, and all modules of MTI-Net before the final heads."""

    def __init__(self, backbone: HRNet | ResNetPyramid, tasks: Mapping[str, Task]) -> None:
        super().__init__()
        self.backbone = backbone
        channels = backbone.channels
        inputs = [own + coarser for own, coarser in zip(channels, (*channels[1:], 0), strict=True)]
        self.initial = nn.ModuleList(
            InitialPredictions(tasks, *scale) for scale in zip(inputs, channels, strict=True)
        )
        names = list(tasks)
        self.propagate = nn.ModuleList(Propagation(names, own) for own in channels[1:])
        self.distill = nn.ModuleList(Distillation(names, own) for own in channels)

    def forward(self, picture: Tensor) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        """Each task's distilled features and initial predictions, both at strides 4 to 32."""
        maps = self.backbone(picture)
        features: list[dict[str, Tensor]] = [{}] * len(maps)
        predictions: list[dict[str, Tensor]] = [{}] * len(maps)
        coarser = None
        for scale in reversed(range(len(maps))):
            features[scale], predictions[scale] = self.initial[scale](maps[scale], coarser)
            if scale:
                coarser = self.propagate[scale - 1](features[scale])
        distilled = [distill(x) for distill, x in zip(self.distill, features, strict=True)]
        return {
            task: ([x[task] for x in distilled], [x[task] for x in predictions])
            for task in features[0]
        }


class Head(nn.Sequential):
    """The final prediction at stride 4, from maps at strides 4 to 32."""

    def __init__(self, inputs: Sequence[int], channels: int) -> None:
        together = sum(inputs)
        super().__init__(
            nn.Conv2d(together, together, 1),
            nn.BatchNorm2d(together),
            nn.ReLU(),
            nn.Conv2d(together, channels, 1),
        )

    def forward(self, maps: Sequence[Tensor], initial: Sequence[Tensor] = ()) -> list[Tensor]:
        """Returns the unchanged initial predictions, followed by the final one."""
        size = maps[0].shape[-2:]
        return [*initial, super().forward(torch.cat([resized(x, size) for x in maps], 1))]


def make_mti_net(backbone: HRNet | ResNetPyramid, tasks: Mapping[str, Task]) -> Network:
    """MTI-Net for several tasks; for one, the backbone with the same kind of head."""
    heads = {name: Head(backbone.channels, task.channels) for name, task in tasks.items()}
    return Network(backbone if len(tasks) == 1 else MTINet(backbone, tasks), heads)
