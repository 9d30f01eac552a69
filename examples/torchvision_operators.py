"""Lets torchvision be imported with a CPU build of torch.

The registry has no CPU build of torchvision. The compiled operators of its other builds do not
load, and its Python part refers to two of them on import. timm and Lightning's metrics import it.
"""

import torch

_library: torch.library.Library | None = None


def define() -> None:
    """Defines the two operators; call it before the first import of torchvision."""
    global _library
    if _library is None and torch.version.cuda is None:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
