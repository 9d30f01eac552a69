"""The tasks of each data set: their outputs, losses, metrics, and weights tuned by hand."""

from dataclasses import dataclass
from typing import Literal

IGNORE = 255
"""Marks unknown pixels in all targets; they enter neither losses nor metrics."""

Kind = Literal["classes", "depth", "normals", "edges", "saliency"]


@dataclass(frozen=True)
class Task:
    """One output of the network, and its target.

    A target of kind "classes" is int64 [H, W]; the others are float32 [channels, H, W]: depth in
    the data set's unit, unit normals, edges and saliency as 0 or 1.
    """

    kind: Kind
    channels: int
    weight: float = 1.0
    """The loss weight in the tables with weights tuned by hand."""
    edge_weight: float | None = None
    """The weight of the pixels on edges; the others have 1 minus this weight."""


@dataclass(frozen=True)
class Measure:
    """One metric of a table."""

    task: str
    name: str
    heading: str
    digits: int
    lower: bool
    """Whether lower is better."""
    counts: bool
    """Whether the metric counts in Delta_m."""

    @property
    def title(self) -> str:
        """The heading of the metric's column, with a star if it counts in Delta_m."""
        name, arrow = self.heading[:-1], self.heading[-1]
        return f"{name}{'*' if self.counts else ''}{arrow}"


ANGLES = [
    Measure("normals", "mean", "mean↓", 2, lower=True, counts=True),
    Measure("normals", "median", "median↓", 2, lower=True, counts=False),
    Measure("normals", "<11.25", "<11.25↑", 2, lower=False, counts=False),
    Measure("normals", "<22.5", "<22.5↑", 2, lower=False, counts=False),
    Measure("normals", "<30", "<30↑", 2, lower=False, counts=False),
]

TASKS: dict[str, dict[str, Task]] = {
    # The order of the tasks in Phase 1 is that of the paper's main results.
    "nyud": {
        "semseg": Task("classes", 40),
        "depth": Task("depth", 1),
        "edge": Task("edges", 1, weight=50.0, edge_weight=0.95),
        "normals": Task("normals", 3, weight=10.0),
    },
    "pascal": {
        "semseg": Task("classes", 21),
        "human_parts": Task("classes", 7, weight=2.0),
        "sal": Task("saliency", 1, weight=5.0),
        "normals": Task("normals", 3, weight=10.0),
        "edge": Task("edges", 1, weight=50.0, edge_weight=0.95),
    },
    "cityscapes": {
        "semseg": Task("classes", 7),
        "depth": Task("depth", 1),
    },
}

MEASURES: dict[str, list[Measure]] = {
    "nyud": [
        Measure("depth", "rmse", "rmse↓", 3, lower=True, counts=True),
        Measure("depth", "abs_rel", "abs rel↓", 3, lower=True, counts=False),
        Measure("semseg", "mIoU", "mIoU↑", 2, lower=False, counts=True),
        Measure("semseg", "PAcc", "PAcc↑", 2, lower=False, counts=False),
        Measure("semseg", "mAcc", "mAcc↑", 2, lower=False, counts=False),
        *ANGLES,
    ],
    "pascal": [
        Measure("semseg", "mIoU", "mIoU↑", 2, lower=False, counts=True),
        Measure("semseg", "PAcc", "PAcc↑", 2, lower=False, counts=False),
        Measure("human_parts", "mIoU", "parts mIoU↑", 2, lower=False, counts=True),
        Measure("sal", "mIoU", "saliency mIoU↑", 2, lower=False, counts=True),
        Measure("sal", "maxF", "maxF↑", 2, lower=False, counts=False),
        *ANGLES,
    ],
    "cityscapes": [
        Measure("semseg", "mIoU", "mIoU↑", 2, lower=False, counts=True),
        Measure("semseg", "PAcc", "PAcc↑", 2, lower=False, counts=True),
        Measure("depth", "abs_err", "abs err↓", 4, lower=True, counts=True),
        Measure("depth", "abs_rel", "rel err↓", 2, lower=True, counts=True),
    ],
}
"""The columns of the paper's tables, in their order. Edges have a loss and no metric."""
