"""Trains three tasks of one photograph with every phase of the method, and prints the table.

    python examples/demo.py [--quick] [--methods NAME ...|all] [--seeds 0 1 ...] [--device cuda]
        [--out FOLDER]
    python examples/demo.py --draw FILE [--out FOLDER]
    torchrun --standalone --nproc-per-node=2 examples/demo.py ...

Every row has the same network, initial weights, crops, number of batches and learning rate. As in
the paper, Phase 1 makes one optimizer step per task, and Phase 2 one for all tasks.

With torchrun, each batch is the one that a single process would draw; every process trains on its
share, and the first one prints and writes. Batch normalization, and the shares of known pixels and
edges in the losses, are computed per process, so results differ from a single process's.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Silences the profiler.

import plots
import torch
import torch.distributed as dist
from network import Head, Trunk
from paper.losses import loss
from paper.metrics import delta_m, make_metric
from paper.tasks import IGNORE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stereo import DISPARITY_SCALE, MEASURES, TASKS, Crops, Scene, load, stack
from table import cell, markdown, show
from torch import nn

import cs_kernels as cs


@dataclass(frozen=True)
class Settings:
    """The length and the input sizes of the training."""

    epochs: int = 20
    steps: int = 8
    crop: int = 96
    batch: int = 6
    rate: float = 2e-3


QUICK = Settings(epochs=6, steps=4, crop=64, batch=4)


@dataclass(frozen=True)
class Row:
    """The method, schedule and loss weighting of one row of the table."""

    method: Callable[[], cs.Method] = cs.ConnectionStrength
    schedule: Callable[[Settings, int], cs.Schedule] = lambda settings, seed: cs.Joint()
    weighting: Callable[[], cs.Weighting] = cs.EqualWeights


def _mixed(settings: Settings, seed: int) -> cs.Schedule:
    return cs.Mixed(settings.epochs, seed)


def _uncertainty() -> cs.Weighting:
    return cs.UncertaintyWeights(
        {"disparity": "regression", "normals": "regression", "edges": "classification"}
    )


ABLATION = {
    "Sum": Row(cs.Sum),
    "Phase 1 only": Row(schedule=lambda settings, seed: cs.Sequential()),
    "Phase 2 only": Row(),
    "Switch": Row(schedule=lambda settings, seed: cs.Switch(settings.epochs // 2)),
    "Mixed": Row(schedule=_mixed),
}
OTHERS = {
    "PCGrad": Row(cs.PCGrad),
    "CAGrad": Row(cs.CAGrad),
    "MGDA": Row(cs.MGDA),
    "AlignedMTL": Row(cs.AlignedMTL),
    "NashMTL": Row(cs.NashMTL),
    "IMTLG": Row(cs.IMTLG),
    "UPGrad": Row(cs.UPGrad),
    "FairGrad": Row(cs.FairGrad),
    "ConFIG": Row(cs.ConFIG),
    "GradVac": Row(cs.GradVac),
    "NTKMTL": Row(cs.NTKMTL),
    "DBMTL": Row(cs.DBMTL),
    "GradDrop": Row(cs.GradDrop),
    "Sum+uncertainty": Row(cs.Sum, weighting=_uncertainty),
    "Sum+DWA": Row(cs.Sum, weighting=cs.DynamicWeightAverage),
    "Sum+random": Row(cs.Sum, weighting=cs.RandomWeights),
    "Sum+STCH": Row(cs.Sum, weighting=cs.SmoothTchebycheff),
    "Sum+FAMO": Row(cs.Sum, weighting=cs.FAMO),
    "Sum+GradNorm": Row(lambda: cs.Sum(separate=True), weighting=cs.GradNorm),
    "Mixed+uncertainty": Row(schedule=_mixed, weighting=_uncertainty),
    "Mixed+DWA": Row(schedule=_mixed, weighting=cs.DynamicWeightAverage),
}
ROWS = {**ABLATION, **OTHERS}


@dataclass(frozen=True)
class Ranks:
    """The processes that train one network together, and the rank of this one."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


