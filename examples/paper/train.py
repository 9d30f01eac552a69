"""Trains one network: `python -m paper.train FOLDER --data ROOT`, also under torchrun.

FOLDER contains the run as `run.json`, and receives

- `checkpoint.pt` after every epoch; a resumed run is bit-equal to an uninterrupted one;
- `tensorboard/`: losses, task weights, conflicts, channels by top-priority task, metrics;
- `result.json` at the end: metrics, the history by epoch, the number of parameters, seconds.
"""

import argparse
import fcntl
import inspect
import json
import os
import select
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recipes.atomic import atomic_write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

import cs_kernels as cs
from paper import recon
from paper.datasets import fingerprint, open_dataset
from paper.experiments import Run
from paper.losses import total_loss
from paper.metrics import make_metric
from paper.networks import make_network
from paper.tasks import IGNORE, TASKS, Task

LOG_EVERY = 20
"""Steps between reports in TensorBoard."""


def make_weighting(name: str, tasks: Mapping[str, Task], device: torch.device) -> cs.Weighting:
    """One of the paper's four loss weightings (appendix C)."""
    if name == "tuned":
        return cs.FixedWeights({name: task.weight for name, task in tasks.items()})
    if name == "dwa":
        return cs.DynamicWeightAverage(temperature=2.0)
    if name == "uncertainty":
        kinds = {
            name: "regression" if task.kind in ("depth", "normals") else "classification"
            for name, task in tasks.items()
        }
        return cs.UncertaintyWeights(kinds, device=device)
    return cs.EqualWeights()


