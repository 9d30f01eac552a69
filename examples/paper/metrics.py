"""The metrics of each kind of task, pooled over all pixels and ranks, and the paper's Delta_m.

A metric is a torchmetrics.Metric: `update` with a batch, then `compute` once. Under
torch.distributed, `compute` sums over the ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from paper.tasks import IGNORE, Measure, Task

Values = Mapping[str, Mapping[str, float]]
"""Values by task and name of the metric."""


class _Sums(Metric):
    """Sums in float64 over the known pixels or pictures."""

    def __init__(self, shapes: Mapping[str, int], **options: Any) -> None:
        super().__init__(**options)
        for name, size in shapes.items():
            zero = torch.zeros(size, dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def set_dtype(self, dst_type: Any) -> "_Sums":
        """Keeps float64, whatever the network is cast to."""
        return self


class Classes(MetricCollection):
    """Mean intersection over union and mean recall over classes, and pixel accuracy, in percent.

    Classes that occur neither in predictions nor in targets are left out of the means.
    """

    def __init__(self, channels: int, **options: Any) -> None:
        options |= {"num_classes": channels, "ignore_index": IGNORE, "validate_args": False}
        super().__init__(
            {
                "mIoU": MulticlassJaccardIndex(**options),
                "PAcc": MulticlassAccuracy(average="micro", **options),
                "mAcc": MulticlassAccuracy(average="macro", **options),
            },
            compute_groups=False,
        )

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Scores [B, C, H, W] and class numbers [B, H, W]."""
        super().update(prediction.argmax(1), target)

    def compute(self) -> dict[str, float]:
        """The metrics by name."""
        return {name: 100 * value.item() for name, value in super().compute().items()}


class Depth(_Sums):
    """Root mean square and mean absolute error, in the target's unit, and mean |error| / truth."""

    def __init__(self, **options: Any) -> None:
        super().__init__({"sums": 3, "count": 1}, **options)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """[B, 1, H, W] each."""
        known = target != IGNORE
        truth = target[known].double()
        error = prediction[known].double() - truth
        self.sums += torch.stack(
            [error.square().sum(), error.abs().sum(), (error.abs() / truth).sum()]
        )
        self.count += known.sum()

    def compute(self) -> dict[str, float]:
        """The metrics by name."""
        square, absolute, relative = (self.sums / self.count).tolist()
        return {"rmse": square**0.5, "abs_err": absolute, "abs_rel": relative}


class Normals(_Sums):
    """Angles between normals in degrees: mean, median, and the share below thresholds in percent.

    The median is computed from a histogram with bins of a thousandth of a degree, because storing
    all angles of the real data sets would take gigabytes.
    """

    THRESHOLDS = (11.25, 22.5, 30.0)
    _BINS_A_DEGREE = 1000

    def __init__(self, **options: Any) -> None:
        shapes = {"total": 1, "count": 1, "below": len(self.THRESHOLDS)}
        super().__init__({**shapes, "histogram": 180 * self._BINS_A_DEGREE + 1}, **options)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """[B, 3, H, W] each; predictions need not be normalized."""
        known = target[:, 0] != IGNORE
        cosine = (functional.normalize(prediction, dim=1) * target).sum(1)[known].clamp(-1, 1)
        angle = torch.rad2deg(torch.arccos(cosine)).double().nan_to_num(torch.inf)
        self.total += angle.sum()
        self.count += known.sum()
        self.below += torch.stack([(angle < limit).sum() for limit in self.THRESHOLDS])
        bins = (angle.clamp(max=180) * self._BINS_A_DEGREE).round().long()
        self.histogram += torch.bincount(bins, minlength=len(self.histogram))

    def compute(self) -> dict[str, float]:
        """The metrics by name."""
        count = self.count.item()
        half = self.count.new_tensor((count + 1) // 2)
        middle = torch.searchsorted(self.histogram.cumsum(0), half)
        shares = (100 * self.below / self.count).tolist()
        return {
            "mean": self.total.item() / count if count else float("nan"),
            "median": middle.item() / self._BINS_A_DEGREE if count else float("nan"),
            **{f"<{t:g}": share for t, share in zip(self.THRESHOLDS, shares, strict=True)},
        }


class Saliency(_Sums):
    """The best mean IoU and F score over 15 thresholds, in percent.

    Means are over pictures; the F score is computed from mean precision and mean recall. An empty
    prediction of an empty target has an IoU of 1.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__({"iou": 15, "precision": 15, "recall": 15, "count": 1}, **options)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Logits and 0 or 1, [B, 1, H, W] each."""
        known = (target != IGNORE).flatten(1)
        some = known.any(1)
        prediction, target, known = prediction[some], target[some], known[some]
        truth = (target.flatten(1) > 0) & known
        thresholds = torch.linspace(0.2, 0.9, 15, device=target.device)
        found = torch.sigmoid(prediction.float()).flatten(1) > thresholds[:, None, None]
        found &= known
        both = (found & truth).sum(-1).double()
        either = (found | truth).sum(-1).double()
        self.iou += torch.where(either > 0, both / either, 1.0).sum(1)
        self.precision += (both / found.sum(-1).clamp(min=1)).sum(1)
        self.recall += (both / truth.sum(-1).clamp(min=1)).sum(1)
        self.count += len(target)

    def compute(self) -> dict[str, float]:
        """The metrics by name."""
        iou, precision, recall = (
            sums / self.count for sums in (self.iou, self.precision, self.recall)
        )
        f = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
        return {"mIoU": 100 * iou.max().item(), "maxF": 100 * f.max().item()}


class Edges(_Sums):
    """The F score of all pixels at a probability of one half, in percent."""

    def __init__(self, **options: Any) -> None:
        super().__init__({"both": 1, "either": 1}, **options)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Logits and 0 or 1, [B, 1, H, W] each."""
        known = target != IGNORE
        found, edge = (prediction > 0) & known, (target > 0) & known
        self.both += (found & edge).sum()
        self.either += found.sum() + edge.sum()

    def compute(self) -> dict[str, float]:
        """The metrics by name."""
        return {"F": 200 * self.both.item() / max(1.0, self.either.item())}


def make_metric(task: Task, *, all_ranks: bool = True) -> Metric | MetricCollection:
    """The metrics of a task.

    Args:
        task: The task whose predictions are evaluated.
        all_ranks: Whether `compute` under torch.distributed is called on all ranks and sums over
            them; if not, it covers this rank alone.

    """
    if task.kind == "classes":
        return Classes(task.channels, sync_on_compute=all_ranks)
    kinds = {"depth": Depth, "normals": Normals, "saliency": Saliency, "edges": Edges}
    return kinds[task.kind](sync_on_compute=all_ranks)


def delta_m(values: Values, baseline: Values, measures: Iterable[Measure]) -> float:
    """(1/T) sum_i (-1)^{l_i} (M_m,i - M_b,i) / M_b,i in percent; l_i = 1 where lower is better.

    The sum is over the measures that count.
    """
    changes = []
    for measure in measures:
        if measure.counts:
            base = baseline[measure.task][measure.name]
            change = (values[measure.task][measure.name] - base) / base
            changes.append(-change if measure.lower else change)
    return 100 * sum(changes) / len(changes)
