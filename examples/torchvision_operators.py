"""Makes torchvision importable with a CPU build of torch.

The package index has no torchvision for a CPU build: the compiled operators of its torchvision do
not load, but two of them are needed on import. timm and torchmetrics import torchvision.
"""

import torch

_library: torch.library.Library | None = None


def define() -> None:
    """Defines the two operators; call this before the first import of torchvision."""
    global _library
    if _library is None and torch.version.cuda is None:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
