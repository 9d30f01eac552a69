"""Logs gradients and surgery of every parameter to TensorBoard or Weights & Biases.

Logging does not change training: in float64, parameters match a plain loop's to within 1e-12. Show
the logs with tensorboard --logdir runs, or wandb sync runs/wandb/offline-run-...
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

EVERY = 2  # Reading numbers synchronizes with the device; log every 50 steps or so in real runs.


@contextmanager
def logger(kind: str, folder: Path) -> Iterator[Callable[[int, dict[str, float]], object]]:
    """Yields a function `log(step, numbers)`."""
    if kind == "wandb":
        import wandb

        folder.mkdir(parents=True, exist_ok=True)  # Otherwise, W&B uses another one.
        with wandb.init(project="recipes", mode="offline", dir=folder) as run:
            yield lambda step, values: run.log(values, step)
    else:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:
            yield lambda step, values: [writer.add_scalar(n, x, step) for n, x in values.items()]


def by_parameter(opt: cs.MultiTaskOptimizer) -> dict[str, float]:
    """Norms and cosines of the tasks' gradients, and the removed share of their sum."""
    conflicts, report = opt.conflicts(), opt.report()
    if report.phase == 1:  # The tasks were updated in turn.
        return {}
    rows = [conflicts.tasks.index(task) for task in report.tasks]  # Tasks with labels.
    gramians = conflicts.gramians[:, rows][..., rows]  # [parameters, tasks, tasks].
    weights, values = report.task_weights, {}
    if weights is not None and weights.ndim == 1:  # A Gramian method, groups="all".
        both = torch.ones_like(weights), 1 - weights  # The plain sum, and the removed part.
        whole, removed = ((w @ gramians @ w).clamp(min=0).sqrt() for w in both)
        values = {f"removed/{n}": x for n, x in zip(conflicts.names, removed / whole, strict=True)}
    for p, name in enumerate(conflicts.names):
        for i, task in enumerate(report.tasks):
            values[f"gradient_norm/{name}/{task}"] = gramians[p, i, i].sqrt()
            for j, other in zip(rows[:i], report.tasks, strict=False):
                values[f"cosine/{name}/{other},{task}"] = conflicts.cosines[p, rows[i], j]
    floats = torch.stack([*values.values()]).tolist()  # Synchronizes once.
    return {n: x for n, x in zip(values, floats, strict=True) if x == x}  # NaN if frozen.


def train(kind: str = "tensorboard", folder: Path = Path("runs")) -> tuple[Network, list]:
    """Trains, and logs every few steps."""
    network = make_network(normalized=False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, cs.PCGrad())
    opt.count_conflicts()  # From now on, each joint step measures the gradients by parameter.
    history = []
    with logger(kind, folder) as log:
        for step, (images, targets) in enumerate(4 * make_batches()):
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            history.append(opt.backward(losses))
            adam.step()
            if step % EVERY == 0:
                log(step, by_parameter(opt) | opt.report().scalars())
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["tensorboard", "wandb"], default="tensorboard")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    for losses in train(**vars(parser.parse_args()))[1]:
        print(numbers(losses))
