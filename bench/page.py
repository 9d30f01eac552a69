"""Writes the plots and the tables of README.md and docs/ from the records.

Times and memory are in bench/results/, training runs over several seeds in examples/results/uses/.

    python bench/page.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With `--check`, nothing is
written, and the exit status is 1 if a page differs from the records. Only the plots need more than
the standard library.
"""

import json
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
USES = ROOT / "examples" / "results" / "uses"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "benchmarks.md", DOCS / "internals" / "gpu_kernels.md"]
PEERS = """x TorchJD step={peers[TorchJD step][ratio]:.1f}
    x TorchJD matrix={peers[TorchJD matrix][ratio]:.1f} | x textbook={peers[textbook][ratio]:.1f}"""
TABLES = {
    "summary": f"""method={{method}}/Phase 2
        ms={{milliseconds[step]:.1f}}/{{milliseconds[p50]:.1f}}
        x limit={{times_the_limit:.2f}} | {PEERS}
        syncs={{synchronizations[ours]}} | TorchJD's syncs={{synchronizations[TorchJD]}}""",
    "phase2": f"""network={{network}} | K={{tasks}} | dtype={{dtype}} | ms={{milliseconds[p50]:.2f}}
        copy GB/s={{copy_gigabytes_per_second:.1f}} | x limit={{times_the_limit:.2f}} | {PEERS}
        x reference={{peers[reference][ratio]:.1f}}""",
    "steps": """method={method} | step ms={milliseconds:.1f} | surgery ms={surgery_milliseconds:.2f}
        of the step={surgery_share:.2%} | over Phase 1={over_phase_1:+.1%}""",
    "price": """network={network} | step={step} | x, 2 tasks={K2[over_plain]:.2f}
        x, 4 tasks={K4[over_plain]:.2f} | x, 8 tasks={K8[over_plain]:.2f}
        MB, 2 tasks={K2[peak_bytes]:.0f} | MB, 4 tasks={K4[peak_bytes]:.0f}
        MB, 8 tasks={K8[peak_bytes]:.0f} | MB between={K8[between_peak_bytes]:.0f}""",
    "peers": """network={network} | K={tasks} | ours, ms={ours[milliseconds]:.1f}
        x TorchJD={ours[over_fastest]:.2f}
        quartiles={ours[quartiles][low]:.2f} to {ours[quartiles][high]:.2f}
        x TorchJD, batched={batched[over_fastest]:.2f}
        quartiles, batched={batched[quartiles][low]:.2f} to {batched[quartiles][high]:.2f}
        MB={ours[peak_bytes]:.0f} → {batched[peak_bytes]:.0f} | TorchJD's MB={peak_bytes:.0f}
        page faults={ours[faults]:.0f} → {batched[faults]:.0f} | TorchJD's={faults:.0f}
        TorchJD's fastest={step}""",
    "limits": """network={network} | step={step} | K={tasks} | ms={milliseconds:.0f}
        x plain={over_plain:.2f} | limit={limit:.2f} | x plain / limit={over_limit:.2f}
        MB={peak_bytes:.0f}""",
    "features": """K={tasks} | plain ms={milliseconds[plain]:.1f}
        exact ms={milliseconds[all]:.1f} | features ms={milliseconds[features]:.1f}
        exact / features={ratio:.2f} | features / plain={over_plain:.2f}
        plain MB={peak_bytes[plain]:.1f} | exact MB={peak_bytes[all]:.1f}
        features MB={peak_bytes[features]:.1f} | rows MB={feature_bytes:.2f}""",
    "sketches": """dtype={dtype} | threads={threads}
        ms={milliseconds[sketch]:.1f} | x reading={over_read:.2f}
        x Gramian of one task={over_gramian:.2f}
        with weighting, x weighting={over_weigh:.2f}""",
    "balancer": """network={network} | K={tasks} | batch={batch} | passes={step}
        ms={milliseconds:.0f}
        x plain passes={over_plain:.2f} | extra gradients={extra_over_gradient:.2f}""",
    "together": """network={network} | N={numel:.2f} M | K={tasks} | batch={batch}
        time={milliseconds[step]:.0f} → {milliseconds[together]:.0f} | ratio={ratio:.2f}
        gradients={gradient_bytes[step]:.1f} → {gradient_bytes[together]:.1f}
        process={resident_bytes[step]:.0f} → {resident_bytes[together]:.0f}""",
    "host": """method={method} | keep ms={milliseconds[keep]:.2f}
        collect ms={milliseconds[collect]:.2f} | combine ms={milliseconds[combine]:.2f}""",
    "ranks": """step={method} | W={ranks} | way={way} | reduce-scatter={reduce-scatter:.3f}
        all-gather={all-gather:.3f} | all-reduce={all-reduce:.3f} | control, bytes={control:.0f}
        peak={peak:.2f} | kept={kept:.2f}""",
}
"""`header=cell` per column; the first of a cell's forms whose fields are in the case is used."""
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
"""By step of `price`: the library, the marker and the label in the picture of ResNet-18.

Two other variants of TorchJD are left out: one is slower than the first one here, the other takes
more memory than the second.
"""
SOURCE = """Record: `bench/results/{name}.jsonl`, commit {commit}, {time:.10}, {machine[cpu]}, \
threads {threads}, {machine[instruction_set]}, torch {versions[torch]}, \
torchjd {versions[torchjd]}."""


