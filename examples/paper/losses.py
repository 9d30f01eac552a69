"""The loss of each kind of task: a mean over the known pixels of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paper.tasks import IGNORE, Task


def loss(task: Task, prediction: Tensor, target: Tensor) -> Tensor:
    """The loss of one prediction [B, channels, H, W]; targets have the formats of `Task`.

    The loss is cross-entropy for classes, balanced cross-entropy for edges and saliency, and L1 for
    depth and (after normalizing predictions) for normals. It is 0 if no pixel is known.
    """
    known = target != IGNORE
    if task.kind == "classes":
        total = functional.cross_entropy(prediction, target, ignore_index=IGNORE, reduction="sum")
        return total / known.sum().clamp(min=1)
    if task.kind in ("edges", "saliency"):
        return _balanced(prediction, target, known, task.edge_weight)
    if task.kind == "normals":
        prediction = functional.normalize(prediction, dim=1)
    return ((prediction - target).abs() * known).sum() / known.sum().clamp(min=1)


def _balanced(
    prediction: Tensor, target: Tensor, known: Tensor, positive_weight: float | None
) -> Tensor:
    """Cross-entropy of two classes, each weighted by default by the share of the other one.

    The sum is divided by the number of all pixels, as in the published code of MTI-Net.
    """
    if positive_weight is None:
        negative = (target * known).sum() / known.sum().clamp(min=1)
    else:
        negative = target.new_tensor(1 - positive_weight)
    balance = torch.where(target > 0, 1 - negative, negative) * known
    return functional.binary_cross_entropy_with_logits(prediction, target, balance)


def total_loss(task: Task, predictions: Sequence[Tensor], target: Tensor) -> Tensor:
    """The sum of the losses of the final prediction and of the intermediate scales."""
    return sum(loss(task, prediction.float(), target) for prediction in predictions)
