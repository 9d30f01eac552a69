"""The look of every picture, with one color for each library, method and task.

`save(path, draw)` writes NAME.svg for light pages and NAME-dark.svg for dark ones. Pictures are 6.4
inches wide with letters of 11 points, so that they can be read at half of their width.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

WIDTH = 6.4
"""The width of pictures in inches."""

# Each has a contrast of at least 3 with white and with the dark pages' background.
BLUE, ORANGE, GREEN, RED, PURPLE = "#2f7ed8", "#d9701f", "#2e9e5b", "#d6453d", "#9061d6"
TEAL, PINK, BROWN, OLIVE, GREY = "#1497a3", "#d6569a", "#a8763e", "#8a8f1f", "#7f8790"

LIBRARIES = {
    "cs_kernels": BLUE,
    "TorchJD": ORANGE,
    "LibMTL": GREEN,
    "textbook": RED,
    "limit": GREY,
}
METHODS = {
    "ConnectionStrength": BLUE,
    "Sum": GREY,
    "GD": GREY,
    "Singletask": "#6f8fb0",
    "PCGrad": ORANGE,
    "CAGrad": GREEN,
    "MGDA": RED,
    "AlignedMTL": PURPLE,
    "NashMTL": TEAL,
    "IMTLG": PINK,
    "UPGrad": BROWN,
    "FairGrad": OLIVE,
    "ConFIG": "#5b6ee1",
    "GradVac": "#c08a00",
    "NTKMTL": "#4f9d8f",
    "DBMTL": "#b0567a",
    "GradDrop": "#7a9440",
    "Protect": BLUE,
    "SAGO": RED,
}
TASKS = (TEAL, ORANGE, PURPLE, OLIVE, PINK)
"""Colors of the tasks, in their order."""

MODES = {"": ("#1f2328", "#d0d7de"), "-dark": ("#dfe2e7", "#4a505b")}
"""Colors of letters and of grid lines, by file name suffix."""


def tasks(names: Iterable[str]) -> dict[str, str]:
    """The color of each task."""
    return {name: TASKS[i % len(TASKS)] for i, name in enumerate(names)}


def method(name: str) -> str:
    """The color of a row by its method; other rows are phases of connection strength."""
    return METHODS.get(name.partition("+")[0].partition(",")[0].replace("-", ""), BLUE)


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure of the standard width, and its axes [rows, columns]."""
    return plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)


def log(ax: Axes, axis: str, subs: Iterable[float] = (1, 2, 5)) -> None:
    """Makes an axis logarithmic, with plain numbers at these multiples of powers of ten."""
    ax.set(**{f"{axis}scale": "log"})
    of_axis = getattr(ax, f"{axis}axis")
    of_axis.set_major_locator(LogLocator(subs=tuple(subs)))
    of_axis.set_major_formatter("{x:g}")
    of_axis.set_minor_formatter(NullFormatter())


def label_lines(ax: Axes, x: float, lines: Mapping[str, tuple[float, str]]) -> None:
    """Labels lines at their right ends (x, y), on a log axis; `lines` maps labels to (y, color)."""
    bottom, top = (math.log(limit) for limit in ax.get_ylim())
    gap, below = 0.055 * (top - bottom), -math.inf
    for label, (y, color) in sorted(lines.items(), key=lambda line: line[1]):
        below = max(math.log(y), below + gap)
        where = (x * 1.15, math.exp(below))
        ax.annotate(label, where, color=color, va="center", fontsize=10, annotation_clip=False)
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * 4.5)


def legend_below(figure: Figure, ax: Axes, columns: int, **options: Any) -> None:
    """Draws one panel's legend below all panels."""
    shown = ax.get_legend_handles_labels()
    figure.legend(*shown, loc="outside lower center", ncols=columns, **options)


def save(path: Path, draw: Callable[[], Figure]) -> None:
    """Writes the figure that `draw` returns, for light pages to `path`, for dark ones beside it."""
    for ending, (letters, lines) in MODES.items():
        look = {
            "font.size": 11,
            "axes.titlesize": 11,
            "figure.titlesize": 12,
            "axes.labelsize": 11,
            "legend.fontsize": 10,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "axes.prop_cycle": mpl.cycler(color=[BLUE, RED, GREEN, BROWN, PURPLE, GREY]),
            "axes.axisbelow": True,
            "grid.color": lines,
            "grid.linewidth": 0.7,
            "lines.linewidth": 1.8,
            "path.simplify_threshold": 0.3,
            "figure.constrained_layout.use": True,
            "svg.hashsalt": "cs_kernels",
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), letters),
            **dict.fromkeys(("xtick.color", "ytick.color"), letters),
            "axes.edgecolor": letters,
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
        }
        with mpl.rc_context(look):
            figure = draw()
            target = path.with_name(f"{path.stem}{ending}{path.suffix}")
            figure.savefig(target, metadata={"Date": None})
            # Hundredths of a point are enough. Numbers below 1, such as scales, are kept.
            text = re.sub(r"([1-9]\d*\.\d\d)\d+", r"\1", target.read_text())
            target.write_text(text)
            plt.close(figure)
