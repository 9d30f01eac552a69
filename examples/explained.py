"""Draws connection strength and its use in Phase 2: results/method.svg.

python examples/explained.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc

TASKS = style.tasks(["disparity", "normals", "edges"])
STRENGTHS = np.array(
    [
        [0.28, 0.05, 0.08, 0.24, 0.06, 0.10, 0.12, 0.07],
        [0.06, 0.22, 0.07, 0.09, 0.26, 0.05, 0.06, 0.19],
        [0.10, 0.08, 0.26, 0.05, 0.09, 0.12, 0.24, 0.06],
    ]
)
"""Each task's strengths in all channels, normalized to a sum of 1."""
TOP = STRENGTHS.argmax(0)

REFERENCE = 2.6 * np.array([np.cos(np.radians(8)), np.sin(np.radians(8))])
OTHER = 2.1 * np.array([np.cos(np.radians(136)), np.sin(np.radians(136))])
PROJECTED = OTHER - (OTHER @ REFERENCE) / (REFERENCE @ REFERENCE) * REFERENCE
ORIGIN = np.zeros(2)


def strengths(ax: Axes) -> None:
    """Draws a bar for each task in each channel."""
    for i, (task, color) in enumerate(TASKS.items()):
        places = np.arange(STRENGTHS.shape[1]) + 0.27 * (i - 1)
        ax.bar(places, STRENGTHS[i], 0.24, color=color, label=task)
    ax.set(ylabel="normalized\nstrength", yticks=[0, 0.1, 0.2])
    ax.tick_params("x", length=0, labelbottom=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1.02, 0.93), ncols=3, handlelength=1)
    ax.set_title("1. Each task's batch normalization shows what it uses", loc="left", pad=26)


def groups(ax: Axes) -> None:
    """Draws channels in the colors of their top-priority tasks, then sorted into groups."""
    colors = list(TASKS.values())
    order = np.argsort(TOP, kind="stable")
    places = dict(zip(order, np.arange(len(TOP)) + 0.35 * (TOP[order] - 1), strict=True))
    for p, i in enumerate(TOP):
        bend = np.linspace(0, 1, 30)
        ease = bend * bend * (3 - 2 * bend)
        ax.plot(p + (places[p] - p) * ease, 1 - bend, color=colors[i], linewidth=1.2, alpha=0.7)
        for x, y in ((p, 1), (places[p], 0)):
            ax.plot(x, y, "s", color=colors[i], markersize=17)
            ax.text(x, y - 0.02, f"{1 + p}", color="white", ha="center", va="center")
    for i, (task, color) in enumerate(TASKS.items()):
        middle = np.mean([places[p] for p in np.flatnonzero(i == TOP)])
        ax.text(middle, -0.38, f"group of {task}", color=color, ha="center", va="top")
    ax.set(ylim=(-0.75, 1.3), xlim=(-0.9, len(TOP) - 0.1))
    ax.set_yticks([0, 1], ["groups", "channels"])
    ax.tick_params(length=0, labelbottom=False)
    ax.spines[:].set_visible(False)
    ax.set_title("2. Each channel goes to the task that uses it most", loc="left")


def arrow(ax: Axes, start: np.ndarray, end: np.ndarray, color: str, **look: Any) -> None:
    """Draws a vector from one point to another."""
    look = {"arrowstyle": "-|>", "mutation_scale": 15, "linewidth": 2.2} | look
    ax.annotate("", end, start, arrowprops={"shrinkA": 0, "shrinkB": 0, "color": color, **look})


def right_angle(ax: Axes, corner: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Draws the mark of a right angle between the directions a and b."""
    a, b = (0.2 * v / np.linalg.norm(v) for v in (a, b))
    ax.plot(
        *np.transpose([corner + a, corner + a + b, corner + b]), color=style.GREY, linewidth=1.2
    )


def projection(ax: Axes) -> None:
    """Draws how the other task's gradient loses its component along the reference gradient."""
    _, normals, edges = TASKS.values()
    arrow(ax, ORIGIN, REFERENCE, normals)
    arrow(ax, ORIGIN, OTHER, edges, linewidth=1.4, alpha=0.75)
    arrow(ax, ORIGIN, PROJECTED, edges)
    ax.plot(*np.transpose([OTHER, PROJECTED]), "--", color=style.GREY, linewidth=1.4)
    right_angle(ax, ORIGIN, REFERENCE, PROJECTED)
    ax.add_patch(Arc((0, 0), 1.3, 1.3, theta1=8, theta2=136, color=style.GREY, linewidth=1))
    ax.text(0.55, 0.5, "> 90°", va="center")
    ax.text(1.3, -0.1, "$G$ of normals,\nthe reference", color=normals, ha="center", va="top")
    ax.text(-1.0, 0.55, "$g$ of edges,\nin conflict", color=edges, ha="right", va="center")
    ax.text(0.0, 1.4, "$g'$, projected", color=edges, va="center")
    ax.text(*(OTHER + PROJECTED) / 2 + [-0.05, 0.15], "removed", ha="center")
    ax.set(xlim=(-2.6, 2.7), ylim=(-0.85, 2.2))


def sums(ax: Axes) -> None:
    """Draws the sum of both gradients before and after the projection."""
    _, normals, edges = TASKS.values()
    arrow(ax, ORIGIN, REFERENCE, normals)
    arrow(ax, REFERENCE, REFERENCE + OTHER, edges, linewidth=1.4, alpha=0.75)
    arrow(ax, REFERENCE, REFERENCE + PROJECTED, edges)
    arrow(ax, ORIGIN, REFERENCE + OTHER, style.METHODS["Sum"])
    arrow(ax, ORIGIN, REFERENCE + PROJECTED, style.METHODS["ConnectionStrength"])
    right_angle(ax, REFERENCE, -REFERENCE, PROJECTED)
    ax.text(0.55, 1.25, "$G + g$", color=style.METHODS["Sum"], ha="right", va="bottom")
    ax.text(1.0, 0.62, "$G + g'$", color=style.METHODS["ConnectionStrength"], va="top")
    ax.text(1.3, -0.1, "$G$", color=normals, ha="center", va="top")
    ax.text(2.05, 1.05, "$g$", color=edges, ha="right", va="bottom")
    ax.text(2.55, 1.2, "$g'$", color=edges, va="center")
    ax.text(1.3, -0.45, "the sum before and after", ha="center", va="top")
    ax.set(xlim=(-0.2, 3.0), ylim=(-0.85, 2.2))


def draw() -> Figure:
    """Draws all panels."""
    figure = style.plt.figure(figsize=(style.WIDTH, 6.2))
    above, below = figure.subfigures(2, 1, height_ratios=(3.6, 2.4))
    first, second = above.subplots(2, 1, sharex=True)
    strengths(first)
    groups(second)
    panels = below.subplots(1, 2, width_ratios=(5.3, 3.2))
    for ax, draw_in in zip(panels, (projection, sums), strict=True):
        draw_in(ax)
        ax.set_aspect("equal")
        ax.axis("off")
    title = "3. In its group, the others' conflicting gradients are projected"
    below.suptitle(title, x=0.126, ha="left", fontsize="medium")
    return figure


if __name__ == "__main__":
    style.save(Path(__file__).parent / "results" / "method.svg", draw)
