"""The runs of each of the paper's tables: networks, methods, weightings, orders and settings."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import cs_kernels as cs
from paper.tasks import MEASURES, TASKS, Measure

PUBLISHED: dict[str, dict[str, list[float]]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)
"""The paper's numbers by table, then by row: MEASURES, Delta_m, for Cityscapes also MiB."""


@dataclass(frozen=True)
class Settings:
    """Everything that is the same in all rows of a table."""

    epochs: int
    batch: int = 8
    """Pictures in a step, over all ranks."""
    ranks: int = 1
    """Processes that train one network together."""
    rate: float = 1e-4
    decay: Literal["poly", "halved"] = "poly"
    """The rate's factor (1 - e/E)^0.9, or a rate that is halved in the middle of training."""
    weight_decay: float = 1e-4
    size: tuple[int, int] | None = None
    """The size to which pictures are resized; None for the published size."""
    width: float = 1.0
    """A factor on the network's channels; see `make_network`."""
    pretrained: bool = True
    amp: Literal["bfloat16", "float16"] | None = None
    compile: bool = False
    workers: int = 4
    evaluate_every: int = 10
    """Epochs between evaluations; the last epoch is always evaluated."""


REAL = {
    "nyud/hrnet18": Settings(epochs=200),
    # The paper does not describe MTI-Net on a ResNet. With a pyramid of 256 channels, which its
    # authors use for ResNet-50, a step takes 27 times as many operations as with HRNet-18.
    "nyud/resnet18": Settings(epochs=200, width=1 / 4),
    "pascal/hrnet18": Settings(epochs=50),
    "cityscapes/segnet": Settings(
        epochs=200, rate=5e-5, decay="halved", weight_decay=0.0, pretrained=False
    ),
}
"""The published settings (appendix D of the paper), by data set and network."""

_SMALL = Settings(
    epochs=8, batch=4, rate=1e-3, size=(64, 64), pretrained=False, workers=0, evaluate_every=100
)
SMALL = {
    "nyud/hrnet18": _SMALL,
    # The pyramid has a sixteenth of its channels; the backbone has full width.
    "nyud/resnet18": replace(_SMALL, epochs=3, width=1 / 16),
    "pascal/hrnet18": replace(_SMALL, epochs=3),
    "cityscapes/segnet": replace(
        _SMALL, epochs=16, decay="halved", weight_decay=0.0, size=(64, 128), width=0.25
    ),
}
"""Settings for a few minutes on two cores."""
SMALL_PICTURES = {"train": 12, "val": 12}


@dataclass(frozen=True)
class Row:
    """How one row of a table is trained."""

    method: type[cs.Method] | None = cs.Sum
    schedule: Literal["joint", "phase 1", "switch", "mixed"] = "joint"
    options: Mapping[str, object] = field(default_factory=dict)
    network: str | None = None
    """The network, if it is not the table's."""
    recon: bool = False
    """Whether layers with many conflicts in the run of row GD become task-specific."""


_CONNECTION = {
    "Phase 1": Row(cs.ConnectionStrength, "phase 1"),
    "Phase 2": Row(cs.ConnectionStrength, "joint"),
    "Phase 1, then 2": Row(cs.ConnectionStrength, "switch"),
    "Mixed": Row(cs.ConnectionStrength, "mixed"),
}
_GRADIENTS = {
    "GD": Row(cs.Sum),
    "MGDA": Row(cs.MGDA),
    "PCGrad": Row(cs.PCGrad),
    "CAGrad": Row(cs.CAGrad),
    "Aligned-MTL": Row(cs.AlignedMTL),
}
_CITYSCAPES = {
    # Recon counts the conflicts between the gradients of plain gradient descent.
    "GD": Row(cs.Sum, options={"separate": True}),
    "MGDA": Row(cs.MGDA),
    "GradDrop": Row(cs.GradDrop),
    "PCGrad": Row(cs.PCGrad),
    "CAGrad": Row(cs.CAGrad, options={"c": 0.2}),
}
ROWS: dict[str, dict[str, Row]] = {
    "dense": {**_GRADIENTS, **_CONNECTION},
    "cityscapes": {
        "Cross-Stitch": Row(network="cross-stitch"),
        "RotoGrad": Row(None, network="rotograd"),
        **_CITYSCAPES,
        **{f"{name} + Recon": replace(row, recon=True) for name, row in _CITYSCAPES.items()},
        "Mixed": Row(cs.ConnectionStrength, "mixed"),
    },
}
"""Rows by name; "Mixed" is "Ours" in the paper's tables."""

