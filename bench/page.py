"""Writes the tables of README.md and docs/benchmarks.md, and the plots, from bench/results/.

    python bench/page.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With `--check`, nothing is
written, and the exit status is 1 if a page differs. Only the plots need more than the standard
library.
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
PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
PEERS = """x TorchJD step={peers[TorchJD step][ratio]:.1f}
    x TorchJD matrix={peers[TorchJD matrix][ratio]:.1f} | x textbook={peers[textbook][ratio]:.1f}"""
TABLES = {
    "summary": f"""method={{method}}/Phase 2
        ms={{milliseconds[step]:.1f}}/{{milliseconds[p50]:.1f}}
        x limit={{times_the_limit:.2f}} | {PEERS}
        syncs={{synchronizations[ours]}} | TorchJD's syncs={{synchronizations[TorchJD]}}""",
    "front": """ResNet-18, 4 tasks={library}: {step}
        surgery alone, ms={surgery:.1f} | whole step, in plain steps={over_plain:.2f}
        MB={peak_bytes:.0f}, then {between_peak_bytes:.0f}/{peak_bytes:.0f}""",
    "phase2": f"""network={{network}} | K={{tasks}} | dtype={{dtype}} | ms={{milliseconds[p50]:.2f}}
        copy GB/s={{copy_gigabytes_per_second:.1f}} | x limit={{times_the_limit:.2f}} | {PEERS}
        x reference={{peers[reference][ratio]:.1f}}""",
    "steps": """method={method} | step ms={milliseconds:.1f} | surgery ms={surgery_milliseconds:.2f}
        of the step={surgery_share:.2%} | over Phase 1={over_phase_1:+.1%}""",
    "price": """network={network} | step={step} | x, 2 tasks={K2[over_plain]:.2f}
        x, 4 tasks={K4[over_plain]:.2f} | x, 8 tasks={K8[over_plain]:.2f}
        MB, 2 tasks={K2[peak_bytes]:.0f} | MB, 4 tasks={K4[peak_bytes]:.0f}
        MB, 8 tasks={K8[peak_bytes]:.0f} | MB between={K8[between_peak_bytes]:.0f}""",
    "limits": """network={network} | step={step} | K={tasks} | ms={milliseconds:.0f}
        x plain={over_plain:.2f} | limit={limit:.2f} | x plain / limit={over_limit:.2f}
        MB={peak_bytes:.0f}""",
    "features": """K={tasks} | plain ms={milliseconds[plain]:.1f}
        exact ms={milliseconds[all]:.1f} | features ms={milliseconds[features]:.1f}
        exact / features={ratio:.2f} | features / plain={over_plain:.2f}
        plain MB={peak_bytes[plain]:.1f} | exact MB={peak_bytes[all]:.1f}
        features MB={peak_bytes[features]:.1f} | rows MB={feature_bytes:.2f}""",
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
"""`header=cell` of each column; a case of a record fills in the first form that it has all of."""
SOURCE = """Record: `bench/results/{name}.jsonl`, commit {commit}, {time:.10}, {machine[cpu]}, \
threads {threads}, {machine[instruction_set]}, torch {versions[torch]}, \
torchjd {versions[torchjd]}."""


def in_millions(value: Any, name: str = "") -> Any:
    """Bytes as MB, elements as millions."""
    if isinstance(value, dict):
        return {k: in_millions(v, f"{name} {k}") for k, v in value.items()}
    return value / 1e6 if re.search("[ _]bytes| numel", name) else value


def last(name: str, network: str | None = None) -> dict[str, Any]:
    """The last record of a clean checkout, of those with a network."""
    text = (RESULTS / f"{name}.jsonl").read_text().replace('"textbook PCGrad": {', '"textbook": {')
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        record["networks"] = {None, *(c.get("network") for c in record["cases"])}
        record["name"], record["cases"] = name, [*map(in_millions, record["cases"])]
    clean = [r for r in records if not r["commit"].endswith("-dirty")]
    return next(r for r in reversed(clean) if network in r["networks"])


FRONT = {
    "PCGrad, exact": ("cs_kernels", "PCGrad, exact gradients", None),
    "PCGrad, update_every=10": ("cs_kernels", "PCGrad, `update_every=10`", None),
    "UPGrad, features=z": ("cs_kernels", "UPGrad, `features=z`", None),
    "TorchJD": ("TorchJD", "UPGrad, the fastest of its four ways", "TorchJD step"),
    "LibMTL's way, PCGrad": ("LibMTL", "its way, PCGrad", None),
    "textbook PCGrad": ("by hand", "the PCGrad loop that is copied around", "textbook"),
}
"""By step of `price`: the library, the words, and the peer in `methods` of the surgery alone."""


