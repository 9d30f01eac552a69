"""Pictures of training runs: of the demo and of the paper's experiments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt


def losses(runs: dict[str, Any], tasks: list[str], path: Path) -> None:
    """Training loss of each task over epochs, a line a method."""
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.2 * len(tasks), 3.4), layout="constrained"
    )
    for ax, task in zip(axes, tasks, strict=True):
        for name, run in runs.items():
            ax.plot(run["losses"][task], label=name, linewidth=1.3)
        ax.set(title=task, xlabel="epoch", yscale="log")
    axes[0].set_ylabel("training loss")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def losses_over_seeds(
    runs: Mapping[str, Mapping[str, list[Any]]], tasks: list[str], path: Path
) -> None:
    """Training loss of each task over epochs: the mean over seeds as a line, the range as a band.

    `runs[row][line]` has a run a seed; all rows have the same lines, and a task has one scale.
    """
    size = (4.2 * len(tasks), 3.1 * len(runs) + 0.3)
    figure, axes = plt.subplots(
        len(runs), len(tasks), figsize=size, layout="constrained", squeeze=False, sharey="col"
    )
    styles = ["-", "--", "-.", ":"]  # Lines that lie on each other are all seen.
    for of_row, (title, lines) in zip(axes, runs.items(), strict=True):
        for ax, task in zip(of_row, tasks, strict=True):
            for i, (label, of_line) in enumerate(lines.items()):
                values = np.array([run["losses"][task] for run in of_line])
                style = {"color": f"C{i}", "linestyle": styles[i % len(styles)]}
                ax.plot(values.mean(0), label=label, linewidth=1.6, **style)
                band = values.min(0), values.max(0)
                ax.fill_between(range(values.shape[1]), *band, color=f"C{i}", alpha=0.12)
            ax.set(title=f"{title}: {task}", xlabel="epoch", yscale="log")
            ax.xaxis.get_major_locator().set_params(integer=True)
        of_row[0].set_ylabel("training loss")
    shown = axes[0, 0].get_legend_handles_labels()
    title = "mean over seeds; band: from the lowest seed to the highest"
    figure.legend(*shown, loc="outside lower center", ncols=len(shown[0]), title=title, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def priority(runs: dict[str, Any], tasks: list[str], names: list[str], path: Path) -> None:
    """The share of channels that each task has priority over: by epoch, and by layer at the end.

    `runs[name]["priority"]` has, by epoch and layer, the number of channels of each task.
    """
    figure, axes = plt.subplots(
        2, len(names), figsize=(5 * len(names), 6.4), layout="constrained", squeeze=False
    )
    for column, name in enumerate(names):
        history = runs[name]["priority"]
        overall = np.array([_shares(np.array(list(epoch.values())).sum(0)) for epoch in history])
        axes[0, column].stackplot(range(len(overall)), overall.T, labels=tasks, alpha=0.85)
        axes[0, column].set(title=name, xlabel="epoch", ylim=(0, 100))
        layers = history[-1]
        by_layer = np.array([_shares(np.array(counts)) for counts in layers.values()])
        bottom = np.zeros(len(layers))
        few = len(layers) <= 40
        for i, task in enumerate(tasks):
            width, height = by_layer[:, i], 0.8 if few else 1.0
            axes[1, column].barh(range(len(layers)), width, height, left=bottom, label=task)
            bottom += width
        if few:
            axes[1, column].set_yticks(range(len(layers)), list(layers), fontsize=6)
        else:
            axes[1, column].set_ylabel("layer")
        axes[1, column].invert_yaxis()
        axes[1, column].set(xlabel="% of the layer's channels, last epoch", xlim=(0, 100))
    axes[0, 0].set_ylabel("% of channels")
    axes[0, 0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shares(counts: np.ndarray) -> np.ndarray:
    return 100 * counts / counts.sum()


def priority_by_layer(run: Any, tasks: list[str], path: Path, layers: int = 12) -> None:
    """The share of channels by top-priority task over the epochs, of layers at equal distances."""
    names = list(run["priority"][-1])
    chosen = [names[i] for i in np.linspace(0, len(names) - 1, layers).astype(int)]
    figure, axes = plt.subplots(
        layers // 4, 4, figsize=(14, 2.4 * (layers // 4)), layout="constrained", sharey=True
    )
    for ax, name in zip(axes.flat, chosen, strict=True):
        history = np.array([_shares(np.array(epoch[name])) for epoch in run["priority"]])
        ax.stackplot(range(len(history)), history.T, labels=tasks, alpha=0.85)
        ax.set_title(name, fontsize=7)
        ax.set(ylim=(0, 100), xlim=(0, max(1, len(history) - 1)))
    axes[0, 0].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def final_losses(
    finals: Mapping[str, Mapping[str, list[float]]], tasks: list[str], path: Path
) -> None:
    """The last epoch's training loss of each task and their mean: a bar a method, over seeds."""
    figure, axes = plt.subplots(
        1, len(tasks) + 1, figsize=(2.6 * (len(tasks) + 1), 3.2), layout="constrained"
    )
    names = list(finals)
    for ax, task in zip(axes, [*tasks, "mean"], strict=True):
        values = [
            np.mean([run[t] for t in tasks], axis=0) if task == "mean" else np.array(run[task])
            for run in finals.values()
        ]
        means = [value.mean() for value in values]
        colors = [f"C{i}" for i in range(len(names))]
        deviations = [value.std(ddof=len(value) > 1) for value in values]
        ax.bar(names, means, yerr=deviations, color=colors)
        ax.set(title=task)
        ax.tick_params("x", rotation=90, labelsize=8)
    axes[0].set_ylabel("training loss, last epoch")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def heat_maps(runs: dict[str, Any], key: str, label: str, path: Path) -> None:
    """Heat maps of a share by layer, epoch by epoch.

    Epochs without it, such as those in Phase 1, are empty. Nothing is drawn if no run has it.
    """
    chosen = {name: run[key] for name, run in runs.items() if any(run.get(key, []))}
    if not chosen:
        return
    figure, axes = plt.subplots(
        1, len(chosen), figsize=(5 * len(chosen), 4), layout="constrained", squeeze=False
    )
    for ax, (name, history) in zip(axes[0], chosen.items(), strict=True):
        layers = list(next(epoch for epoch in history if epoch))
        shares = [[epoch.get(layer, np.nan) for epoch in history] for layer in layers]
        image = ax.imshow(100 * np.array(shares), vmin=0, vmax=100, aspect="auto", cmap="magma")
        ax.set_yticks(range(len(layers)), layers, fontsize=6)
        ax.set(title=name, xlabel="epoch")
        ax.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label=label)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def cosines(runs: dict[str, Any], path: Path) -> None:
    """Cosines between the tasks' gradients over the epochs, of the runs with a Gramian method."""
    chosen = {name: run["cosines"] for name, run in runs.items() if any(run.get("cosines", []))}
    if not chosen:
        return
    figure, axes = plt.subplots(
        1, len(chosen), figsize=(4 * len(chosen), 3), layout="constrained", squeeze=False
    )
    for ax, (name, history) in zip(axes[0], chosen.items(), strict=True):
        for pair in next(epoch for epoch in history if epoch):
            ax.plot([epoch.get(pair, np.nan) for epoch in history], label=pair, linewidth=1.3)
        ax.axhline(0, color="gray", linewidth=0.7)
        ax.set(title=name, xlabel="epoch", ylim=(-1, 1))
    axes[0, 0].set_ylabel("cosine")
    axes[0, -1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def loss_correlation(losses: dict[str, list[float]]) -> np.ndarray:
    """Pearson correlation between tasks of the losses' changes from epoch to epoch."""
    return np.corrcoef(np.diff(np.array(list(losses.values())), axis=1))


def correlation(runs: dict[str, Any], tasks: list[str], names: list[str], path: Path) -> None:
    """How much the losses of two tasks fall together."""
    figure, axes = plt.subplots(
        1, len(names), figsize=(3.6 * len(names), 3.2), layout="constrained", squeeze=False
    )
    for ax, name in zip(axes[0], names, strict=True):
        matrix = loss_correlation(runs[name]["losses"])
        image = ax.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
        for (i, j), value in np.ndenumerate(matrix):
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=9)
        ax.set_xticks(range(len(tasks)), tasks, fontsize=8)
        ax.set_yticks(range(len(tasks)), tasks, fontsize=8)
        ax.set_title(name, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
