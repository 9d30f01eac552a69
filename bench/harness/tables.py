"""Tables from the cases of a run, for the terminal and for docs/benchmarks.md, and their aims."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Cases = list[dict[str, Any]]

PHASE2_PEERS = ("textbook PCGrad", "TorchJD matrix", "TorchJD step", "reference")
METHOD_PEERS = ("TorchJD step", "TorchJD matrix", "textbook")
PLOTTED = ("phase2", "methods", "gpu")


@dataclass(frozen=True)
class Table:
    """Cells as text, what they show, and whether they meet their aims."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    aims: list[str] = field(default_factory=list)


def markdown(table: Table) -> Iterator[str]:
    """The cells in Markdown, in columns of even width, which a terminal shows as well."""
    lines = [table.header, *table.rows]
    columns = list(zip(*lines, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [not any(re.match("[A-Za-z]", cell) for cell in column[1:]) for column in columns]

    def line(cells: list[str]) -> str:
        padded = (
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(cells, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    yield line(table.header)
    yield line(["-" * (n - r) + ":" * r for n, r in zip(widths, right, strict=True)])
    yield from map(line, table.rows)


def lines(name: str, cases: Cases) -> Iterator[str]:
    """All of a table, for the terminal."""
    table = TABLES[name](cases)
    yield table.title
    yield from table.notes
    yield ""
    yield from markdown(table)
    if table.aims:
        yield ""
        yield from table.aims


def ratio(case: dict[str, Any], peer: str) -> str:
    """A peer's time over ours, if there is one."""
    found = case["peers"].get(peer)
    return "-" if found is None else f"{found['ratio']:.1f}"


def millions(numel: int) -> str:
    return f"{numel / 1e6:.2f} M"


def _aim(name: str, value: float, met: bool, wanted: str) -> str:
    return f"aim: {name} {wanted}: {value:.2f}, {'met' if met else 'NOT met'}"


def phase2(cases: Cases) -> Table:
    """Fused Phase 2 against the limit of memory."""
    return Table(
        "Fused Phase 2 against the limit of memory",
        [
            *("network", "K", "dtype", "N", "MB", "ms", "copy GB/s", "x limit"),
            *(f"x {peer}" for peer in PHASE2_PEERS),
        ],
        [
            [
                *(c["network"], str(c["tasks"]), c["dtype"]),
                *(millions(c["numel"]), f"{c['bytes'] / 1e6:.1f}"),
                *(f"{c['milliseconds']['p50']:.2f}", f"{c['copy_gigabytes_per_second']:.1f}"),
                f"{c['times_the_limit']:.2f}",
                *(ratio(c, peer) for peer in PHASE2_PEERS),
            ]
            for c in cases
        ],
        [
            "x limit: time of the fused step over that of a copy of (K+2) N elements' bytes",
            "x peer: time of the peer over that of the fused step",
            "TorchJD's PCGrad as it comes: on a matrix that is there, and from .jac to .grad",
        ],
        list(_phase2_aims(cases)),
    )


def _phase2_aims(cases: Cases) -> Iterator[str]:
    for c in cases:
        if (c["network"], c["tasks"], c["dtype"]) == ("resnet18", 4, "float32"):
            limit = c["times_the_limit"]
            yield _aim("K = 4, ResNet-18, float32, x limit", limit, limit <= 1.25, "<= 1.25")
            for peer, wanted in (("TorchJD step", 5), ("textbook PCGrad", 20)):
                found = c["peers"][peer]["ratio"]
                yield _aim(f"x {peer}", found, found >= wanted, f">= {wanted}")


def methods(cases: Cases) -> Table:
    """Every method against TorchJD and the textbook."""
    return Table(
        "Methods, from the `.grad` of K backward passes to the update in `.grad`",
        [
            *("network", "K", "method", "MB", "ms", "matrix ms", "x limit"),
            *(f"x {peer}" for peer in METHOD_PEERS),
            "syncs",
        ],
        [
            [
                *(c["network"], str(c["tasks"]), c["method"], f"{c['bytes'] / 1e6:.0f}"),
                *(f"{c['milliseconds'][way]:.2f}" for way in ("step", "matrix")),
                f"{c['times_the_limit']:.2f}",
                *(ratio(c, peer) for peer in METHOD_PEERS),
                " / ".join(
                    str(c["synchronizations"].get(who, "-"))
                    for who in ("ours", "TorchJD", "textbook")
                ),
            ]
            for c in cases
        ],
        [
            "matrix: on a K x N matrix that is already there",
            "TorchJD step: the gradients stacked to .jac, then to .grad with its faster settings",
            "x limit: over a copy of (2K+1) N elements' bytes, (K+1) N of GradDrop",
            "syncs: host synchronizations that the same torch code makes on a GPU:"
            " ours / TorchJD / textbook",
        ],
        list(_methods_aims(cases)),
    )


def _methods_aims(cases: Cases) -> Iterator[str]:
    for c in cases:
        if (c["network"], c["tasks"]) == ("resnet18", 4):
            wanted = 20 if c["method"] == "GradDrop" else 4
            found = c["peers"]["TorchJD step"]["ratio"]
            name = f"K = 4, ResNet-18, {c['method']} x TorchJD step"
            yield _aim(name, found, found >= wanted, f">= {wanted}")


def solvers(cases: Cases) -> Table:
    """From the Gramian to the weights."""
    names = list(cases[0]["microseconds"])
    slowest = [max(c["microseconds"].values()) for c in cases if c["tasks"] == 8]
    return Table(
        "Solvers, microseconds a call; the slower of a regular and a singular Gramian",
        ["K", *names],
        [[str(c["tasks"]), *(f"{c['microseconds'][name]:.1f}" for name in names)] for c in cases],
        aims=[_aim("slowest solver at K = 8, microseconds", t, t < 50, "< 50") for t in slowest],
    )


def steps(cases: Cases) -> Table:
    """Whole training steps."""
    c = cases[0]
    pictures = f"{c['batch']} pictures of {c['size']} x {c['size']}"
    on_device = "launches" in c
    return Table(
        f"Training steps: {c['network']}, {c['tasks']} tasks, {pictures}",
        [
            *("method", "step ms", "surgery ms", "of the step", "host ms", "over Phase 1"),
            *(("peak MB", "launches", "waits") if on_device else ()),
        ],
        [
            [
                *(c["method"], f"{c['milliseconds']:.1f}", f"{c['surgery_milliseconds']:.2f}"),
                f"{100 * c['surgery_share']:.2f} %",
                f"{c['surgery_host_milliseconds']:.2f}",
                f"{100 * c['over_phase_1']:+.1f} %",
                *(_on_device(c) if on_device else ()),
            ]
            for c in cases
        ],
        [
            "all rows in turn",
            "surgery: between the backward passes and the optimizer; host: by the host's clock",
            "TorchJD: its stack of the gradients to .jac included; peak: memory beyond what stays",
        ],
        list(_steps_aims(cases)) if on_device else [],
    )


def _on_device(c: dict[str, Any]) -> Iterator[str]:
    yield f"{c['peak_bytes'] / 1e6:.0f}"
    yield f"{c['launches']}"
    yield f"{c['synchronizations']}"


def _steps_aims(cases: Cases) -> Iterator[str]:
    for c in cases:
        if c["method"].startswith("Phase 2"):
            share, waits = c["surgery_share"], c["synchronizations"]
            yield _aim(f"{c['method']}, surgery of the step", share, share <= 0.01, "<= 0.01")
            yield _aim(f"{c['method']}, host synchronizations", waits, waits == 0, "0")


def features(cases: Cases) -> Table:
    """Gradients of all shared parameters against those of features."""
    c = cases[0]
    pictures = f"{c['batch']} pictures of {c['size']} x {c['size']}"
    return Table(
        f"`backward` of {c['network']} ({millions(c['numel'])}) and its heads, {c['method']},"
        f" {pictures}",
        [
            *("K", "plain ms", "ms", "at features, ms", "x", "x plain", "checks, ms"),
            *("plain MB", "MB", "at features, MB", "of these, rows"),
        ],
        [
            [
                str(c["tasks"]),
                *(f"{c['milliseconds'][way]:.1f}" for way in ("plain", "all", "features")),
                *(f"{c[name]:.2f}" for name in ("ratio", "over_plain", "check_milliseconds")),
                *(f"{c['peak_bytes'][way] / 1e6:.1f}" for way in ("plain", "all", "features")),
                f"{c['feature_bytes'] / 1e6:.2f}",
            ]
            for c in cases
        ],
        ["x: time of backward(losses) over that of backward(losses, features=z)"],
    )


def together(cases: Cases) -> Table:
    """One pass for all tasks against a pass a task."""

    def gradients(c: dict[str, Any]) -> list[str]:
        if not c["gradient_bytes"]:
            return ["", "", ""]
        found = c["gradient_bytes"]
        return [f"{n / 1e6:.1f}" for n in (found["step"], found["together"], c["aim_bytes"])]

    time = max(c["ratio"] for c in cases)
    counted = [c for c in cases if c["gradient_bytes"]]
    memory = max(c["gradient_bytes"]["together"] / c["aim_bytes"] for c in counted)
    return Table(
        "`step_together` against `step`: a whole training step",
        [
            *("network", "N", "K", "batch", "step ms", "together ms", "together / step"),
            *("gradients MB", "together MB", "N + K layers MB"),
            *("process MB", "together, process MB"),
        ],
        [
            [
                c["network"],
                millions(c["numel"]),
                str(c["tasks"]),
                str(c["batch"]),
                *(f"{c['milliseconds'][way]:.0f}" for way in ("step", "together")),
                f"{c['ratio']:.2f}",
                *gradients(c),
                *(f"{c['resident_bytes'][way] / 1e6:.0f}" for way in ("step", "together")),
            ]
            for c in cases
        ],
        [
            "N + K layers: one update, and K gradients of the largest layer",
            "process: growth of the resident memory of a fresh process in three steps",
        ],
        [
            _aim("the largest together / step", time, time <= 1, "<= 1"),
            _aim("the largest gradients / (N + K layers)", memory, memory <= 1.05, "<= 1.05"),
        ],
    )


def gpu_together(cases: Cases) -> Table:
    """One pass for all tasks against a pass a task, on a GPU."""

    def both(c: dict[str, Any], key: str, unit: float = 1) -> list[str]:
        return [f"{c['on_device'][way][key] / unit:.0f}" for way in ("step", "together")]

    aims = [c for c in cases if (c["network"], c["batch"], c["tasks"]) == ("hrnet_w18", 8, 4)]
    return Table(
        "`step_together` against `step` on a GPU: a whole training step",
        [
            *("network", "K", "batch", "size", "step ms", "together ms", "together / step"),
            *("launches", "together, launches", "waits", "together, waits"),
            *("peak MB", "together, peak MB"),
        ],
        [
            [
                *(c["network"], str(c["tasks"]), str(c["batch"]), str(c["size"])),
                *(f"{c['milliseconds'][way]:.1f}" for way in ("step", "together")),
                f"{c['ratio']:.2f}",
                *both(c, "launches"),
                *both(c, "synchronizations"),
                *both(c, "peak_bytes", 1e6),
            ]
            for c in cases
        ],
        ["peak: of a step, beyond what stays"],
        [
            _aim("hrnet_w18 at batch 8, together / step", c["ratio"], c["ratio"] <= 0.5, "<= 0.5")
            for c in aims
        ],
    )


def host(cases: Cases) -> Table:
    """The host's part of a step's surgery on a GPU."""
    c = cases[0]
    return Table(
        f"The host's part of the surgery on a GPU: {c['layers']} layers, {c['tasks']} tasks",
        ["method", "keep ms", "collect ms", "combine ms"],
        [
            [
                c["method"],
                *(f"{c['milliseconds'][part]:.2f}" for part in ("keep", "collect", "combine")),
            ]
            for c in cases
        ],
        ["keep: the running statistics, until the step has ended; in every phase and method"],
    )


def gpu(cases: Cases) -> Table:
    """Fused Phase 2 on a GPU."""
    return Table(
        "Fused Phase 2 on a GPU",
        [
            *("backend", "network", "K", "dtype", "N", "replayed ms", "step ms", "copy GB/s"),
            *("of the limit", "launches", "waits"),
            *(f"x {peer}" for peer in PHASE2_PEERS),
        ],
        [
            [
                *(c["backend"], c["network"], str(c["tasks"]), c["dtype"], millions(c["numel"])),
                f"{c['replayed_milliseconds']['p50']:.3f}",
                f"{c['milliseconds']['p50']:.3f}",
                f"{c['copy_gigabytes_per_second']:.0f}",
                f"{100 * c['fraction_of_limit']:.0f} %",
                *(str(c["launches"]), str(c["synchronizations"])),
                *(ratio(c, peer) for peer in PHASE2_PEERS),
            ]
            for c in cases
        ],
        [
            "of limit: a copy of (K+2) N elements' bytes over a step replayed from a CUDA graph",
            "x peer: time of the peer over that of the step, both launched from Python",
        ],
        list(_gpu_aims(cases)),
    )


def _gpu_aims(cases: Cases) -> Iterator[str]:
    for c in cases:
        if c["tasks"] != 4:
            continue
        name = f"{c['backend']}, {c['network']}, K = 4, {c['dtype']}"
        if c["numel"] >= 25e6:
            fraction, least = c["fraction_of_limit"], {"triton": 0.7, "cuda": 0.85}[c["backend"]]
            yield _aim(f"{name}, of the limit", fraction, fraction >= least, f">= {least}")
            if "TorchJD step" not in c["peers"]:
                yield f"aim: {name}, x TorchJD step: not measured, TorchJD is not installed"
            else:
                found, least = c["peers"]["TorchJD step"]["ratio"], 5
                yield _aim(f"{name}, x TorchJD step", found, found >= least, f">= {least}")
        waits = c["synchronizations"]
        yield _aim(f"{name}, host synchronizations", waits, waits == 0, "0")


def ranks(cases: Cases) -> Table:
    """The bytes that a step on many ranks sends, and its gradients' memory."""
    c = cases[0]
    return Table(
        f"ResNet-18, {c['tasks']} tasks, N = {millions(c['numel'])}, float32; updates differ from"
        f" the textbook way's by {max(c['error'] for c in cases):.0e}",
        [
            *("step", "W", "way", "gradients", "parameters", "heads, norms", "sums"),
            *("control, bytes", "collectives", "peak", "kept"),
        ],
        [
            [
                *(c["method"], str(c["ranks"]), c["way"]),
                *(f"{c['sent'][part]:.3f}" for part in ("gradients", "parameters")),
                *(f"{c['sent'][part]:.4f}" for part in ("other gradients", "sums")),
                f"{c['sent_bytes']['control']:.0f}",
                " + ".join(map(str, _collectives(c))),
                *(f"{c[memory]:.2f}" for memory in ("peak", "kept")),
            ]
            for c in cases
        ],
        [
            "bytes that a rank sends on a ring, and memory of gradients (peak, kept after a step),"
            " over those of N elements",
            "collectives: on the device + between the hosts",
        ],
    )


def _collectives(c: dict[str, Any]) -> tuple[int, int]:
    """On the device, and between the hosts."""
    number = c["collectives"]
    return sum(n for part, n in number.items() if part != "control"), number["control"]


TABLES: dict[str, Callable[[Cases], Table]] = {
    "phase2": phase2,
    "methods": methods,
    "solvers": solvers,
    "steps": steps,
    "features": features,
    "together": together,
    "gpu_together": gpu_together,
    "host": host,
    "ranks": ranks,
    "gpu": gpu,
    "gpu_steps": steps,
}