def in_millions(value: Any, name: str = "") -> Any:
    """Converts bytes to MB, and numbers of elements to millions."""
    if isinstance(value, dict):
        return {k: in_millions(v, f"{name} {k}") for k, v in value.items()}
    return value / 1e6 if re.search("[ _]bytes| numel", name) else value


def last(name: str, network: str | None = None) -> dict[str, Any]:
    """The last record that contains the network and comes from a clean checkout."""
    text = (RESULTS / f"{name}.jsonl").read_text().replace('"textbook PCGrad": {', '"textbook": {')
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        record["networks"] = {None, *(c.get("network") for c in record["cases"])}
        record["name"], record["cases"] = name, [*map(in_millions, record["cases"])]
    clean = [r for r in records if not r["commit"].endswith("-dirty")]
    return next(r for r in reversed(clean) if network in r["networks"])


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
"""By step of `price`: the library, the label, and the peer in `methods` ("" for cs_kernels)."""


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
        ours = surgeries.get(words)
        if ours and peer is not None:
            ratio = ours["peers"][peer]["ratio"] if peer else 1.0
            row["surgery"] = ours["milliseconds"]["step"] * ratio
        rows.append(row)
    return rows


HELPS = {
    "three digits that overlap, accuracy in %": (
        ("digits", "three/", "mean %"),
        ("UPGrad", "NashMTL"),
        ("Sum+steps", "three times the steps"),
    ),
    "two digits, one loss multiplied by 0.1, accuracy in %": (
        ("digits", "unequal/", "mean %"),
        ("UPGrad", "NashMTL"),
        ("Sum+steps", "twice the steps"),
    ),
    "a pretrained network finds boxes, average precision in %": (
        ("finetune", "", "boxes: AP %↑"),
        ("UPGrad", "PCGrad"),
        ("Sum+steps", "twice the steps"),
    ),
    "the same network labels pixels, mean IoU in %": (
        ("finetune", "", "pixels: mIoU %↑"),
        ("UPGrad", "PCGrad"),
        ("Sum+steps", "twice the steps"),
    ),
    "a survey with missing labels, gain over single-task networks in %": (
        ("tabular", "", "Delta m in %"),
        ("UPGrad", "NashMTL"),
        ("Sum+UncertaintyWeights", "learned weights"),
    ),
    "the Helmholtz equation, error in %, lower is better": (
        ("pinn", "helmholtz/", "relative L2 error, %↓"),
        ("UPGrad", "NashMTL"),
        ("tuned weights", "tuned weights"),
    ),
    "unlearning one text, loss of a text to keep (1.25 before), lower is better": (
        ("protect", "ascent/", "documentation"),
        ("Protect", "SAGO"),
        ("Sum, times 10", "ten times the loss to keep, three times the steps,"),
    ),
}
"""By problem: file, prefix of rows, and column of the records; methods; a row without surgery."""


