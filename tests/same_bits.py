"""Hashes about 1,700 short training runs, to check that a refactoring keeps every bit.

    python tests/same_bits.py before.json  # Then change the code.
    python tests/same_bits.py after.json before.json

The second call lists the runs that differ. Bits depend on the machine and on the version of torch,
so the repository contains no hashes.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import cs_kernels as cs

TASKS = ["a", "b", "c"]
STEPS = 6

METHODS: dict[str, partial[cs.Method]] = {
    name: partial(getattr(cs, name))
    for name in cs.__all__
    if isinstance(getattr(cs, name), type)
    and issubclass(getattr(cs, name), cs.Method)
    and name not in ("Method", "GramianMethod", "Clipped")
}
METHODS |= {
    "PCGrad by layer": partial(cs.PCGrad, groups="layer"),
    "MGDA by layer": partial(cs.MGDA, groups="layer"),
    "CAGrad by layer, kept": partial(cs.CAGrad, groups="layer", update_every=2),
    "UPGrad kept": partial(cs.UPGrad, update_every=3),
    "NashMTL kept": partial(cs.NashMTL, update_every=2),
    "Clipped": partial(cs.Clipped, cs.UPGrad(), 1.0),
}
WEIGHTINGS: dict[str, partial[cs.Weighting]] = {
    name: partial(getattr(cs, name))
    for name in cs.__all__
    if isinstance(getattr(cs, name), type)
    and issubclass(getattr(cs, name), cs.Weighting)
    and name not in ("Weighting", "FixedWeights")
}
WEIGHTINGS["UncertaintyWeights"] = partial(
    cs.UncertaintyWeights, dict.fromkeys(TASKS, "regression")
)
WAYS = ("step", "list", "backward", "micro", "features", "together")
SCHEDULES = {"joint": cs.Joint, "turns": cs.Sequential, "mixed": partial(cs.Mixed, 3, seed=1)}
NETWORKS = ("task norms", "layer norm", "routed")
EVENTS = ("", "resumed", "failed", "partial labels")
ON_RANKS = ("Sum", "PCGrad", "PCGrad by layer", "ConnectionStrength", "GradDrop", "UPGrad kept")
BY_LAYER = (*(m for m in METHODS if "by layer" in m), "ConnectionStrength", "Sum")
"""The methods that `step_together` supports."""


class Trunk(nn.Module):
    """Two layers and a normalization; a "routed" network adds one layer per task."""

    def __init__(self, network: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.norm: nn.Module = nn.LayerNorm(6)
        if network == "task norms":
            self.norm = nn.BatchNorm1d(6)
            cs.nn.convert_task_batchnorm(self, TASKS)
        routed = TASKS if network == "routed" else []
        self.routes = nn.ModuleDict({task: nn.Linear(6, 4, bias=False) for task in routed})

    def forward(self, x: Tensor, task: str = "") -> Tensor:
        h = self.norm(self.first(x)).tanh()
        z: Tensor = self.last(h)
        return z + self.routes[task](h) if task in self.routes else z


class Training:
    """A network with three tasks, and one way to train it."""

    def __init__(
        self, method: str, weighting: str, way: str, schedule: str, network: str, wrap: str = ""
    ) -> None:
        torch.manual_seed(0)
        self.way = way
        self.trunk = Trunk(network)
        self.heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS})
        if wrap == "fully_shard":
            for module in (*self.trunk.children(), *self.heads.children()):
                if not isinstance(module, nn.ModuleDict):
                    fully_shard(module)
        weighs = WEIGHTINGS[weighting]() if weighting else None
        parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.adam = torch.optim.AdamW(parameters, lr=0.01, foreach=False)
        if weighs is not None and weighs.parameters():
            self.adam.add_param_group({"params": weighs.parameters(), "lr": 0.02})
        self.opt = cs.MultiTaskOptimizer(
            self.trunk,
            self.adam,
            TASKS,
            METHODS[method](),
            SCHEDULES[schedule](),
            weighs,
            process_group=dist.group.WORLD if dist.is_initialized() and not wrap else None,
        )
        self.losses: list[Tensor] = []

    def loss(self, task: str, x: Tensor) -> Tensor:
        return self.of_head(task, self.trunk(x, task))

    def of_head(self, task: str, z: Tensor) -> Tensor:
        scale = 1.0 + 3 * TASKS.index(task)
        return scale * (self.heads[task](z) - TASKS.index(task)).square().mean()

    def run(self, number: int, tasks: list[str], *, fails: bool = False) -> None:
        """Makes a step; with `fails`, it raises, because the last task's loss has no graph."""
        self.opt.start_epoch(number // 2)
        x = data(number)

        def closure(task: str, x: Tensor) -> Tensor:
            loss = self.loss(task, x)
            return loss.detach() if fails and task == tasks[-1] else loss

        def losses(x: Tensor) -> dict[str, Tensor]:
            found = {}
            for task in tasks:
                with cs.nn.active_task(self.trunk, task):
                    found[task] = closure(task, x)
            return found

        def forward(run: Any) -> dict[str, Tensor]:
            found = {task: self.of_head(task, z) for task, z in run(x).items() if task in tasks}
            return found | ({tasks[-1]: x.sum()} if fails else {})

        match self.way:
            case "step":
                made = self.opt.step(partial(closure, x=x), tasks=tasks)
            case "list":
                made = self.opt.step([partial(closure, x=x), partial(closure, x=x + 1)], tasks)
            case "backward":
                made = self.opt.backward(losses(x))
            case "micro":
                self.opt.backward(losses(x + 1), update=False)
                made = self.opt.backward(losses(x))
            case "features":
                z = self.trunk(x)
                heads = {task: self.of_head(task, z) for task in tasks}
                lost = {tasks[-1]: x.sum()} if fails else {}
                made = self.opt.backward(heads | lost, features=z)
            case "together":
                made = self.opt.step_together(forward, tasks)
        if self.way in ("backward", "micro", "features"):
            self.adam.step()
        self.losses += made.values()

    def hash(self) -> str:
        """Hashes modules, the states of both optimizers, and the losses."""
        state = self.opt.state_dict(), self.adam.state_dict(), self.losses
        modules = self.trunk.state_dict(), self.heads.state_dict()
        digest = hashlib.sha256()
        for leaf in tree_leaves((state, modules)):
            if isinstance(leaf, Tensor):
                leaf = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
                digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            else:
                digest.update(repr(leaf).encode())
        return digest.hexdigest()[:16]


def data(number: int) -> Tensor:
    """The batch of a step, a different one on each rank."""
    shift = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(10 * number + shift))