SINGLE = "Single-task"
WEIGHTINGS = ("tuned", "equal", "dwa", "uncertainty")
LETTERS = {"S": "semseg", "D": "depth", "E": "edge", "N": "normals"}


@dataclass(frozen=True)
class Run:
    """The training of one network."""

    data: str
    network: str
    row: str
    tasks: tuple[str, ...]
    """In the order of Phase 1."""
    weighting: str
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """The run's folder, relative to the folder of all runs."""
        parts = [self.data, self.network, self.weighting, self.row]
        if self.row == SINGLE:
            parts[2:] = [self.row, *self.tasks]
        elif self.tasks != tuple(TASKS[self.data]):
            parts.append(" ".join(self.tasks))
        return "/".join(part.replace(" ", "_") for part in [*parts, f"seed{self.seed}"])

    @property
    def how(self) -> Row:
        """The method, schedule and network of this run."""
        if self.row == SINGLE:
            return Row()
        return ROWS["cityscapes" if self.data == "cityscapes" else "dense"][self.row]

    @property
    def task_norm(self) -> bool:
        """Whether batch normalization is task-specific.

        On NYUD-v2 and PASCAL-Context, it is in all multi-task rows, since the paper compares
        methods on the same network.
        """
        if self.row == SINGLE:
            return False
        return self.data != "cityscapes" or self.how.method is cs.ConnectionStrength

    def needs(self) -> "Run | None":
        """The run whose counts of conflicts this one needs, or None."""
        return replace(self, row="GD") if self.how.recon else None

    def to_json(self) -> str:
        """The run as JSON, for `run.json`."""
        return json.dumps(asdict(self), indent=1)

    def differences(self, other: "Run") -> str:
        """The fields in which another run differs, except those that do not change its results."""
        pairs = [(self, other), (self.settings, other.settings)]
        return ", ".join(
            f"{name} {getattr(a, name)!r} and {getattr(b, name)!r}"
            for a, b in pairs
            for name in vars(a)
            if name not in ("settings", "workers") and getattr(a, name) != getattr(b, name)
        )

    @staticmethod
    def from_json(text: str) -> "Run":
        """The inverse of `to_json`."""
        return Run.from_dict(json.loads(text))

    @staticmethod
    def from_dict(read: dict[str, Any]) -> "Run":
        """The inverse of `dataclasses.asdict`."""
        settings = {**read["settings"]}
        if settings["size"] is not None:
            settings["size"] = tuple(settings["size"])
        return Run(**{**read, "tasks": tuple(read["tasks"]), "settings": Settings(**settings)})


@dataclass(frozen=True)
class Part:
    """One table: its rows, their runs, and the key of the paper's numbers in `PUBLISHED`."""

    title: str
    data: str
    published: str
    rows: dict[str, list[Run]]
    """Runs by row, one per seed; for single tasks, one per task and seed."""
    measures: list[Measure]
    extra: Literal["parameters", "loss"] | None = None
    """A last column: parameters in MiB of float32, or the mean of the tasks' training losses."""

    def runs(self) -> list[Run]:
        """All runs of the table."""
        return [run for runs in self.rows.values() for run in runs]


_NAMES = {
    "nyud": "NYUD-v2",
    "pascal": "PASCAL-Context",
    "cityscapes": "Cityscapes",
    "hrnet18": "HRNet-18",
    "resnet18": "ResNet-18",
    "segnet": "SegNet",
    "tuned": "weights tuned by hand",
    "equal": "equal weights",
    "dwa": "dynamic weight average",
    "uncertainty": "homoscedastic uncertainty",
}


