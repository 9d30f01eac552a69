"""The networks of the paper's experiments, by name."""

from collections.abc import Mapping

import cs_kernels as cs
from paper.cross_stitch import make_cross_stitch
from paper.mti_net import HRNet, ResNetPyramid, make_mti_net
from paper.network import Network
from paper.rotograd import make_rotograd
from paper.segnet import make_segnet
from paper.tasks import Task

__all__ = ["NAMES", "Network", "make_network"]

NAMES = ("hrnet18", "resnet18", "segnet", "cross-stitch", "rotograd")
_PRETRAINED = ("hrnet18", "resnet18")


def make_network(
    name: str,
    tasks: Mapping[str, Task],
    *,
    pretrained: bool = False,
    width: float = 1.0,
    task_norm: bool = False,
) -> Network:
    """A network for some tasks; with one task, the single-task network of the tables.

    Args:
        name: "hrnet18" or "resnet18" for MTI-Net with this backbone; "segnet" for one SegNet;
            "cross-stitch" for a SegNet per task; "rotograd" for SegNet with a rotation per task.
        tasks: By name, in their order.
        pretrained: Whether the backbone is pretrained on ImageNet (timm downloads the weights).
        width: In (0, 1], for small machines: scales the channels of the pyramid of "resnet18", and
            the filters of SegNet. "hrnet18" has a fixed width.
        task_norm: Whether the trunk gets task-specific batch normalization.

    Raises:
        ValueError: An argument is invalid.

    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {list(NAMES)}, got {name!r}")
    if not tasks:
        raise ValueError("tasks must have at least one task, got none")
    if not 0 < width <= 1:
        raise ValueError(f"width must be in (0, 1], got {width!r}")
    if name == "hrnet18" and width != 1:
        raise ValueError(f"width must be 1 for 'hrnet18', got {width!r}")
    if pretrained and name not in _PRETRAINED:
        raise ValueError(f"pretrained must be False for {name!r}, got {pretrained!r}")
    if task_norm and name == "rotograd":
        # RotoGrad's trunk runs once for all tasks.
        raise ValueError(f"task_norm must be False for 'rotograd', got {task_norm!r}")
    network: Network
    if name == "hrnet18":
        network = make_mti_net(HRNet(pretrained=pretrained), tasks)
    elif name == "resnet18":
        network = make_mti_net(ResNetPyramid(width=width, pretrained=pretrained), tasks)
    elif name == "segnet":
        network = make_segnet(tasks, width)
    elif name == "cross-stitch":
        network = make_cross_stitch(tasks, width)
    else:
        network = make_rotograd(tasks, width)
    if task_norm:
        cs.nn.convert_task_batchnorm(network.trunk, list(tasks))
    return network
