"""SegNet with one head per task: the network of the experiments with Cityscapes.

Badrinarayanan et al., "SegNet: A Deep Convolutional Encoder-Decoder Architecture for Image
Segmentation", 2017, in the multi-task form of Liu et al., "End-to-End Multi-Task Learning with
Attention", CVPR 2019.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from paper.network import Network, narrowed
from paper.tasks import Task

FILTERS = (64, 128, 256, 512, 512)
CONVOLUTIONS = (2, 2, 3, 3, 3)
"""Convolutions per block of each stage, in encoder and decoder."""
PUBLISHED_EXTRAS = 3
"""Unused scalars of the published network (log loss weights): too few to affect its 95.43 MiB."""


def _block(inputs: int, channels: int, convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(convolutions):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        inputs = channels
    return nn.Sequential(*layers)


def _initialize(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class SegNet(nn.Module):
    """The trunk: [B, 3, H, W] -> [B, 64 * width, H, W]; H and W are multiples of 32."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        filters = [narrowed(channels, width) for channels in FILTERS]
        self.channels = filters[0]
        """The number of output channels."""
        stages = list(zip([3, *filters], filters, CONVOLUTIONS, strict=False))
        self.encoder = nn.ModuleList(_block(*stage) for stage in stages)
        self.decoder = nn.ModuleList(
            _block(channels, filters[max(i - 1, 0)], convolutions)
            for i, (_, channels, convolutions) in reversed(list(enumerate(stages)))
        )
        _initialize(self)

    def encode(self, maps: Tensor, stage: int) -> tuple[Tensor, Tensor]:
        """Runs one encoder stage; returns its pooled maps, and the indices of the maxima."""
        pooled, indices = functional.max_pool2d(self.encoder[stage](maps), 2, return_indices=True)
        return pooled, indices

    def decode(self, maps: Tensor, indices: Tensor, stage: int) -> Tensor:
        """Runs one decoder stage, which first moves values back to the positions of the maxima."""
        # Like max_unpool2d, for which torch has no deterministic implementation.
        height, width = maps.shape[-2:]
        empty = maps.new_zeros(*maps.shape[:2], 4 * height * width)
        unpooled = empty.scatter(2, indices.flatten(2), maps.flatten(2))
        decoded: Tensor = self.decoder[stage](unpooled.unflatten(2, (2 * height, 2 * width)))
        return decoded

    def forward(self, maps: Tensor) -> Tensor:
        """Five stages down, and five up."""
        places = []
        for stage in range(len(self.encoder)):
            maps, indices = self.encode(maps, stage)
            places.append(indices)
        for stage in range(len(self.decoder)):
            maps = self.decode(maps, places.pop(), stage)
        return maps


class Head(nn.Sequential):
    """Two convolutions without an activation: [B, C, H, W] -> one prediction."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__(nn.Conv2d(inputs, inputs, 3, padding=1), nn.Conv2d(inputs, channels, 1))
        _initialize(self)

    def forward(self, maps: Tensor) -> list[Tensor]:
        """Returns the final prediction, as a list of one."""
        return [super().forward(maps)]


def heads(inputs: int, tasks: Mapping[str, Task]) -> dict[str, Head]:
    """A head for each task."""
    return {name: Head(inputs, task.channels) for name, task in tasks.items()}


def make_segnet(tasks: Mapping[str, Task], width: float = 1.0) -> Network:
    """One SegNet for all tasks.

    With 7 + 1 outputs it has 25,017,672 parameters, the number of the published network minus
    `PUBLISHED_EXTRAS`.
    """
    trunk = SegNet(width)
    return Network(trunk, heads(trunk.channels, tasks))