def settings_for(data: str, network: str, *, small: bool) -> Settings:
    """The settings of a table's runs."""
    return (SMALL if small else REAL)[f"{data}/{network}"]


def _part(
    data: str,
    network: str,
    weighting: str,
    rows: Mapping[str, tuple[str, tuple[str, ...]]],
    seeds: list[int],
    settings: Settings,
    published: str | None = None,
) -> Part:
    """Makes a table; `rows` maps each name in it to the row and the order of its tasks."""
    measured = {measure.task for measure in MEASURES[data]}
    single = [task for task in TASKS[data] if task in measured]
    runs = {
        SINGLE: [
            Run(data, network, SINGLE, (task,), "equal", seed, settings)
            for seed in seeds
            for task in single
        ]
    }
    for name, (row, tasks) in rows.items():
        # RotoGrad computes its own gradients, in one process without mixed precision.
        alone = replace(settings, ranks=1, amp=None) if row == "RotoGrad" else settings
        runs[name] = [Run(data, network, row, tasks, weighting, seed, alone) for seed in seeds]
    title = f"{_NAMES[data]}, {_NAMES[network]}, {_NAMES[weighting]}"
    key = published or f"{data}/{network}/{weighting}"
    return Part(title, data, key, runs, MEASURES[data])


def _main(data: str, network: str, weighting: str, seeds: list[int], settings: Settings) -> Part:
    """A table of plain gradient descent, the published methods and ours."""
    tasks = tuple(TASKS[data])
    rows = {name: (name, tasks) for name in _GRADIENTS}
    rows["Ours"] = ("Mixed", tasks)
    return _part(data, network, weighting, rows, seeds, settings)


def table(name: str, seeds: list[int], *, small: bool, changes: Mapping[str, object]) -> list[Part]:
    """The parts of `make paper TABLE=name`; `changes` replace settings."""

    def settings(data: str, network: str) -> Settings:
        return replace(settings_for(data, network, small=small), **changes)

    if name in ("nyud", "pascal"):
        return [_main(name, "hrnet18", "tuned", seeds, settings(name, "hrnet18"))]
    if name == "cityscapes":
        tasks = tuple(TASKS["cityscapes"])
        names = {"Ours" if row == "Mixed" else row for row in ROWS["cityscapes"]}
        order = [name for name in PUBLISHED["cityscapes/segnet/equal"] if name in names]
        rows = {name: ("Mixed" if name == "Ours" else name, tasks) for name in order}
        chosen = settings("cityscapes", "segnet")
        part = _part("cityscapes", "segnet", "equal", rows, seeds, chosen)
        return [replace(part, extra="parameters")]
    if name == "scaling":
        pairs = [("nyud", "hrnet18"), ("nyud", "resnet18"), ("pascal", "hrnet18")]
        return [
            _main(data, network, weighting, seeds, settings(data, network))
            for data, network in pairs
            for weighting in WEIGHTINGS
        ]
    if name == "ablation":
        tasks = tuple(TASKS["nyud"])
        rows = {row: (row, tasks) for row in _CONNECTION}
        chosen = settings("nyud", "hrnet18")
        part = _part("nyud", "hrnet18", "tuned", rows, seeds, chosen, "ablation")
        counted = [measure for measure in part.measures if measure.counts]
        return [replace(part, measures=counted, extra="loss")]
    if name == "order":
        orders = [row for row in PUBLISHED["order"] if row != SINGLE]
        rows = {
            order: ("Mixed", tuple(LETTERS[letter] for letter in order.split("-")))
            for order in orders
        }
        chosen = settings("nyud", "hrnet18")
        return [_part("nyud", "hrnet18", "tuned", rows, seeds, chosen, "order")]
    raise ValueError(f"table must be one of {list(TABLES)}, got {name!r}")


TABLES = ("nyud", "pascal", "cityscapes", "scaling", "ablation", "order", "time")