def make_schedule(name: str, epochs: int, seed: int) -> cs.Schedule:
    """The schedule of a row."""
    if name == "phase 1":
        return cs.Sequential()
    if name == "switch":
        return cs.Switch(epochs // 2)
    return cs.Mixed(epochs, seed) if name == "mixed" else cs.Joint()


class Training:
    """The training of one network, which resumes from its last checkpoint.

    Args:
        run: The run to train.
        folder: Receives checkpoints, logs and the result.
        root: The folder that contains the data sets.
        conflicts: For Recon, the modules' scores in the run that it builds on.

    Raises:
        ValueError: The run does not fit the number of processes, the batch is larger than the data,
            or the run needs conflicts and has none.

    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        root: Path,
        conflicts: Mapping[str, int] | None = None,
    ) -> None:
        self.run, self.settings, self.folder = run, run.settings, folder
        self.rank, self.ranks, self.device = _place()
        if self.ranks != self.settings.ranks or self.settings.batch % self.ranks:
            raise ValueError(
                f"ranks must be {self.settings.ranks} as in run.json, and divide the batch of"
                f" {self.settings.batch}, got {self.ranks}"
            )
        torch.manual_seed(run.seed)
        self.tasks = {task: TASKS[run.data][task] for task in run.tasks}
        """The tasks in the order of Phase 1."""
        # Ranks exchange whether they have labels while the batch is on the CPU, without waiting for
        # the GPU.
        self.hosts = dist.new_group(backend="gloo") if self.ranks > 1 else None
        self.data = fingerprint(run.data, root)
        """Stored in checkpoints and the result, to identify their data."""
        self._make_network(conflicts)
        self._make_optimizer()
        self._make_loaders(root)
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, dict[str, float]] = {}
        self._load()

    def _make_network(self, conflicts: Mapping[str, int] | None) -> None:
        run, how = self.run, self.run.how
        network = make_network(
            how.network or run.network,
            # Independent of Phase 1's order of tasks, so that initial weights are the same.
            {name: task for name, task in TASKS[run.data].items() if name in self.tasks},
            pretrained=self.settings.pretrained,
            width=self.settings.width,
            task_norm=run.task_norm,
        )
        if how.recon:
            if conflicts is None:
                needed = run.needs()
                assert needed is not None
                raise ValueError(f"{run.name} needs the conflicts of {needed.name}")
            network = recon.specialize(network, recon.choose(conflicts), list(self.tasks))
        self.network = network.to(self.device)
        self.has_copies = run.task_norm or how.recon
        """Whether layers of the trunk have one copy per task."""
        # With one task, `step` also averages the statistics of its head over the ranks.
        self.by_task = self.has_copies or len(self.tasks) == 1
        """Whether every task makes its own forward pass."""
        if self.settings.compile:
            # Each task needs graphs for training, for evaluation, and for smaller last batches.
            torch._dynamo.config.recompile_limit = 4 * len(self.tasks) + 4
            self.network.run_trunk = torch.compile(self.network.trunk)

    def _make_optimizer(self) -> None:
        run, how, settings = self.run, self.run.how, self.settings
        weighting = make_weighting(run.weighting, self.tasks, self.device)
        self.adam = torch.optim.Adam(
            [
                {"params": list(self.network.parameters()), "weight_decay": settings.weight_decay},
                {"params": list(weighting.parameters()), "weight_decay": 0.0},
            ],
            lr=settings.rate,
            fused=True,
        )
        if settings.decay == "poly":
            self.decay = torch.optim.lr_scheduler.PolynomialLR(self.adam, settings.epochs, 0.9)
        else:
            self.decay = torch.optim.lr_scheduler.MultiStepLR(
                self.adam, [max(1, settings.epochs // 2)], gamma=0.5
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.amp == "float16")
        self.opt = None
        if how.method is not None:
            options = dict(how.options)
            if "seed" in inspect.signature(how.method).parameters:
                options["seed"] = run.seed
            self.opt = cs.MultiTaskOptimizer(
                self.network.trunk,
                self.adam,
                list(self.tasks),
                how.method(**options),
                make_schedule(how.schedule, settings.epochs, run.seed),
                weighting,
                scaler=self.scaler,
                process_group=dist.group.WORLD if self.ranks > 1 else None,
            )
        elif self.ranks > 1 or settings.amp:
            raise ValueError(f"{run.row} must run in one process, without mixed precision")
        self.counted_epochs = 0
        """The number of epochs, from the first on, in which conflicts are counted for Recon."""
        if how.method is cs.Sum and how.options.get("separate") and not how.recon:
            self.counted_epochs = max(1, round(recon.SHARE * settings.epochs))

    def _make_loaders(self, root: Path) -> None:
        run, settings = self.run, self.settings
        self.train_set = open_dataset(
            run.data, root, "train", size=settings.size, augment=True, seed=run.seed
        )
        # An epoch has the same order on any number of ranks. The sampler adds the epoch to its
        # seed, so neighboring seeds would share orders.
        self.sampler = DistributedSampler(
            self.train_set, self.ranks, self.rank, seed=1_000_003 * run.seed, drop_last=True
        )
        options = {
            "num_workers": settings.workers,
            "persistent_workers": settings.workers > 0,
            "pin_memory": self.device.type == "cuda",
            # Seeds workers without advancing torch's default generator, which the training uses.
            "generator": torch.Generator(),
        }
        batch = settings.batch // self.ranks
        self.loader = DataLoader(
            self.train_set, batch, sampler=self.sampler, drop_last=True, **options
        )
        if not len(self.loader):
            raise ValueError(
                f"a batch of {settings.batch} needs as many pictures, got {len(self.train_set)}"
            )
        val_set = open_dataset(run.data, root, "val", size=settings.size)
        part = Subset(val_set, range(self.rank, len(val_set), self.ranks))
        self.val_loader = DataLoader(part, batch, **options)

    def train(self, progress: Progress | None = None) -> dict[str, Any]:
        """Trains the remaining epochs; returns the result, and writes it to `result.json`."""
        steps = len(self.loader)
        bar = None
        if progress is not None:
            total = self.settings.epochs * steps
            bar = progress.add_task(self.run.name, total=total, completed=self.epoch * steps)
        writer = None
        if self.rank == 0:
            writer = SummaryWriter(self.folder / "tensorboard", purge_step=self.epoch * steps)
        with writer or nullcontext():
            while self.epoch < self.settings.epochs:
                self._train_epoch(writer, lambda: bar is not None and progress.advance(bar))
                self._save()
        return self._finish() if self.rank == 0 else {}

    def _train_epoch(self, writer: SummaryWriter | None, advance: Any) -> None:
        start, epoch = time.perf_counter(), self.epoch
        self.sampler.set_epoch(epoch)
        self.train_set.set_epoch(epoch)
        if self.opt is not None:
            self.opt.start_epoch(epoch)
        if epoch == 0 and self.counted_epochs:
            self.opt.count_conflicts(recon.THRESHOLD)
        self.network.train()
        sums: dict[str, Tensor] = {}
        counts = dict.fromkeys(self.tasks, 0)
        for i, batch in enumerate(self.loader):
            done = self.step(batch)
            for task, value in done.items():
                sums[task] = sums.get(task, 0.0) + value
                counts[task] += 1
            step = epoch * len(self.loader) + i
            if self.opt is not None and step % LOG_EVERY == 0 and done:
                scalars = self.opt.report().scalars()
                for name, value in scalars.items() if writer is not None else ():
                    writer.add_scalar(name, value, step)
            advance()
        losses = {
            task: (sums[task] / counts[task]).item() if counts[task] else float("nan")
            for task in self.tasks
        }
        record: dict[str, Any] = {
            "phase": 1 if self.opt is not None and self.opt.phase == 1 else 2,
            "losses": losses,
            "shares": self._shares(),
        }
        self.decay.step()
        self.epoch += 1
        if self.epoch == self.counted_epochs:
            self._write_conflicts()
        last = self.epoch == self.settings.epochs
        if last or self.epoch % self.settings.evaluate_every == 0:
            self.metrics = record["metrics"] = self.evaluate()
        record["seconds"] = time.perf_counter() - start
        self.history.append(record)
        if writer is not None:
            self._log(writer, record)

    def step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Makes a step on the tasks with labels in the batch; returns their detached losses."""
        labelled = [task for task in self.tasks if bool((batch[task] != IGNORE).any())]
        if not self._anywhere(bool(labelled)):
            return {}
        batch = self._on_device(batch)
        picture = batch["picture"]

        def loss_of(task: str, predictions: list[Tensor]) -> Tensor:
            return total_loss(self.tasks[task], predictions, batch[task])

        def closure(task: str) -> Tensor:
            with self._autocast():
                predictions = self.network(picture, [task])[task]
            return loss_of(task, predictions)

        if self.opt is None:
            losses = self.network.backward(picture, loss_of)
            self.adam.step()
            return losses
        if self.by_task:
            return self.opt.step(closure, tasks=labelled)
        with self._autocast():
            predictions = self.network(picture, labelled)
        losses = self.opt.backward({task: loss_of(task, predictions[task]) for task in labelled})
        self.scaler.step(self.adam)
        self.scaler.update()
        return losses

    def _anywhere(self, here: bool) -> bool:
        """Whether `here` is true on any rank."""
        if self.hosts is None:
            return here
        found = torch.tensor(here, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.hosts)
        return bool(found)

    def _autocast(self) -> Any:
        if self.settings.amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.settings.amp))

    def _on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """The metrics of every task on the whole evaluation split, pooled over the ranks.

        All metrics of a task are NaN if a prediction is not finite or no pixel is labeled.
        """
        self.network.eval()
        diverged = dict.fromkeys(self.tasks, torch.zeros((), dtype=torch.bool, device=self.device))
        known = diverged.copy()
        metrics = {task: make_metric(self.tasks[task]).to(self.device) for task in self.tasks}
        groups = [[task] for task in self.tasks] if self.by_task else [list(self.tasks)]
        for batch in self.val_loader:
            batch = self._on_device(batch)
            for tasks in groups:
                active = cs.nn.active_task(self.network.trunk, tasks[0])
                with active if self.has_copies else nullcontext(), self._autocast():
                    predictions = self.network(batch["picture"], tasks)
                for task in tasks:
                    prediction = predictions[task][-1].float()
                    metrics[task].update(prediction, batch[task])
                    diverged[task] = diverged[task] | ~prediction.isfinite().all()
                    known[task] = known[task] | (batch[task] != IGNORE).any()
        result = {}
        for task, metric in metrics.items():
            result[task] = metric.compute()
            if self._anywhere(bool(diverged[task])) or not self._anywhere(bool(known[task])):
                result[task] = dict.fromkeys(result[task], float("nan"))
        return result

    def _shares(self) -> dict[str, list[int]]:
        """For each layer, the number of channels with each task as top-priority task."""
        if self.opt is None or not isinstance(self.opt.method, cs.ConnectionStrength):
            return {}
        return {
            layer: torch.bincount(priority.cpu(), minlength=len(self.tasks)).tolist()
            for layer, priority in self.opt.priority().items()
        }

    def _log(self, writer: SummaryWriter, record: dict[str, Any]) -> None:
        step = self.epoch * len(self.loader) - 1
        writer.add_scalar("epoch/phase", record["phase"], step)
        for task, value in record["losses"].items():
            writer.add_scalar(f"epoch/loss/{task}", value, step)
        for task, metrics in record.get("metrics", {}).items():
            for name, value in metrics.items():
                writer.add_scalar(f"metric/{task}/{name}", value, step)
        writer.add_scalar("epoch/rate", self.adam.param_groups[0]["lr"], step)

    def _state(self) -> dict[str, Any]:
        parts = {
            "network": self.network,
            "adam": self.adam,
            "decay": self.decay,
            "scaler": self.scaler,
            "opt": self.opt,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _save(self) -> None:
        if self.ranks > 1:
            dist.barrier()
        if self.rank > 0:
            return
        state = {name: part.state_dict() for name, part in self._state().items()}
        state |= {
            "epoch": self.epoch,
            "data": self.data,
            "history": self.history,
            "metrics": self.metrics,
            "random": torch.get_rng_state(),
        }
        with atomic_write(self.folder / "checkpoint.pt") as file:
            torch.save(state, file)

    def _load(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many types of errors for a damaged file.
            raise ValueError(f"{path} cannot be read: delete it to begin anew") from error
        if state["data"] != self.data:
            raise ValueError(
                f"{path} is from other data, {state['data']}, got {self.data}: choose another --out"
            )
        if state["epoch"] < self.counted_epochs:
            self.opt.count_conflicts(recon.THRESHOLD)
        for name, part in self._state().items():
            part.load_state_dict(state[name])
        self.epoch, self.history = state["epoch"], state["history"]
        self.metrics = state["metrics"]
        torch.set_rng_state(state["random"])

    def _write_conflicts(self) -> None:
        """Stops counting conflicts, and writes the scores."""
        scores = self.opt.conflicts().by_module().scores()
        self.opt.count_conflicts(None)
        if self.rank == 0:
            with atomic_write(self.folder / "conflicts.json") as file:
                file.write(json.dumps(scores, indent=1).encode())

    def _finish(self) -> dict[str, Any]:
        result = {
            "run": asdict(self.run),
            "data": self.data,
            "metrics": self.metrics,
            "history": self.history,
            "parameters": sum(p.numel() for p in self.network.parameters()),
            "pictures": len(self.train_set),
            "epoch_seconds": statistics.median(epoch["seconds"] for epoch in self.history),
            "torch": torch.__version__,
            "device": _device_name(self.device),
            "ranks": self.ranks,
        }
        with atomic_write(self.folder / "result.json") as file:
            file.write(json.dumps(result, indent=1).encode())
        return result


def _place() -> tuple[int, int, torch.device]:
    """The rank, the number of ranks, and the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # A long timeout, since ranks wait for each other during evaluation and saving.
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=1))
    return dist.get_rank(), dist.get_world_size(), device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def columns() -> tuple[Any, ...]:
    """The columns of a progress bar."""
    return (
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )


def _end_with(process: int) -> None:
    ended = os.pidfd_open(process)
    select.select([ended], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the run in a folder; by default, arguments come from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--conflicts", type=Path, help="for Recon: conflicts.json of another run")
    parser.add_argument(
        "--ends-with", type=int, help="the id of a process with which this one ends"
    )
    options = parser.parse_args(arguments)
    if options.ends_with is not None:
        threading.Thread(target=_end_with, args=(options.ends_with,), daemon=True).start()
    # The first rank holds the lock until the process ends.
    lock = (options.folder / "lock").open("w")
    if os.environ.get("RANK", "0") == "0":
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{options.folder} is being trained by another process") from error
    run = Run.from_json((options.folder / "run.json").read_text())
    conflicts = None if options.conflicts is None else json.loads(options.conflicts.read_text())
    training = Training(run, options.folder, options.data, conflicts)
    console = Console(quiet=training.rank > 0)
    with Progress(*columns(), console=console) as progress:
        result = training.train(progress)
    console.print(result.get("metrics"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
