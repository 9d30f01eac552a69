"""Lets torchvision be imported beside a CPU build of torch.

There is no such build of torchvision in the registry: its compiled operators do not load, and its
Python part names two of them when it is imported. timm and Lightning's metrics import it.
"""

import torch

_library: torch.library.Library | None = None


def define() -> None:
    """Before the first import of torchvision."""
    global _library
    if _library is None and torch.version.cuda is None:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
