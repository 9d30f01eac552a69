"""The cases of a run as lines of text, and whether they meet their aims."""

from collections.abc import Callable, Iterator
from typing import Any

Cases = list[dict[str, Any]]

PHASE2_PEERS = ("textbook PCGrad", "TorchJD matrix", "TorchJD step", "reference")
METHOD_PEERS = ("TorchJD step", "TorchJD matrix", "textbook")
PLOTTED = ("phase2", "methods", "gpu")


def _aim(name: str, value: float, met: bool, wanted: str) -> str:
    return f"aim: {name} {wanted}: {value:.2f}, {'met' if met else 'NOT met'}"


def phase2(cases: Cases) -> Iterator[str]:
    """Fused Phase 2 against the limit of memory."""
    yield "fused Phase 2 against the limit of memory"
    yield "x limit: time of the fused step over that of a copy of (K+2) N elements' bytes"
    yield "x peer: time of the peer over that of the fused step"
    yield "TorchJD's PCGrad: on a matrix that is there, and from .jac to .grad (step, as it comes)"
    yield (
        f"{'network':9} {'K':>2} {'dtype':8} {'N':>9} {'MB':>6} {'ms p50':>7} {'copy GB/s':>9}"
        f" {'x limit':>7}" + "".join(f" {'x ' + peer:>17}" for peer in PHASE2_PEERS)
    )
    for c in cases:
        yield (
            f"{c['network']:9} {c['tasks']:2} {c['dtype']:8} {c['numel']:9} {c['bytes'] / 1e6:6.1f}"
            f" {c['milliseconds']['p50']:7.2f} {c['copy_gigabytes_per_second']:9.1f}"
            f" {c['times_the_limit']:7.2f}"
            + "".join(f" {c['peers'][peer]['ratio']:17.1f}" for peer in PHASE2_PEERS)
        )
    for c in cases:
        if (c["network"], c["tasks"], c["dtype"]) == ("resnet18", 4, "float32"):
            limit = c["times_the_limit"]
            yield _aim("K = 4, ResNet-18, float32, x limit", limit, limit <= 1.25, "<= 1.25")
            for peer, wanted in (("TorchJD step", 5), ("textbook PCGrad", 20)):
                ratio = c["peers"][peer]["ratio"]
                yield _aim(f"x {peer}", ratio, ratio >= wanted, f">= {wanted}")


def methods(cases: Cases) -> Iterator[str]:
    """Every method against TorchJD and the textbook."""
    yield "methods from K x .grad to .grad; matrix: on a K x N matrix that is already there"
    yield "TorchJD step: the gradients stacked to .jac, then to .grad with its faster settings"
    yield "x limit: over a copy of (2K+1) N elements' bytes, (K+1) N of GradDrop"
    yield "syncs: host synchronizations that the same torch code makes on a GPU"
    yield (
        f"{'network':9} {'K':>2} {'method':11} {'MB':>6} {'step ms':>8} {'matrix ms':>9}"
        f" {'x limit':>7}"
        + "".join(f" {'x ' + peer:>16}" for peer in METHOD_PEERS)
        + "  syncs ours/TorchJD/textbook"
    )
    for c in cases:
        ratios = [c["peers"].get(peer, {}).get("ratio") for peer in METHOD_PEERS]
        syncs = "/".join(
            str(c["synchronizations"].get(who, "-")) for who in ("ours", "TorchJD", "textbook")
        )
        yield (
            f"{c['network']:9} {c['tasks']:2} {c['method']:11} {c['bytes'] / 1e6:6.0f}"
            f" {c['milliseconds']['step']:8.2f} {c['milliseconds']['matrix']:9.2f}"
            f" {c['times_the_limit']:7.2f}"
            + "".join(f" {'-':>16}" if r is None else f" {r:16.1f}" for r in ratios)
            + f"  {syncs}"
        )
    for c in cases:
        if (c["network"], c["tasks"]) == ("resnet18", 4):
            wanted = 20 if c["method"] == "GradDrop" else 4
            ratio = c["peers"]["TorchJD step"]["ratio"]
            name = f"K = 4, ResNet-18, {c['method']} x TorchJD step"
            yield _aim(name, ratio, ratio >= wanted, f">= {wanted}")


def solvers(cases: Cases) -> Iterator[str]:
    """From the Gramian to the weights."""
    yield "solvers, microseconds a call; the slower of a regular and a singular Gramian"
    names = list(cases[0]["microseconds"])
    yield f"{'K':>2}" + "".join(f" {name:>11}" for name in names)
    for c in cases:
        yield f"{c['tasks']:2}" + "".join(f" {c['microseconds'][name]:11.1f}" for name in names)
    for c in cases:
        if c["tasks"] == 8:
            slowest = max(c["microseconds"].values())
            yield _aim("slowest solver at K = 8, microseconds", slowest, slowest < 50, "< 50")