def outcome(event: str, *setting: str) -> str:
    """The hash of a training run, or the message of its exception."""
    try:
        training = Training(*setting)
        for number in range(STEPS):
            tasks = TASKS[: 2 + number % 2] if event == "partial labels" else TASKS
            if number == 3 and event == "failed":
                try:
                    training.run(number, tasks, fails=True)
                except (ValueError, RuntimeError):
                    training.adam.zero_grad()
            training.run(number, tasks)
            if number == 2 and event == "resumed":
                states = training.opt.state_dict(), training.adam.state_dict()
                modules = training.trunk.state_dict(), training.heads.state_dict()
                training, losses = Training(*setting), training.losses
                training.losses = losses
                training.trunk.load_state_dict(modules[0])
                training.heads.load_state_dict(modules[1])
                training.adam.load_state_dict(states[1])
                training.opt.load_state_dict(states[0])
        return training.hash()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def settings(*, alone: bool = True) -> Iterator[tuple[str, ...]]:
    """The settings of all training runs: event, method, weighting, way, schedule and network."""
    for method, way, event, network in itertools.product(METHODS, WAYS, EVENTS, NETWORKS):
        if way == "together" and method not in BY_LAYER:
            continue
        if (method == "ConnectionStrength") <= (network == "task norms") and (
            network == "layer norm"
            or (network == "task norms" and way in ("step", "list", "together"))
            or (network == "routed" and way in ("step", "backward"))
        ):
            yield event, method, "", way, "joint", network
    for method, way, schedule in itertools.product(METHODS, WAYS, ("turns", "mixed")):
        if way in ("step", "together") and method in ("PCGrad", "ConnectionStrength", "Sum"):
            yield "resumed", method, "", way, schedule, "task norms"
    for weighting, way, event in itertools.product(WEIGHTINGS, WAYS, EVENTS):
        if way != "together" and (weighting != "FAMO" or (way == "step" and alone)):
            yield event, "PCGrad", weighting, way, "joint", "layer norm"


def on_a_rank(rank: int, wrap: str, chosen: list[tuple[str, ...]]) -> list[str]:
    """Makes training runs on one of several ranks; returns their outcomes."""
    return [outcome(*setting, wrap) for setting in chosen]


def main(path: str, before: str | None = None) -> None:
    """Writes the outcomes of all training runs, and compares them with earlier ones."""
    torch.set_num_threads(1)
    found = {" | ".join(setting): outcome(*setting) for setting in settings()}
    pool = Ranks(2)
    for wrap in ("", "fully_shard"):
        plain = [s for s in settings(alone=False) if s[1] in ON_RANKS and s[3] != "together"]
        if wrap:
            plain = [s for s in plain if s[0] == "" and s[-1] == "layer norm"]
        for rank, outcomes in enumerate(pool.run(on_a_rank, wrap, plain)):
            names = (" | ".join((*setting, wrap, str(rank))) for setting in plain)
            found |= zip(names, outcomes, strict=True)
    pool.stop()
    Path(path).write_text(json.dumps(found, indent=1))
    failed = sum(":" in result for result in found.values())
    print(f"{len(found)} training runs, of which {failed} are refused or fail")
    if before is not None:
        expected = json.loads(Path(before).read_text())
        different = [name for name in expected | found if found.get(name) != expected.get(name)]
        print("\n".join(different[:20]))
        print(f"{len(different)} differ" if different else "all are the same")
        sys.exit(bool(different))


if __name__ == "__main__":
    main(*sys.argv[1:])
