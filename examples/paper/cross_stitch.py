"""Cross-stitch Networks for Multi-task Learning (Misra et al., CVPR 2016)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paper.network import Network
from paper.segnet import CONVOLUTIONS, SegNet, heads
from paper.tasks import Task


class CrossStitch(nn.Module):
    """Mixes the maps of K networks: output i is the sum over j of weight[i, j] times input j.

    The paper also describes one such matrix per channel; this module has one for all channels.
    """

    def __init__(self, tasks: int) -> None:
        super().__init__()
        other = 0.1 / (tasks - 1)
        weight = torch.full((tasks, tasks), other) + (0.9 - other) * torch.eye(tasks)
        self.weight = nn.Parameter(weight)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """K maps of one shape -> K maps of that shape."""
        return list(torch.einsum("ij,j...->i...", self.weight, torch.stack(list(maps))))


class StitchedSegNets(nn.Module):
    """A SegNet per task, stitched after each pooling and after each block of the decoder."""

    def __init__(self, tasks: Sequence[str], width: float = 1.0) -> None:
        super().__init__()
        self.networks = nn.ModuleDict({task: SegNet(width) for task in tasks})
        stages = len(CONVOLUTIONS)
        self.down = nn.ModuleList(CrossStitch(len(tasks)) for _ in range(stages))
        self.up = nn.ModuleList(CrossStitch(len(tasks)) for _ in range(stages))

    def forward(self, picture: Tensor) -> dict[str, tuple[Tensor]]:
        """Returns each task's feature, from its own network."""
        networks: list[SegNet] = list(self.networks.values())
        maps = [picture] * len(networks)
        places = []
        for stage, stitch in enumerate(self.down):
            encoded = [network.encode(x, stage) for network, x in zip(networks, maps, strict=True)]
            maps = stitch([pooled for pooled, _ in encoded])
            places.append([indices for _, indices in encoded])
        for stage, stitch in enumerate(self.up):
            maps = stitch(
                [
                    network.decode(x, indices, stage)
                    for network, x, indices in zip(networks, maps, places.pop(), strict=True)
                ]
            )
        return {task: (x,) for task, x in zip(self.networks, maps, strict=True)}


def make_cross_stitch(tasks: Mapping[str, Task], width: float = 1.0) -> Network:
    """Stitched SegNets with the heads of SegNet.

    Raises:
        ValueError: There is only one task.

    """
    if len(tasks) < 2:
        raise ValueError(f"tasks must have at least two tasks, got {list(tasks)}")
    trunk = StitchedSegNets(list(tasks), width)
    channels = next(iter(trunk.networks.values())).channels
    return Network(trunk, heads(channels, tasks))