def trainings() -> str:
    """The gains of surgery on each problem, beside gains of the plain sum by other means."""
    rows = []
    for problem, ((file, prefix, column), methods, (other, words)) in HELPS.items():
        lines = [
            [*map(str.strip, line.strip("|").split("|"))]
            for line in (USES / f"{file}.md").read_text().splitlines()
            if line.startswith("|")
        ]
        values = {line[0]: line[lines[0].index(column)] for line in lines}
        surgery = ", ".join(f"{method} {values[prefix + method]}" for method in methods)
        rows.append([problem, values[f"{prefix}Sum"], surgery, f"{words} {values[prefix + other]}"])
    header = ["trained on", "plain sum", "with surgery", "plain sum with more steps or weights"]
    text = "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * 4, *rows))
    text = re.sub(r"(\d)-(\d)", r"\1 to \2", text)
    return text.replace(" ± ", "\u00a0±\u00a0")  # A number does not wrap.


def contents(name: str) -> list[str]:
    """A table, followed by a note on its records."""
    if name == "helps":
        note = (
            "Five seeds: means ± half of the 95 % interval, or a median (minimum to maximum). Where"
            " losses share a forward pass, a step with surgery costs (1 + 2K) / 3 plain steps."
        )
        return [trainings(), f"{note} Records: `examples/results/uses`."]
    several = {
        "summary": [("phase2",), ("methods",)],
        "sizes": [("methods", "resnet50")],
    }
    used = [last(*which) for which in several.get(name, [(name,)])]
    for record in used:
        record["threads"] = record["cases"][0].get("threads", record["machine"]["threads"])
    cases = [c for record in used for c in record["cases"]]
    columns = dict(column.split("=") for column in re.split(" *[|\n] *", TABLES.get(name, "=")))
    if name == "summary":
        cases = main_cases(cases)
    if name == "sizes":
        rows: dict[str, dict[str, Any]] = {}
        for c in cases:
            key = f"{c['network']} {c['tasks']}"
            row = rows.setdefault(key, {"network": c["network"], "K": str(c["tasks"])})
            row[c["method"]] = c["peers"]["TorchJD step"]["ratio"]
        cases = [*rows.values()]
    if name == "solvers":
        cases = [{"K": str(c["tasks"]), **c["microseconds"]} for c in cases]
    if name == "price":
        of_ways: dict[tuple[str, str], dict[str, Any]] = {}
        for c in cases:
            row = of_ways.setdefault((c["network"], c["step"]), dict(c))
            row[f"K{c['tasks']}"] = c
        cases = [*of_ways.values()]
    if name == "peers":  # Each peer follows our two steps.
        triples = zip(cases[::3], cases[1::3], cases[2::3], strict=True)
        cases = [{**peer, "ours": ours, "batched": batched} for ours, batched, peer in triples]
    if name in ("limits", "balancer"):
        cases = [c for c in cases if not c["step"].endswith("plain")]
    if name == "ranks":
        cases = [c for c in cases if c["ranks"] > 1 and c["method"] != "PCGrad"]
        for c in cases:
            c["control"] = sum(sent for _, sent in c["by_kind"].pop("control", {}).values())
            for kind in ("reduce-scatter", "all-gather", "all-reduce"):
                sent = sum(of[kind][1] for of in c["by_kind"].values() if kind in of)
                c[kind] = sent / 4e6 / c["numel"]
    if name not in TABLES:
        columns = {k: f"{{{k}{'' if isinstance(v, str) else ':.1f'}}}" for k, v in cases[0].items()}
    return [table(columns, cases), " ".join(map(SOURCE.format_map, used))]


