"""Makes torchvision importable with a CPU build of torch.

The package index has no torchvision for such a build: the compiled operators of the one it has do
not load, but the Python code needs two of them on import. timm and Lightning's metrics import it.
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