def start_ranks(device: str) -> Ranks:
    """Joins the processes that torchrun started, or returns this process alone."""
    torch.set_default_device(device)
    if "WORLD_SIZE" not in os.environ:
        return Ranks()
    if device == "cuda":
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


class Run:
    """The training of one network."""

    def __init__(
        self,
        tasks: list[str],
        row: Row,
        settings: Settings,
        seed: int,
        scene: Scene,
        ranks: Ranks,
        convert: Callable[[nn.Module, list[str]], nn.Module] = cs.nn.convert_task_batchnorm,
    ) -> None:
        torch.manual_seed(seed)
        self.tasks = tasks
        self.ranks = ranks
        self.settings = settings
        self.trunk = convert(Trunk(), tasks)
        heads = {name: Head(task.channels) for name, task in TASKS.items()}
        self.heads = nn.ModuleDict({task: heads[task] for task in tasks})
        weighting = row.weighting()
        self.adam = torch.optim.Adam(
            [*self.trunk.parameters(), *self.heads.parameters(), *weighting.parameters()],
            lr=settings.rate,
        )
        self.rate = torch.optim.lr_scheduler.PolynomialLR(self.adam, settings.epochs, power=0.9)
        self.opt = cs.MultiTaskOptimizer(
            self.trunk,
            self.adam,
            tasks,
            row.method(),
            row.schedule(settings, seed),
            weighting,
            process_group=ranks.group,
        )
        self.crops = Crops(scene, settings.crop, settings.batch, seed, ranks.rank, ranks.size)
        self.losses: dict[str, list[float]] = {task: [] for task in tasks}
        self.priority: list[dict[str, list[int]]] = []
        """By epoch and layer, the number of channels with each task as top-priority task."""
        self.conflicts: list[dict[str, float]] = []
        """By epoch and layer, the share of channel groups and other tasks in conflict."""
        self.modules: list[dict[str, float]] = []
        """By epoch and module, the share of steps and pairs of tasks in conflict."""
        self.cosines: list[dict[str, float]] = []
        """By epoch and pair of tasks, mean cosines, for Gramian methods."""
        self.phases: list[int] = []

    def step(self, opt: cs.MultiTaskOptimizer) -> dict[str, torch.Tensor]:
        """Makes a step on a new batch of crops."""
        batch = self.crops.draw()

        def closure(task: str) -> torch.Tensor:
            output = self.heads[task](self.trunk(batch.picture))
            return loss(TASKS[task], output, batch.targets[task])

        return opt.step(closure)

    def train(self, name: str, progress: Progress) -> None:
        """Trains all epochs, with a progress bar."""
        bar = progress.add_task(name, total=self.settings.epochs * self.settings.steps, status="")
        for epoch in range(self.settings.epochs):
            self.opt.start_epoch(epoch)
            self.phases.append(self.opt.phase)
            sums = dict.fromkeys(self.tasks, 0.0)
            reports = []
            if counts := self.phases[-1] == 2 and self.opt.method.separate_gradients:
                self.opt.count_conflicts()
            for _ in range(self.settings.steps):
                for task, value in self.step(self.opt).items():
                    sums[task] += value.item() / self.settings.steps
                reports.append(self.opt.report())
                status = " ".join(
                    f"{task} {value[-1]:.3f}" for task, value in self.losses.items() if value
                )
                progress.update(bar, advance=1, status=f"phase {self.phases[-1]}  {status}")
            for task, value in sums.items():
                self.losses[task].append(value)
            self.priority.append(
                {
                    layer: priority.bincount(minlength=len(self.tasks)).tolist()
                    for layer, priority in self.opt.priority().items()
                }
            )
            self.watch(reports)
            self.modules.append(self.conflict_shares() if counts else {})
            self.rate.step()

    def watch(self, reports: list[cs.Report]) -> None:
        """Records means over the steps of an epoch, all of which have the same phase."""
        conflicts, cosines = {}, {}
        if reports[0].products is not None:
            pairs = len(self.tasks) - 1
            shares = [
                report.conflicts.sum((1, 2)) / (pairs * (report.channels > 0).sum(1))
                for report in reports
            ]
            means = torch.stack(shares).mean(0).tolist()
            conflicts = dict(zip(reports[0].layers, means, strict=True))
        # With `update_every`, only steps that solve for task weights have cosines.
        known = [report.cosines for report in reports if report.cosines is not None]
        if known:
            mean = torch.stack(known).mean(0)
            cosines = {
                f"{a}, {b}": mean[i, j].item()
                for i, a in enumerate(self.tasks)
                for j, b in enumerate(self.tasks[:i])
            }
        self.conflicts.append(conflicts)
        self.cosines.append(cosines)

    def conflict_shares(self) -> dict[str, float]:
        """Shares of conflicts in steps with separate gradients; empty if the epoch has none."""
        found = self.opt.conflicts().by_module()
        a, b = torch.triu_indices(len(self.tasks), len(self.tasks), 1)
        shares = found.share[:, a, b].mean(1)
        return {} if shares.isnan().any() else dict(zip(found.names, shares.tolist(), strict=True))

    @torch.no_grad()
    def evaluate(self, scene: Scene) -> dict[str, dict[str, float]]:
        """The metrics of every task on the whole evaluation region."""
        self.trunk.eval()
        batch = stack([scene])
        result = {}
        for task in self.tasks:
            with cs.nn.active_task(self.trunk, task):
                output = self.heads[task](self.trunk(batch.picture))
            target = batch.targets[task]
            if task == "disparity":
                known = target != IGNORE
                output, target = output * DISPARITY_SCALE, target * DISPARITY_SCALE
                target = target.where(known, IGNORE)
            metric = make_metric(TASKS[task], all_ranks=False)
            metric.update(output, target)
            result[task] = metric.compute()
        self.trunk.train()
        return result

    def time(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step of the last phase, and of its parts, after training.

        The step is timed by the clock. The times of surgery, including moving the gradients, and of
        the optimizer come from a profile of further steps; they include the profiler's overhead,
        and on a GPU they are host times.
        """
        schedule = cs.Joint() if self.phases[-1] == 2 else cs.Sequential()
        opt = cs.MultiTaskOptimizer(
            self.trunk,
            self.adam,
            self.tasks,
            self.opt.method,
            schedule,
            self.opt.weighting,
            process_group=self.ranks.group,
        )
        self.step(opt)
        whole = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step(opt)
            if torch.get_default_device().type == "cuda":
                torch.cuda.synchronize()
            whole.append(1e3 * (time.perf_counter() - start))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                self.step(opt)
        spent = {event.key: event.cpu_time_total / 1e3 / steps for event in profile.key_averages()}
        surgery = spent.get("cs_kernels.collect", 0.0) + spent.get("cs_kernels.surgery", 0.0)
        update = sum(value for key, value in spent.items() if key.startswith("Optimizer.step"))
        step = statistics.median(whole)
        return {
            "step": step,
            "forward_backward": step - surgery - update,
            "surgery": surgery,
            "optimizer": update,
        }


def train_all(
    settings: Settings, names: list[str], seed: int, console: Console, ranks: Ranks
) -> dict[str, Any]:
    """Trains single-task networks and every row for one seed; only the first rank has results."""
    train, test = load()
    results: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    is_first = ranks.rank == 0
    shows_bars = is_first and console.is_terminal
    with Progress(*columns, console=console, disable=not shows_bars) as progress:
        alone: dict[str, dict[str, float]] = {}
        timing: list[dict[str, float]] = []
        losses: dict[str, list[float]] = {}
        for task in TASKS:
            run = Run([task], Row(cs.Sum), settings, seed, train, ranks)
            run.train(f"only {task}", progress)
            alone.update(run.evaluate(test) if is_first else {})
            losses.update(run.losses)
            timing.append(run.time(settings.steps))
        results["Single-task"] = {
            "metrics": alone,
            "losses": losses,
            "time": {key: sum(t[key] for t in timing) for key in timing[0]},
        }
        for name in names:
            run = Run(list(TASKS), ROWS[name], settings, seed, train, ranks)
            run.train(name, progress)
            results[name] = {
                "metrics": run.evaluate(test) if is_first else {},
                "losses": run.losses,
                "priority": run.priority,
                "conflicts": run.conflicts,
                "modules": run.modules,
                "cosines": run.cosines,
                "phases": run.phases,
                "time": run.time(settings.steps),
            }
            if run.opt.method.prioritizes:
                results[name]["coverage"] = str(run.opt.coverage())
            if not console.is_terminal:
                console.print(f"{name}: trained")
    if not is_first:
        return {}
    for result in results.values():
        result["delta_m"] = delta_m(result["metrics"], alone, MEASURES)
    return results


def table_rows(runs: list[dict[str, Any]], *, gains: bool) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: means over seeds, with deviations if there are several.

    Without gains, there is no comparison with single-task networks.
    """
    head = ["method", *(measure.title for measure in MEASURES)]
    head += ["Δm %↑"] * gains + ["fwd+bwd ms", "surgery ms", "surgery %"]
    rows = []
    for name in runs[0]:
        row = [name]
        for measure in MEASURES:
            values = [run[name]["metrics"][measure.task][measure.name] for run in runs]
            row.append(cell(values, measure.digits))
        row += [cell([run[name]["delta_m"] for run in runs], 2, "+")] * gains
        spent = [run[name]["time"] for run in runs]
        row.append(cell([t["forward_backward"] for t in spent], 1))
        row.append(cell([t["surgery"] for t in spent], 2))
        row.append(cell([100 * t["surgery"] / t["step"] for t in spent], 2))
        rows.append(row)
    return head, rows


def draw(runs: dict[str, Any], out: Path) -> None:
    """Draws the pictures of one seed."""
    tasks, names = list(TASKS), [name for name in runs if name != "Single-task"]
    plots.losses(runs, tasks, out / "losses.svg")
    pair = [name for name in ("Phase 1 only", "Mixed") if name in runs] or names[:2]
    plots.priority(runs, tasks, pair, out / "priority.svg")
    label = "% of channel groups and other tasks in conflict"
    plots.heat_maps(runs, "conflicts", label, out / "conflicts.svg")
    label = "% of steps and pairs of tasks in conflict"
    plots.heat_maps(runs, "modules", label, out / "modules.svg")
    plots.cosines(runs, out / "cosines.svg")
    pair = [name for name in ("Phase 1 only", "Phase 2 only") if name in runs] or names[:2]
    plots.correlation(runs, tasks, pair, out / "correlation.svg")


def main() -> None:
    """Trains, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute, to see whether it runs")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[*ROWS, "all"],
        default=list(ABLATION),
        metavar="NAME",
        help=f"rows of the table: {', '.join(ROWS)}, or all; by default the first five",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--draw", type=Path, help="only draw the pictures of a results.json")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.draw.read_text())["runs"][-1], options.out)
        return
    settings = QUICK if options.quick else Settings()
    ranks = start_ranks(options.device)
    console = Console(quiet=ranks.rank > 0)
    start = time.perf_counter()
    names = list(ROWS) if "all" in options.methods else options.methods
    runs = [train_all(settings, names, seed, console, ranks) for seed in options.seeds]
    if ranks.group is not None:
        dist.destroy_process_group()
    if ranks.rank > 0:
        return

    # A quick run hardly trains its single-task networks, so gains would mean nothing.
    head, rows = table_rows(runs, gains=not options.quick)
    title = "Evaluation part; disparity in pixels, normals in degrees and %, edges in %"
    show(console, title, head, rows)
    baseline = "a quick run has no gains" if options.quick else "Δm is against Single-task"
    console.print(f"* the task's primary metric; ↓ lower is better, ↑ higher; {baseline}.")
    console.print("A step is one batch for all tasks; surgery includes moving the gradients.")
    coverages = {row.pop("coverage") for run in runs for row in run.values() if "coverage" in row}
    for coverage in sorted(coverages):
        console.print(coverage)

    options.out.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": vars(settings),
        "seeds": options.seeds,
        "ranks": ranks.size,
        "device": options.device,
        "torch": torch.__version__,
        "runs": runs,
    }
    (options.out / "results.json").write_text(json.dumps(record, indent=1))
    (options.out / "results.md").write_text(markdown(head, rows))
    draw(runs[-1], options.out)
    console.print(f"written to {options.out} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