def main_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of ResNet-18 with 4 tasks in float32."""
    main = ("resnet18", 4, "float32")
    return [c for c in cases if (c["network"], c["tasks"], c.get("dtype", main[2])) == main]


def cell(forms: str, case: dict[str, Any]) -> str:
    """The first form whose fields are all in the case, filled in; "-" if there is none."""
    for form in forms.split("/"):
        with suppress(KeyError):
            return form.format_map(case)
    return "-"


def table(columns: dict[str, str], cases: list[dict[str, Any]]) -> str:
    """A table with padded columns; columns of numbers are right-aligned."""
    texts = []
    for header, form in columns.items():
        cells = [cell(form, case) for case in cases]
        width = max(3, *map(len, [header, *cells]))
        right = not any(re.match("[A-Za-z]", text) for text in cells)
        rule = "-" * (width - right) + ":" * right
        texts.append([f"{text:{'>' if right else '<'}{width}}" for text in (header, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*texts, strict=True))


def panels_of_times(name: str) -> dict[str, dict[str, dict[str, float]]]:
    """Times by panel, row and label: Phase 2 in all cases, or all methods in the main case.

    For Phase 2, each dtype has a panel.
    """
    cases = [c for c in last("phase2")["cases"] if c["network"] in NETWORKS]
    if name == "methods":
        (of_phase2,) = map(times, main_cases(cases))
        of_phase2.pop("reference")
        cases = main_cases(last(name, "resnet18")["cases"])
        return {"": {"Phase 2": of_phase2, **{c["method"]: times(c) for c in cases}}}
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for c in cases:
        row = f"{NETWORKS[c['network']]}, {c['tasks']} tasks"
        panels.setdefault(c["dtype"], {})[row] = times(c)
    return panels


def draw_times(name: str) -> None:
    """Plots our and the peers' times, relative to a copy of as many bytes."""
    import style

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
    import style

    of_ways: dict[str, dict[int, dict[str, Any]]] = {}
    for case in last("price", "resnet18")["cases"]:
        if case["network"] == "resnet18":
            of_ways.setdefault(case["step"], {})[case["tasks"]] = case
    tasks = [*of_ways["plain"]]
    keys = {"over_plain": "time, in plain steps", "peak_bytes": "memory of gradients, MB"}

    def figure() -> Any:
        figure, axes = style.panels(1, 2, 4.2)
        for ax, (key, label) in zip(axes[0], keys.items(), strict=True):
            lines = {}
            for way, (library, look, title) in WAYS.items():
                values = [of_ways[way][n][key] for n in tasks]
                color = style.LIBRARIES[library]
                ax.plot(tasks, values, look, color=color)
                lines[title] = (values[-1], color)
            if key == "over_plain":
                limit = [(1 + 2 * n) / 3 for n in tasks]
                color = style.LIBRARIES["limit"]
                ax.plot(tasks, limit, "--", color=color)
                lines["(1 + 2K) / 3"] = (limit[-1], color)
            else:  # The line above serves both: a step that solves keeps as many gradients.
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
    "peak_bytes": ("gradients", "MB", ".0f", (100, 1000)),
    "surgery": ("surgery alone", "ms", ".0f", (10, 100, 1000)),
}
"""Panels of the front's picture, by key of a row: title, unit, number format, ticks."""
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 10, "va": "center"}


def draw_front() -> None:
    """Plots whole steps, their memory, and the surgery alone, for 4 tasks of ResNet-18."""
    import style

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


if __name__ == "__main__":
    block = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.DOTALL)
    for page in PAGES:
        now = page.read_text()
        wanted = block.sub(lambda m: "\n\n".join([m[1], *contents(m[2])]) + f"\n{m[3]}", now)
        if sys.argv[1:] != ["--check"]:
            page.write_text(wanted)
        elif now != wanted:
            sys.exit(f"{page} differs from the records")
    if find_spec("matplotlib"):
        sys.path.append(str(ROOT / "examples"))
        draw_times("phase2")
        draw_times("methods")
        draw_price()
        draw_front()
