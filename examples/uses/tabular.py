"""Prediction of three facts about marriages from a survey, with most labels missing.

Fair's table of 1978 (6,366 married women, in statsmodels) has targets of different types that can
be predicted from the other columns: the years of marriage (regression), the number of children (a
count), and whether there was an affair (a class). The targets are related: longer marriages have
more children and affairs. So a task with few labels may benefit from the representation of a task
with many. The women's rating of the marriage is an input, since the other columns hardly predict
it. RAND's table of health insurance has more rows, but contains the same people in several years
without identifying them.

All multi-task rows have the same network with task-specific normalization, so that only the method
differs between them.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import style
import torch
from matplotlib.figure import Figure
from sklearn.metrics import mean_poisson_deviance, r2_score, roc_auc_score
from statsmodels.datasets import fair
from torch import Tensor, nn
from torch.nn import functional

import cs_kernels as cs
from uses.use import Column, Result, Use, delta_m, draw_gains, seeded

TASKS = ("years", "kids", "affair")
"""No task may be called "children": modules have a method of that name."""
KEPT = {"years": 1.0, "kids": 0.03, "affair": 0.3}
"""The share of training rows with a label for the task."""
LOWER = ("kids",)
"""The tasks whose metric should be low."""
TRAINED, BATCH, WIDTH, RATE, DECAY = 4000, 64, 64, 2e-3, 1.0
"""Chosen with seeds 100 and 101: with so few labels, more epochs or a weaker decay overfit."""
EPOCHS, QUICK_EPOCHS = 15, 2

METHODS = {
    "Sum": (cs.Sum, cs.Joint),
    "Phase 1": (cs.ConnectionStrength, cs.Sequential),
    "Phase 2": (cs.ConnectionStrength, cs.Joint),
    "Mixed": (cs.ConnectionStrength, cs.Mixed),
    "PCGrad": (cs.PCGrad, cs.Joint),
    "UPGrad": (cs.UPGrad, cs.Joint),
    "NashMTL": (cs.NashMTL, cs.Joint),
    "CAGrad": (cs.CAGrad, cs.Joint),
    "Sum+UncertaintyWeights": (cs.Sum, cs.Joint),
}
ROWS = ("Single-task", *METHODS)


class Rows(NamedTuple):
    """Rows of the table: inputs [N, D], and per task targets [N] and masks of labels [N]."""

    inputs: Tensor
    targets: dict[str, Tensor]
    known: dict[str, Tensor]

    def __getitem__(self, index: Any) -> "Rows":
        """Some of the rows."""
        targets, known = (
            {task: values[index] for task, values in by_task.items()}
            for by_task in (self.targets, self.known)
        )
        return Rows(self.inputs[index], targets, known)

    def labeled(self, tasks: Sequence[str]) -> list[str]:
        """The tasks for which at least one row has a label."""
        return [task for task in tasks if self.known[task].any()]


def split(seed: int) -> tuple[Tensor, Tensor]:
    """The indices of the training rows and of the held-out rows."""
    order = torch.randperm(6366, generator=seeded(seed))
    return order[:TRAINED], order[TRAINED:]


def load(seed: int) -> tuple[Rows, Rows]:
    """Training rows with some of their labels, and held-out rows with all labels."""
    table = fair.load_pandas().data
    numbers = torch.tensor(table[["age", "religious", "educ", "rate_marriage"]].to_numpy()).float()
    jobs = torch.tensor(table[["occupation", "occupation_husb"]].to_numpy()).long() - 1
    years = torch.tensor(table["yrs_married"].to_numpy()).float()
    train, test = split(seed)
    # Scales by statistics of the training rows.
    numbers = (numbers - numbers[train].mean(0)) / numbers[train].std(0)
    rows = Rows(
        torch.cat([numbers, functional.one_hot(jobs, 6).flatten(1)], 1),
        {
            "years": (years - years[train].mean()) / years[train].std(),
            "kids": torch.tensor(table["children"].to_numpy()).float(),
            "affair": torch.tensor(table["affairs"].to_numpy() > 0).float(),
        },
        dict.fromkeys(TASKS, torch.ones(len(table), dtype=torch.bool)),
    )
    generator = seeded(seed + 1_000_000)
    known = {task: torch.rand(TRAINED, generator=generator) < KEPT[task] for task in TASKS}
    return rows[train]._replace(known=known), rows[test]


class Network(nn.Module):
    """Two hidden layers with batch normalization, and a linear head per task."""

    def __init__(self, inputs: int, tasks: Sequence[str]) -> None:
        super().__init__()
        layers = []
        for size in (inputs, WIDTH):
            layers += [nn.Linear(size, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
        self.trunk = cs.nn.convert_task_batchnorm(nn.Sequential(*layers), list(tasks))
        self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, 1) for task in tasks})

    def forward(self, inputs: Tensor, task: str) -> Tensor:
        """[N]: the mean, the logarithm of the mean of a count, or the logit of a class."""
        return self.heads[task](self.trunk(inputs)).squeeze(1)


def masked_loss(task: str, outputs: Tensor, targets: Tensor, known: Tensor) -> Tensor:
    """The mean over the rows with a label; there must be one, or the mean would be NaN."""
    outputs, targets = outputs[known], targets[known]
    if task == "years":
        return functional.mse_loss(outputs, targets)
    if task == "kids":
        return functional.poisson_nll_loss(outputs, targets)
    return functional.binary_cross_entropy_with_logits(outputs, targets)


def make_optimizer(
    row: str, network: Network, tasks: Sequence[str], seed: int, epochs: int
) -> cs.MultiTaskOptimizer:
    """The MultiTaskOptimizer of a row; single-task networks use the plain sum."""
    method, schedule = METHODS.get(row, METHODS["Sum"])
    weighting = None
    if "UncertaintyWeights" in row:
        # A Poisson loss is a likelihood without a scale parameter, like a classification loss.
        kinds = {task: "regression" if task == "years" else "classification" for task in tasks}
        weighting = cs.UncertaintyWeights(kinds)
    groups: list[dict[str, Any]] = [{"params": list(network.parameters())}]
    if weighting:
        groups.append({"params": weighting.parameters(), "weight_decay": 0.0})
    return cs.MultiTaskOptimizer(
        network.trunk,
        torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY),
        list(tasks),
        method(seed=seed) if method is cs.PCGrad else method(),
        schedule=schedule(epochs, seed=seed) if schedule is cs.Mixed else schedule(),
        weighting=weighting,
    )


def step(opt: cs.MultiTaskOptimizer, network: Network, batch: Rows) -> dict[str, Tensor]:
    """Makes a step with the tasks that have labels in the batch; returns their losses.

    Rows without a label count in the batch normalization, but not in the loss.
    """
    labeled = batch.labeled(opt.tasks)
    if not labeled:
        return {}
    return opt.step(
        lambda task: masked_loss(
            task, network(batch.inputs, task), batch.targets[task], batch.known[task]
        ),
        tasks=labeled,
    )


@torch.no_grad()
def evaluate(network: Network, tasks: Sequence[str], rows: Rows) -> dict[str, float]:
    """R2 of the years, mean Poisson deviance of the children, and AUC of affairs."""
    metrics = {"years": r2_score, "kids": mean_poisson_deviance, "affair": roc_auc_score}
    values = {}
    network.eval()
    for task in tasks:
        with cs.nn.active_task(network.trunk, task):
            outputs = network(rows.inputs, task)
        outputs = outputs.exp() if task == "kids" else outputs
        values[task] = float(metrics[task](rows.targets[task].cpu().numpy(), outputs.cpu().numpy()))
    network.train()
    return values


def fit(row: str, tasks: Sequence[str], seed: int, quick: bool) -> Result:
    """Trains a network for some tasks; returns metrics, seconds, and the channels of each task."""
    train_rows, test_rows = load(seed)
    epochs = QUICK_EPOCHS if quick else EPOCHS
    # Other rows also train a seed's single-task networks, which must be the same.
    torch.manual_seed(seed)
    network = Network(train_rows.inputs.shape[1], tasks)
    opt = make_optimizer(row, network, tasks, seed, epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt.optimizer, epochs)
    start, priority = time.perf_counter(), []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for index in torch.randperm(TRAINED).split(BATCH):
            step(opt, network, train_rows[index])
        cosine.step()
        if row == "Mixed":
            top = torch.cat(list(opt.priority().values()))
            priority.append(torch.bincount(top, minlength=len(tasks)).tolist())
    seconds = time.perf_counter() - start
    return {**evaluate(network, tasks, test_rows), "seconds": seconds, "priority": priority}


@cache
def single_tasks(seed: int, quick: bool) -> Result:
    """The metrics of one network per task, and their total seconds."""
    parts = [fit("Single-task", [task], seed, quick) for task in TASKS]
    metrics = {task: part[task] for task, part in zip(TASKS, parts, strict=True)}
    return {**metrics, "seconds": sum(part["seconds"] for part in parts)}


def train(row: str, seed: int, quick: bool) -> Result:
    """Trains a row of the table."""
    baseline = single_tasks(seed, quick)
    if row == "Single-task":
        return baseline
    result = fit(row, TASKS, seed, quick)
    return {**result, "delta_m": delta_m(result, baseline, TASKS, LOWER)}


def draw(results: Mapping[str, list[Result]], folder: Path) -> None:
    """Plots Delta m of each row."""

    def gains() -> Figure:
        figure, axes = style.panels(1, 1, 3.2)
        rows = {row: of_row for row, of_row in results.items() if row != "Single-task"}
        ax = axes[0, 0]
        draw_gains(ax, {row: [run["delta_m"] for run in of_row] for row, of_row in rows.items()})
        ax.set(xlabel="%, with 95 % intervals", title=r"$\Delta_m$ against single-task networks")
        return figure

    style.save(folder / "tabular.svg", gains)


USE = Use(
    name="tabular",
    title="Fair's survey",
    rows=ROWS,
    train=train,
    columns=(
        Column("years", "years: R2 ↑", 3),
        Column("kids", "kids: deviance ↓", 3),
        Column("affair", "affair: AUC ↑", 3),
        Column("delta_m", "Delta m in %", 1),
        Column("seconds", "seconds", 1),
    ),
    draw=draw,
)