def steps(cases: Cases) -> Iterator[str]:
    """Whole training steps."""
    c = cases[0]
    pictures = f"{c['batch']} pictures of {c['size']} x {c['size']}"
    yield f"training steps: {c['network']}, {c['tasks']} tasks, {pictures}; all rows in turn"
    yield "surgery: between the backward passes and the optimizer; host: the host's time, waits too"
    yield "TorchJD: its stack of the gradients to .jac included; peak: memory beyond what stays"
    on_device = "launches" in c
    yield (
        f"{'method':16} {'step ms':>8} {'surgery ms':>10} {'of step':>8} {'host ms':>8}"
        f" {'over Phase 1':>12}" + (f" {'peak MB':>8} {'launches':>8} {'waits':>5}" * on_device)
    )
    for c in cases:
        yield (
            f"{c['method']:16} {c['milliseconds']:8.1f} {c['surgery_milliseconds']:10.2f}"
            f" {100 * c['surgery_share']:7.2f}% {c['surgery_host_milliseconds']:8.2f}"
            f" {100 * c['over_phase_1']:+11.1f}%"
            + (
                f" {c['peak_bytes'] / 1e6:8.0f} {c['launches']:8} {c['synchronizations']:5}"
                if on_device
                else ""
            )
        )
    for c in cases:
        if on_device and c["method"].startswith("Phase 2"):
            share, waits = c["surgery_share"], c["synchronizations"]
            yield _aim(f"{c['method']}, surgery of the step", share, share <= 0.01, "<= 0.01")
            yield _aim(f"{c['method']}, host synchronizations", waits, waits == 0, "0")


def host(cases: Cases) -> Iterator[str]:
    """The host's part of a step's surgery on a GPU."""
    c = cases[0]
    yield f"the host's part of the surgery on a GPU: {c['layers']} layers, {c['tasks']} tasks"
    yield "keep: the running statistics, until the step has ended; in every phase and method"
    yield f"{'method':16} {'keep ms':>10} {'collect ms':>10} {'combine ms':>10}"
    for c in cases:
        spent = c["milliseconds"]
        parts = (f" {spent[part]:10.2f}" for part in ("keep", "collect", "combine"))
        yield f"{c['method']:16}" + "".join(parts)


def gpu(cases: Cases) -> Iterator[str]:
    """Fused Phase 2 on a GPU."""
    yield "fused Phase 2 on a GPU"
    yield "of limit: a copy of (K+2) N elements' bytes over a step replayed from a CUDA graph"
    yield "x peer: time of the peer over that of the step, both launched from Python"
    yield (
        f"{'backend':8} {'network':9} {'K':>2} {'dtype':8} {'N':>9} {'replayed':>9} {'step ms':>8}"
        f" {'copy GB/s':>9} {'of limit':>8} {'launches':>8} {'waits':>5}"
        + "".join(f" {'x ' + peer:>17}" for peer in PHASE2_PEERS)
    )
    for c in cases:
        ratios = [c["peers"].get(peer, {}).get("ratio") for peer in PHASE2_PEERS]
        yield (
            f"{c['backend']:8} {c['network']:9} {c['tasks']:2} {c['dtype']:8} {c['numel']:9}"
            f" {c['replayed_milliseconds']['p50']:9.3f} {c['milliseconds']['p50']:8.3f}"
            f" {c['copy_gigabytes_per_second']:9.0f} {100 * c['fraction_of_limit']:7.0f}%"
            f" {c['launches']:8} {c['synchronizations']:5}"
            + "".join(f" {'-':>17}" if r is None else f" {r:17.1f}" for r in ratios)
        )
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
                ratio, least = c["peers"]["TorchJD step"]["ratio"], 5
                yield _aim(f"{name}, x TorchJD step", ratio, ratio >= least, f">= {least}")
        waits = c["synchronizations"]
        yield _aim(f"{name}, host synchronizations", waits, waits == 0, "0")


def ranks(cases: Cases) -> Iterator[str]:
    """The bytes that a step on many ranks sends, and its gradients' memory, in Markdown."""
    c = cases[0]
    yield (
        f"ResNet-18, {c['tasks']} tasks, N = {c['numel'] / 1e6:.2f} M, float32; bytes that a rank"
        " sends on a ring, and memory of gradients (peak, kept after a step), over those of N"
        f" elements; updates differ from the textbook way's by {max(c['error'] for c in cases):.0e}"
    )
    yield ""
    yield (
        "| step | W | way | gradients | parameters | heads, norms | sums | control, bytes |"
        " collectives: device + host | peak | kept |"
    )
    yield "| --- |" + " --- |" * 10
    for c in cases:
        sent, number = c["sent"], c["collectives"]
        on_device = sum(n for part, n in number.items() if part != "control")
        yield (
            f"| {c['method']} | {c['ranks']} | {c['way']} | {sent['gradients']:.3f} |"
            f" {sent['parameters']:.3f} | {sent['other gradients']:.4f} | {sent['sums']:.4f} |"
            f" {c['sent_bytes']['control']:.0f} | {on_device} + {number['control']} |"
            f" {c['peak']:.2f} | {c['kept']:.2f} |"
        )


LINES: dict[str, Callable[[Cases], Iterator[str]]] = {
    "phase2": phase2,
    "methods": methods,
    "solvers": solvers,
    "steps": steps,
    "host": host,
    "ranks": ranks,
    "gpu": gpu,
    "gpu_steps": steps,
}