def front(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ResNet-18 with 4 tasks costs in each library: surgery, step, memory."""
    cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] == 4]
    (pcgrad,) = (c for c in cases if c.get("method") == "PCGrad")
    steps = {c["step"]: c for c in cases if "step" in c}
    ways = (c for step, c in steps.items() if step.startswith("TorchJD"))
    steps["TorchJD"] = min(ways, key=lambda c: c["over_plain"])
    rows = []
    for step, (library, words, peer) in FRONT.items():
        row = {**steps[step], "library": library, "step": words}
        if step == "PCGrad, exact":
            row["surgery"] = pcgrad["milliseconds"]["step"]
        if peer is not None:
            row["surgery"] = pcgrad["milliseconds"]["step"] * pcgrad["peers"][peer]["ratio"]
        rows.append(row)
    return rows


def contents(name: str) -> list[str]:
    """A table and the records that it comes from."""
    several = {
        "front": [("methods", "resnet18"), ("price",)],
        "summary": [("phase2",), ("methods",)],
        "sizes": [("methods", "resnet50")],
    }
    used = [last(*which) for which in several.get(name, [(name,)])]
    for record in used:
        record["threads"] = record["cases"][0].get("threads", record["machine"]["threads"])
    cases = [c for record in used for c in record["cases"]]
    columns = dict(column.split("=") for column in re.split(" *[|\n] *", TABLES.get(name, "=")))
    if name == "front":
        cases = front(cases)
    if name == "summary":  # ResNet-18 with 4 tasks in float32.
        main = ("resnet18", 4, "float32")
        cases = [c for c in cases if (c["network"], c["tasks"], c.get("dtype", main[2])) == main]
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
    if name == "limits":
        cases = [c for c in cases if c["step"] != "plain"]
    if name == "ranks":
        cases = [c for c in cases if c["ranks"] > 1 and c["method"] != "PCGrad"]
        for c in cases:
            c["control"] = sum(sent for _, sent in c["by_kind"].pop("control", {}).values())
            for kind in ("reduce-scatter", "all-gather", "all-reduce"):
                sent = sum(of[kind][1] for of in c["by_kind"].values() if kind in of)
                c[kind] = sent / 4e6 / c["numel"]
    if name not in TABLES:
        columns = {k: f"{{{k}{'' if isinstance(v, str) else ':.1f'}}}" for k, v in cases[0].items()}
    return [table(columns, cases), *map(SOURCE.format_map, used)]


def cell(forms: str, case: dict[str, Any]) -> str:
    """A cell, or "-" for what a case does not have."""
    for form in forms.split("/"):
        with suppress(KeyError):
            return form.format_map(case)
    return "-"


def table(columns: dict[str, str], cases: list[dict[str, Any]]) -> str:
    """In columns of even width; those of numbers are aligned at the right."""
    texts = []
    for header, form in columns.items():
        cells = [cell(form, case) for case in cases]
        width = max(3, *map(len, [header, *cells]))
        right = not any(re.match("[A-Za-z]", text) for text in cells)
        rule = "-" * (width - right) + ":" * right
        texts.append([f"{text:{'>' if right else '<'}{width}}" for text in (header, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*texts, strict=True))


def draw(name: str) -> None:
    """Plots the times of ours and of the peers over that of the limit."""
    import matplotlib.pyplot as plt

    record = last(name, "resnet50" if name == "methods" else None)
    cases = record["cases"]
    if name == "methods":  # "TorchJD matrix" is compared with another time of ours.
        cases = [c for c in cases if c["network"] == "resnet18" and c["tasks"] in (4, 16)]
        cases[0]["peers"].pop("TorchJD matrix")
    labels = [f"{c.get('method', c['network'])}\nK={c['tasks']}" for c in cases]
    labels = [f"{text} {c.get('dtype', '')}" for text, c in zip(labels, cases, strict=True)]
    series = {"limit": [1.0] * len(cases), "ours": [c["times_the_limit"] for c in cases]}
    for peer in cases[0]["peers"]:
        ratios = [c["peers"].get(peer, {}).get("ratio", float("nan")) for c in cases]
        series[peer] = [a * b for a, b in zip(series["ours"], ratios, strict=True)]
    figure, axes = plt.subplots(figsize=(max(7, 1.1 * len(cases)), 4), layout="constrained")
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [x + i * width - 0.4 for x in range(len(cases))]
        axes.bar(places, values, width, align="edge", label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set_ylabel("time / limit of memory")
    axes.set_title(f"{record['machine']['cpu']}, commit {record['commit']}", fontsize=9)
    axes.legend(fontsize=8, ncols=len(series))
    figure.savefig(RESULTS / f"{name}.png", dpi=120)


def draw_price() -> None:
    """Plots whole steps over the plain step, of one method of ours each way, and of the peers."""
    import matplotlib.pyplot as plt

    record = last("price", "resnet18")
    lines: dict[str, dict[int, float]] = {}
    for case in record["cases"]:
        if case["network"] == "resnet18":
            lines.setdefault(case["step"], {})[case["tasks"]] = case["over_plain"]
    tasks = [*lines.pop("plain")]
    first = {label.rpartition(", ")[2]: label for label in reversed(lines)}
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for label in lines:
        if label in first.values():
            axes.plot(tasks, [lines[label][n] for n in tasks], marker="o", label=label)
    axes.plot(tasks, [(1 + 2 * n) / 3 for n in tasks], "k--", label="limit of exact: (1 + 2K) / 3")
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_xticks(tasks)
    axes.set_xlabel("K")
    axes.set_ylabel("x of a plain step")
    axes.set_title(f"{record['machine']['cpu']}, commit {record['commit']}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(RESULTS / "price.png", dpi=120)


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
        draw("phase2")
        draw("methods")
        draw_price()
