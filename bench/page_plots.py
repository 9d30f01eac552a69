"""The plots of README.md and docs/benchmarks.md, from the last records."""

import sys
from typing import Any

from page_tables import RESULTS, ROOT, last, main_cases

sys.path.append(str(ROOT / "examples"))

import style

NETWORKS = {"resnet18": "ResNet-18", "small": "small"}
MARKS = {
    "cs_kernels": ("cs_kernels", "o", True),
    "TorchJD step": ("TorchJD", "s", True),
    "TorchJD matrix": ("TorchJD", "s", False),
    "textbook": ("textbook", "^", True),
    "reference": ("cs_kernels", "o", False),
}
"""By label: the library, the marker, and whether the marker is filled."""
WAYS = {
    "UPGrad, exact": ("cs_kernels", "o-", "exact"),
    "UPGrad, update_every=10": ("cs_kernels", "s-", "update_every=10"),
    "UPGrad, features=z": ("cs_kernels", "^-", "features=z"),
    "TorchJD backward, a loss at a time": ("TorchJD", "o-", "TorchJD, fastest"),
    "TorchJD Engine": ("TorchJD", "D-", "TorchJD Engine"),
    "LibMTL's way, PCGrad": ("LibMTL", "o-", "LibMTL's way"),
    "textbook PCGrad": ("textbook", "o-", "textbook"),
}
"""By step of `price`: the library, the marker and the label in the plot of ResNet-18.

TorchJD's two other variants are left out: they are slower than its fastest variant, and take more
memory than its Engine.
"""
FRONT = {
    "UPGrad, features=z": ("cs_kernels", "UPGrad, features=z", None),
    "backward, every=10": ("cs_kernels", "UPGrad, balancer, every=10", None),
    "UPGrad, update_every=10": ("cs_kernels", "UPGrad, update_every=10", None),
    "UPGrad, exact": ("cs_kernels", "UPGrad", ""),
    "TorchJD": ("TorchJD", "UPGrad", "TorchJD step"),
    "PCGrad, exact": ("cs_kernels", "PCGrad", ""),
    "LibMTL's way, PCGrad": ("LibMTL", "PCGrad", None),
    "textbook PCGrad": ("textbook", "PCGrad", "textbook"),
    "ConnectionStrength, step": ("cs_kernels", "ConnectionStrength", ""),
}
"""By step: the library, the label, and the peer in `methods` with the time of the surgery ("" for
cs_kernels, None if the surgery is not timed)."""


def front() -> list[dict[str, Any]]:
    """The cost of ResNet-18 with 4 tasks in each library: step, memory, surgery."""
    names = ("methods", "phase2", "price", "limits", "balancer")
    cases = [c for name in names for c in last(name, "resnet18")["cases"]]
    cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] == 4]
    surgeries = {c["method"]: c for c in cases if "method" in c}
    (phase2,) = (c for c in cases if c.get("dtype") == "float32")
    surgeries["ConnectionStrength"] = {"milliseconds": {"step": phase2["milliseconds"]["p50"]}}
    steps = {c["step"]: c for c in cases if "step" in c}
    ways = (c for step, c in steps.items() if step.startswith("TorchJD"))
    steps["TorchJD"] = min(ways, key=lambda c: c["over_plain"])
    rows = []
    for step, (library, words, peer) in FRONT.items():
        row = {**steps[step], "library": library, "step": words}
        if "peak_bytes" in row:
            row["megabytes"] = row["peak_bytes"] / 1e6
        ours = surgeries.get(words)
        if ours and peer is not None:
            ratio = ours["peers"][peer]["ratio"] if peer else 1.0
            row["surgery"] = ours["milliseconds"]["step"] * ratio
        rows.append(row)
    return rows


def panels_of_times(name: str) -> dict[str, dict[str, dict[str, float]]]:
    """Times by panel, row and label: Phase 2 in all cases, or all methods in the main case.

    For Phase 2, each dtype has a panel.
    """
    if name == "methods":
        (of_phase2,) = map(times, main_cases(last("phase2")))
        of_phase2.pop("reference")
        cases = main_cases(last(name, "resnet18"))
        return {"": {"Phase 2": of_phase2, **{c["method"]: times(c) for c in cases}}}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for c in (c for c in last("phase2")["cases"] if c["network"] in NETWORKS):
        row = f"{NETWORKS[c['network']]}, {c['tasks']} tasks"
        panels.setdefault(c["dtype"], {})[row] = times(c)
    return panels


