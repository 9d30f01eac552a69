"""Draws the paths of all methods on a problem with two parameters and two losses.

    python examples/toy.py [--out FILE]

The problem comes from CAGrad (Liu et al., 2021, appendix), in the variant of Nash-MTL (Navon et
al., 2022) with a tenth of the first loss. Each loss has a narrow valley in the upper half, where
one gradient is many times as long as the other, and a bowl in the lower half, which contains the
Pareto front. From five points, Adam makes 100,000 steps at a rate of 0.001.

DB-MTL needs positive losses and connection strength needs channels, so they are not drawn.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import style
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import cs_kernels as cs

Array = np.ndarray

STARTS = np.array([[-8.5, 7.5], [0.0, 0.0], [9.0, 9.0], [-7.5, -0.5], [9.0, -1.0]])
FIRST = 0.1
"""The factor of the first loss."""
RATE = 0.001
STEPS = 100_000
KEPT = 200
"""The number of steps between two points of a path in the picture."""
REACHED = 0.5
"""A path has reached the front if no front point is better by more in both losses, of which the
first counts without its factor FIRST."""

_LEAST = 5e-6

METHODS: dict[str, Callable[[], cs.Method]] = {
    "Sum": cs.Sum,
    "PCGrad": cs.PCGrad,
    "GradVac": cs.GradVac,
    "UPGrad": cs.UPGrad,
    "GradDrop": cs.GradDrop,
    "MGDA": cs.MGDA,
    "CAGrad": lambda: cs.CAGrad(c=0.5),
    "AlignedMTL": cs.AlignedMTL,
    "IMTLG": cs.IMTLG,
    "ConFIG": cs.ConFIG,
    "NTKMTL": cs.NTKMTL,
    "NashMTL": cs.NashMTL,
    "FairGrad": cs.FairGrad,
}


def losses_and_gradients(points: Array) -> tuple[Array, Array]:
    """Both losses of points [..., 2], and their gradients: [..., 2] and [..., 2 losses, 2]."""
    x, y = points[..., 0], points[..., 1]
    half, whole = np.tanh(0.5 * y), np.tanh(y)
    slope = 0.5 * (1 - half**2)
    upper, lower = np.maximum(half, 0), np.maximum(-half, 0)
    d_upper, d_lower = np.where(y > 0, slope, 0), np.where(y > 0, 0, -slope)
    losses, gradients = np.empty_like(points), np.empty((*points.shape, 2))
    valleys = 0.5 * (-x - 7) + whole, 0.5 * (-x + 3) + whole + 2
    for i, (of_valley, center, factor) in enumerate(zip(valleys, (7, -7), (FIRST, 1), strict=True)):
        height = np.maximum(np.abs(of_valley), _LEAST)
        valley = np.log(height) + 6
        d_valley = np.where(np.abs(of_valley) > _LEAST, np.sign(of_valley) / height, 0)
        bowl = ((-x + center) ** 2 + 0.1 * (-y - 8) ** 2) / 10 - 20
        losses[..., i] = factor * (valley * upper + bowl * lower)
        dx = -0.5 * d_valley * upper - 0.2 * (-x + center) * lower
        dy = (1 - whole**2) * d_valley * upper + valley * d_upper
        dy += -0.02 * (-y - 8) * lower + bowl * d_lower
        gradients[..., i, 0], gradients[..., i, 1] = factor * dx, factor * dy
    return losses, gradients


def pareto_front() -> Array:
    """Points of the front [P, 2]: for every x between the bowls, the y of a Pareto optimum."""
    x, y = np.linspace(-7, 7, 281), np.linspace(-9, -7, 2001)
    losses = losses_and_gradients(np.stack(np.meshgrid(x, y, indexing="ij"), -1))[0]
    # The slopes of the bowls along x cancel in this weighted sum, so its minimum is on the front.
    weights = np.stack([(7 + x) / FIRST, 7 - x], -1)[:, None]
    return np.stack([x, y[(losses * weights).sum(-1).argmin(1)]], 1)


def have_reached(points: Array) -> Array:
    """Whether each point is on the front or near it, [P]."""
    front = losses_and_gradients(pareto_front())[0]
    losses = losses_and_gradients(points)[0]
    better: Array = ((losses[:, None] - front[None]) / [FIRST, 1]).min(-1)  # In both losses.
    return better.max(1) <= REACHED


@dataclass(frozen=True)
class Paths:
    """The paths of one method."""

    name: str
    points: Array
    """[times, starting points, 2]."""

    @property
    def reached(self) -> Array:
        """Whether the path from each starting point has reached the front, [P]."""
        return have_reached(self.points[-1])


def _weights(method: cs.Method, step: cs.Step, gramians: Array) -> Array | float:
    """The task weights of every point, [P, 2]; each point has its own Gramian."""
    if not isinstance(method, cs.GramianMethod):
        return 1.0  # The plain sum.
    return method.weights(torch.from_numpy(gramians), step).numpy()


def _drop_signs(method: cs.GradDrop, step: cs.Step, gradients: Array) -> Array:
    """GradDrop's update of every point, [P, 2], which is not a weighted sum."""
    rows = [torch.from_numpy(np.ascontiguousarray(gradients[:, i])) for i in range(2)]
    update = torch.empty_like(rows[0])
    torch.ops.cs_kernels.drop_signs_([update], rows, [0.0, 0.0], method.seed, step.number, 2)
    return update.numpy()


