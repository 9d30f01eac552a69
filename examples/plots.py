"""Pictures of training runs, for the demo and the paper's experiments."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

DEMO = "One photograph, one seed"


def _epochs(ax: Axes) -> None:
    ax.set_xlabel("epoch")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))


def losses(runs: dict[str, Any], tasks: list[str], path: Path, network: str = DEMO) -> None:
    """Draws each task's training loss over epochs: one row per method, with the others in gray."""

    def draw() -> Figure:
        size = (len(runs), len(tasks))
        figure, axes = style.panels(*size, 1.1 + 0.9 * len(runs), sharex=True, sharey="col")
        for of_row, name in zip(axes, runs, strict=True):
            for ax, task in zip(of_row, tasks, strict=True):
                for other in runs.values():
                    ax.plot(other["losses"][task], color=style.GREY, linewidth=0.8, alpha=0.4)
                ax.plot(runs[name]["losses"][task], color=style.method(name))
                ax.yaxis.set_major_locator(MaxNLocator(3))
            of_row[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for ax, task in zip(axes[0], tasks, strict=True):
            ax.set_title(task)
        for ax in axes[-1]:
            _epochs(ax)
        figure.suptitle(f"{network}: training losses, beside those of the other rows")
        return figure

    style.save(path, draw)


def priority(
    runs: dict[str, Any], tasks: list[str], names: list[str], path: Path, network: str = DEMO
) -> None:
    """Draws the share of channels with each task as top-priority task: by epoch, then by layer.

    `runs[name]["priority"]` has the number of channels of each task, by epoch and layer.
    """
    layers = list(runs[names[0]]["priority"][-1])
    few = len(layers) <= 40

    def draw() -> Figure:
        below = 0.19 * len(layers) if few else 3.0
        ratios = {"height_ratios": (1.5, below)}
        figure, axes = style.panels(2, len(names), 3 + below, sharey="row", gridspec_kw=ratios)
        for (above, under), name in zip(axes.T, names, strict=True):
            history = runs[name]["priority"]
            _stack(above, [np.array(list(epoch.values())).sum(0) for epoch in history], tasks)
            above.set(title=name, ylim=(0, 100))
            _epochs(above)
            left = np.zeros(len(layers))
            shares = _shares(np.array(list(history[-1].values())))
            for (task, color), width in zip(style.tasks(tasks).items(), shares.T, strict=True):
                height = 0.8 if few else 1.0
                under.barh(range(len(layers)), width, height, left=left, color=color, label=task)
                left += width
            under.set(xlabel="% in the last epoch", xlim=(0, 100), ylim=(len(layers) - 0.5, -0.5))
        axes[0, 0].set_ylabel("% of channels")
        if few:
            axes[1, 0].set_yticks(range(len(layers)), layers, fontsize=10)
        else:
            axes[1, 0].set_ylabel("layer")
        figure.suptitle(f"{network}: channels by top-priority task")
        style.legend_below(figure, axes[1, 0], len(tasks))
        return figure

    style.save(path, draw)


def _shares(counts: np.ndarray) -> np.ndarray:
    """Converts counts to percentages of the sum over the last dimension."""
    return 100 * counts / counts.sum(-1, keepdims=True)


def _stack(ax: Axes, counts: list[Any], tasks: list[str]) -> None:
    """Draws the shares of the tasks over the epochs."""
    shares, colors = _shares(np.array(counts)), style.tasks(tasks)
    ax.stackplot(range(len(shares)), shares.T, colors=colors.values(), labels=tasks)
    ax.set(xlim=(0, max(1, len(shares) - 1)), ylim=(0, 100))


def priority_by_layer(
    run: Any, tasks: list[str], path: Path, network: str = DEMO, layers: int = 12
) -> None:
    """Draws shares of channels by top-priority task over epochs, for evenly spaced layers."""
    names = list(run["priority"][-1])
    chosen = [names[i] for i in np.linspace(0, len(names) - 1, layers).astype(int)]

    def draw() -> Figure:
        figure, axes = style.panels(layers // 3, 3, 7, sharex=True, sharey=True)
        for ax, name in zip(axes.flat, chosen, strict=True):
            _stack(ax, [epoch[name] for epoch in run["priority"]], tasks)
            ax.set_title(name if len(name) < 26 else f"…{name[-24:]}", fontsize=9)
        for ax in axes[-1]:
            _epochs(ax)
        figure.supylabel("% of channels", fontsize="medium")
        figure.suptitle(f"{network}: channels by top-priority task")
        style.legend_below(figure, axes[0, 0], len(tasks))
        return figure

    style.save(path, draw)


def final_losses(
    finals: Mapping[str, Mapping[str, list[float]]], tasks: list[str], path: Path, network: str
) -> None:
    """Draws the last epoch's training losses and their mean over seeds: one dot per method."""
    names, columns = list(finals), 3
    means = {name: np.mean([run[t] for t in tasks], axis=0) for name, run in finals.items()}

    def draw() -> Figure:
        rows = -(-(len(tasks) + 1) // columns)
        height = 0.8 + rows * (0.8 + 0.2 * len(names))
        figure, axes = style.panels(rows, columns, height, sharey=True)
        for ax in axes.flat[len(tasks) + 1 :]:
            ax.axis("off")
        for ax, task in zip(axes.flat, [*tasks, "mean of tasks"], strict=False):
            for name in names:
                value = np.array(finals[name][task]) if task in tasks else means[name]
                deviation, color = value.std(ddof=len(value) > 1), style.method(name)
                ax.errorbar(value.mean(), name, xerr=deviation, fmt="o", color=color)
            ax.grid(axis="y")
            ax.xaxis.set_major_locator(MaxNLocator(3))
            ax.set_title(task)
        axes[0, 0].invert_yaxis()
        figure.supxlabel("training loss of the last epoch, ± deviation over seeds", fontsize=11)
        figure.suptitle(network)
        return figure

    style.save(path, draw)


def heat_maps(runs: dict[str, Any], key: str, label: str, path: Path, network: str = DEMO) -> None:
    """Draws heat maps of a share by layer and epoch.

    Epochs without the share, such as those in Phase 1, are empty. If no run has it, nothing is
    drawn.
    """
    chosen = {name: run[key] for name, run in runs.items() if any(run.get(key, []))}
    if not chosen:
        return
    layers = list(next(epoch for epoch in next(iter(chosen.values())) if epoch))

    def draw() -> Figure:
        columns = min(3, len(chosen))
        rows = -(-len(chosen) // columns)
        height = 1.3 + rows * (0.6 + 0.19 * len(layers))
        figure, axes = style.panels(rows, columns, height, sharex=True, sharey=True)
        for ax in axes.flat[len(chosen) :]:
            ax.axis("off")
        for ax, (name, history) in zip(axes.flat, chosen.items(), strict=False):
            shares = [[epoch.get(layer, np.nan) for epoch in history] for layer in layers]
            image = ax.imshow(100 * np.array(shares), vmin=0, vmax=100, aspect="auto")
            ax.set_yticks(range(len(layers)), layers, fontsize=10)
            ax.set_title(name)
            _epochs(ax)
        figure.suptitle(f"{network}: conflicts by layer; epochs in Phase 1 are empty")
        figure.colorbar(image, ax=axes, label=label, location="bottom", aspect=40)
        return figure

    style.save(path, draw)


def cosines(runs: dict[str, Any], path: Path, network: str = DEMO) -> None:
    """Draws cosines between tasks' gradients over epochs, for runs with a Gramian method."""
    chosen = {name: run["cosines"] for name, run in runs.items() if any(run.get("cosines", []))}
    if not chosen:
        return

    def draw() -> Figure:
        columns = min(3, len(chosen))
        rows = -(-len(chosen) // columns)
        figure, axes = style.panels(rows, columns, 1.1 + 2 * rows, sharex=True, sharey=True)
        for ax in axes.flat[len(chosen) :]:
            ax.axis("off")
        for ax, (name, history) in zip(axes.flat, chosen.items(), strict=False):
            for pair in next(epoch for epoch in history if epoch):
                ax.plot([epoch.get(pair, np.nan) for epoch in history], label=pair)
            ax.axhline(0, color=style.GREY, linewidth=0.8)
            ax.set(title=name, ylim=(-1, 1))
            _epochs(ax)
        for ax in axes[:, 0]:
            ax.set_ylabel("cosine")
        figure.suptitle(f"{network}: cosines between the tasks' gradients")
        style.legend_below(figure, axes[0, 0], 3)
        return figure

    style.save(path, draw)


def loss_correlation(losses: dict[str, list[float]]) -> np.ndarray:
    """Pearson correlations between tasks of the losses' changes from epoch to epoch."""
    return np.corrcoef(np.diff(np.array(list(losses.values())), axis=1))


def correlation(
    runs: dict[str, Any], tasks: list[str], names: list[str], path: Path, network: str = DEMO
) -> None:
    """Draws how much two tasks' losses fall together: one row per pair, one dot per run."""
    pairs = list(combinations(range(len(tasks)), 2))

    def draw() -> Figure:
        figure, [[ax]] = style.panels(1, 1, 1.6 + 0.3 * len(pairs))
        for name, filled in zip(names, (False, True), strict=False):
            matrix, color = loss_correlation(runs[name]["losses"]), style.method(name)
            fill = color if filled else "none"
            values = [matrix[pair] for pair in pairs]
            look = {"color": color, "markerfacecolor": fill, "clip_on": False}
            ax.plot(values, range(len(pairs)), "o", label=name, **look)
        ax.axvline(0, color=style.GREY, linewidth=0.8)
        ax.grid(axis="y")
        ax.set_yticks(range(len(pairs)), [f"{tasks[i]}, {tasks[j]}" for i, j in pairs])
        ax.set(xlim=(-1, 1), xticks=[-1, -0.5, 0, 0.5, 1], ylim=(len(pairs) - 0.5, -0.5))
        ax.set_xlabel("correlation of the losses' changes from epoch to epoch")
        figure.suptitle(f"{network}: correlation of two tasks' losses")
        style.legend_below(figure, ax, 2)
        return figure

    style.save(path, draw)