def draw_times(name: str) -> None:
    """Plots our and the peers' times, relative to a copy of as many bytes."""
    panels = panels_of_times(name)
    title = "Time of Phase 2, over that of a copy of as many bytes"
    if name == "methods":
        title = "Surgery of 4 tasks, ResNet-18: time over that of a copy of as many bytes"

    def figure() -> Any:
        height = 1.6 + 0.27 * len(next(iter(panels.values())))
        figure, axes = style.panels(1, len(panels), height, sharex=True, sharey=True)
        for ax, (panel, rows) in zip(axes[0], panels.items(), strict=True):
            for label, (library, marker, filled) in MARKS.items():
                values = [row.get(label, float("nan")) for row in rows.values()]
                color = style.LIBRARIES[library]
                fill = color if filled else "none"
                if any(value == value for value in values):
                    ax.plot(values, [*rows], marker, color=color, markerfacecolor=fill, label=label)
            ax.axvline(1, color=style.LIBRARIES["limit"], linestyle="--", label="the copy: 1")
            ax.grid(axis="y")
            ax.set(title=panel, xlabel="x the time of the copy")
            style.log(ax, "x", (1,) if len(panels) > 1 else (1, 2, 5))
        axes[0, 0].invert_yaxis()
        figure.suptitle(title)
        style.legend_below(figure, axes[0, 0], 3)
        return figure

    style.save(RESULTS / f"{name}.svg", figure)


def times(case: dict[str, Any]) -> dict[str, float]:
    """Our and the peers' times, relative to a copy of as many bytes."""
    ours, limit = case["milliseconds"], case["times_the_limit"]
    found = {"cs_kernels": limit}
    for label, peer in case["peers"].items():
        # In records of methods, "TorchJD matrix" is compared with our time on a matrix.
        factor = (
            ours["matrix"] / ours["step"] if label == "TorchJD matrix" and "step" in ours else 1
        )
        found[label] = limit * peer["ratio"] * factor
    return found


def draw_price() -> None:
    """Plots whole steps and their memory by the number of tasks, with one line per way."""
    of_ways: dict[str, dict[int, dict[str, Any]]] = {}
    for case in last("price", "resnet18")["cases"]:
        if case["network"] == "resnet18":
            of_ways.setdefault(case["step"], {})[case["tasks"]] = case
    tasks = [*of_ways["plain"]]
    panels = {
        "over_plain": ("time, in plain steps", 1),
        "peak_bytes": ("memory of gradients, MB", 1e6),
    }

    def figure() -> Any:
        figure, axes = style.panels(1, 2, 4.2)
        for ax, (key, (label, unit)) in zip(axes[0], panels.items(), strict=True):
            lines = {}
            for way, (library, look, title) in WAYS.items():
                values = [of_ways[way][n][key] / unit for n in tasks]
                color = style.LIBRARIES[library]
                ax.plot(tasks, values, look, color=color)
                lines[title] = (values[-1], color)
            if key == "over_plain":
                limit = [(1 + 2 * n) / 3 for n in tasks]
                color = style.LIBRARIES["limit"]
                ax.plot(tasks, limit, "--", color=color)
                lines["(1 + 2K) / 3"] = (limit[-1], color)
            else:  # No label: a step that solves keeps as many gradients as "exact".
                del lines["update_every=10"]
            style.log(ax, "y")
            ax.grid(axis="y")
            ax.set(xscale="log", xlabel="tasks K", title=label)
            style.label_lines(ax, tasks[-1], lines)
            ax.set_xticks(tasks, map(str, tasks))
            ax.minorticks_off()
        figure.suptitle("One training step of ResNet-18; blue: cs_kernels")
        return figure

    style.save(RESULTS / "price.svg", figure)


PANELS = {
    "over_plain": ("whole step", "plain steps", ".2f", (1, 10)),
    "megabytes": ("gradients", "MB", ".0f", (100, 1000)),
    "surgery": ("surgery alone", "ms", ".0f", (10, 100, 1000)),
}
"""The panels of `draw_front`, by key of a row: title, unit, number format, ticks."""
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "va": "center"}


def draw_front() -> None:
    """Plots whole steps, their memory, and the surgery alone, for 4 tasks of ResNet-18."""
    rows = front()
    labels = [
        row["step"] + (f" ({row['library']})" if row["library"] != "cs_kernels" else "")
        for row in rows
    ]

    def figure() -> Any:
        figure, axes = style.plt.subplots(1, 3, sharey=True, figsize=(style.WIDTH, 3.4))
        for ax, (key, (title, unit, digits, ticks)) in zip(axes, PANELS.items(), strict=True):
            measured = [row[key] for row in rows if row.get(key)]
            limits = (min(measured) / 1.3, max(measured) * 9)  # Space for the last number.
            ax.set(title=title, xlabel=f"{unit}, log axis", xscale="log", xlim=limits)
            ax.set_xticks(ticks, map(str, ticks))
            ax.grid(axis="x")
            for y, row in enumerate(rows):
                value, text = row.get(key), "not measured"
                if value:
                    ax.plot(value, y, "o", color=style.LIBRARIES[row["library"]])
                    text = f"{value:{digits}}"
                ax.annotate(text, (value or limits[0], y), (7 if value else 3, 0), **BESIDE)
            ax.minorticks_off()
            ax.tick_params(axis="y", length=0)
        axes[0].axvline(1, color=style.LIBRARIES["limit"], linestyle="--", zorder=1)
        axes[0].set_yticks(range(len(rows)), labels)
        axes[0].invert_yaxis()
        return figure

    style.save(RESULTS / "front.svg", figure)


def draw_all() -> None:
    """Draws every plot, in a light and a dark version."""
    draw_times("phase2")
    draw_times("methods")
    draw_price()
    draw_front()