def follow(names: Sequence[str], steps: int = STEPS) -> list[Paths]:
    """Runs Adam for all methods and starting points at once; returns the paths."""
    torch.set_num_threads(1)
    methods = [METHODS[name]() for name in names]
    points = np.stack([STARTS] * len(names))
    mean, square, weights = np.zeros_like(points), np.zeros_like(points), np.zeros_like(points)
    kept = [points.copy()]
    for number in range(steps):
        step = cs.Step(number, ("first", "second"))
        gradients = losses_and_gradients(points)[1]
        gramians = gradients @ gradients.swapaxes(2, 3)
        for i, method in enumerate(methods):
            weights[i] = _weights(method, step, gramians[i])
        update = (weights[..., None, :] @ gradients)[..., 0, :]
        for i, method in enumerate(methods):
            if isinstance(method, cs.GradDrop):
                update[i] = _drop_signs(method, step, gradients[i])
        mean += 0.1 * (update - mean)
        square += 0.001 * (update * update - square)
        rate = RATE / (1 - 0.9 ** (number + 1))
        points -= rate * mean / (np.sqrt(square / (1 - 0.999 ** (number + 1))) + 1e-8)
        if (number + 1) % KEPT == 0:
            kept.append(points.copy())
    paths = np.stack(kept, 1)
    return [Paths(name, of_method) for name, of_method in zip(names, paths, strict=True)]


def draw(paths: list[Paths], file: Path) -> None:
    """Draws a panel per method: contours of the mean loss, the front, the paths."""
    x, y = np.linspace(-10, 10, 160), np.linspace(-10, 10, 160)
    grid = np.stack(np.meshgrid(x, y), -1)
    mean = losses_and_gradients(grid)[0].mean(-1)
    front = pareto_front()
    columns = 4
    rows = -(-(len(paths) + 1) // columns)
    ends = {True: ("*", style.GREEN, 11), False: ("X", style.RED, 8)}

    def look(reached: bool) -> dict[str, Any]:
        marker, color, size = ends[reached]
        return {"marker": marker, "color": color, "markersize": size, "markeredgewidth": 0}

    def sheet() -> Figure:
        figure, axes = style.panels(rows, columns, 0.4 + 1.95 * rows)
        for ax in axes.flat[len(paths) :]:
            ax.axis("off")
        contours = axes[0, 0].contour(x, y, mean, levels=6)
        contours.remove()  # A single simplified line makes a smaller file.
        pieces = [piece for of_level in contours.allsegs for piece in of_level]
        lines = np.concatenate([[*piece, [np.nan, np.nan]] for piece in pieces])
        for ax, of_method in zip(axes.flat, paths, strict=False):
            ax.plot(*lines.T, color=style.GREY, linewidth=0.6)
            ax.plot(*front.T, color=style.GREY, linewidth=5, alpha=0.6)
            for start, reached in enumerate(of_method.reached):
                path = of_method.points[:, start]
                ax.plot(*path.T, color=style.BLUE, linewidth=1.3)
                ax.plot(*path[0], "o", color=style.BLUE, markersize=4)
                ax.plot(*path[-1], **look(reached))
            ax.set(title=of_method.name, xlabel=f"{of_method.reached.sum()} of {len(STARTS)}")
            ax.set(xlim=(-10, 10), ylim=(-10, 10), xticks=[], yticks=[], aspect="equal")
        shown = {
            "path from its start": Line2D([], [], color=style.BLUE, marker="o", markersize=4),
            "reaches the front": Line2D([], [], linestyle="", **look(True)),
            "does not": Line2D([], [], linestyle="", **look(False)),
            "Pareto front": Line2D([], [], color=style.GREY, linewidth=5, alpha=0.6),
            "contours of the mean loss": Line2D([], [], color=style.GREY, linewidth=0.6),
        }
        beside = len(paths) % columns  # The last row has room for the legend.
        place = {"loc": "center left", "bbox_to_anchor": (0.15, 0.5)}
        axes[-1, beside].legend(shown.values(), shown, **place).set_in_layout(False)
        figure.get_layout_engine().set(h_pad=0.06)
        figure.suptitle("Two parameters: paths by Adam; how many of them reach the front")
        return figure

    style.save(file, sheet)


def main() -> None:
    """Follows all methods, distributed over processes, and draws the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "toy.svg")
    options = parser.parse_args()
    start = time.perf_counter()
    names, processes = list(METHODS), os.cpu_count() or 1
    with ProcessPoolExecutor(processes) as pool:
        parts = pool.map(follow, [names[i::processes] for i in range(processes)])
    found = {path.name: path for part in parts for path in part}
    paths = [found[name] for name in names]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(paths, options.out)
    for of_method in paths:
        ends = "  ".join(f"({x:5.2f}, {y:5.2f})" for x, y in of_method.points[-1])
        print(f"{of_method.name:18} {of_method.reached.sum()} of {len(STARTS)}  {ends}")
    print(f"written to {options.out} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
