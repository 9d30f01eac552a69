"""Counts the bytes that a step on several ranks sends and its gradients' memory; measures no times.

    python bench/ranks.py [--quick]

The benchmark trains ResNet-18 with 4 tasks, on 1, 2 and 4 processes of this machine with gloo. It
compares replicated ranks, ranks with `fully_shard`, and the textbook loop, which all-reduces every
task's whole gradient. Parameters must be bitwise equal on all ranks, and updates must agree with
the textbook loop's. At features, where the trunk is not converted, the textbook loop sums the
Gramian of the features' gradients over the ranks, and all-reduces the trunk's single gradient. Kept
task weights are from the first step. GradientBalancer runs with DistributedDataParallel and
`fully_shard`, whose updates must agree. `--quick` uses a narrow network and 2 processes, and writes
no record.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import records
from harness.counting import Collectives, GradientMemory
from harness.training import timm_model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cs_kernels as cs

TASKS = ["segmentation", "depth", "normals", "edges"]
AT_FEATURES = "PCGrad at features"
KEPT = "PCGrad, kept weights"
BALANCED = "UPGrad, balancer"
METHODS: dict[str, Callable[[], cs.Method]] = {
    "Phase 2": cs.ConnectionStrength,
    "PCGrad": cs.PCGrad,
    "Phase 1": cs.ConnectionStrength,
    AT_FEATURES: cs.PCGrad,
    KEPT: partial(cs.PCGrad, update_every=9),
    BALANCED: cs.UPGrad,
}
WAYS = ("textbook", "replicated", "fully_shard")
SKETCH = 65536
STEPS = 4
"""The first steps warm up; memory is measured in the third, and bytes are counted in the fourth."""
TOLERANCE = 1e-5
"""The largest difference allowed, relative to the largest element of each parameter's update."""


def smooth_resnet18(width: int) -> nn.Module:
    """ResNet-18 with `width` stem channels; rounding cannot switch its smooth activations."""
    channels = tuple(width << n for n in range(4))
    options = {"num_classes": 0, "global_pool": "", "act_layer": nn.SiLU, "channels": channels}
    trunk: nn.Module = timm_model("resnet18", **options)
    trunk.maxpool = nn.AvgPool2d(3, 2, 1)
    return trunk


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Averages gradients over the ranks with one all-reduce."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


class Training:
    """A rank's network, batches and steps."""

    number = 0

    def __init__(self, way: str, method: str, rank: int, size: int, width: int) -> None:
        torch.manual_seed(0)
        self.trunk = smooth_resnet18(width)
        if method not in (AT_FEATURES, BALANCED):
            cs.nn.convert_task_batchnorm(self.trunk, TASKS)
        self.trunk.eval()  # Fixed statistics, because a rank's batch has only two pictures.
        for norm in self.trunk.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.uniform_(norm.running_var, 0.5, 1.5)
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        heads = {task: nn.Sequential(*head, nn.Linear(8 * width, 8)) for task in TASKS}
        self.heads = nn.ModuleDict(heads)
        self.x = torch.randn(STEPS, size, 2, 3, 32, 32)[:, rank]
        self.targets = torch.randn(STEPS, len(TASKS), size, 2, 8)[:, :, rank]
        own = {p for norm in cs.nn.task_norms(self.trunk) for p in norm.parameters()}
        self.numel = sum(p.numel() for p in self.trunk.parameters() if p not in own)
        if way == "fully_shard":
            mesh = dist.init_device_mesh("cpu", (size,))
            for block in self.trunk.modules():
                if type(block).__name__ == "BasicBlock":
                    fully_shard(block, mesh=mesh)
            fully_shard(self.trunk, mesh=mesh)
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.shared = [p for p in self.trunk.parameters() if p not in own]
        self.way, self.method = way, method
        self.start()

    def start(self) -> None:
        self.opt = self.made()

    def made(self) -> cs.MultiTaskOptimizer:
        shared = set(self.shared)

        def textbook(loss: Tensor) -> None:
            loss.backward()
            average(self.shared)
            average(p for p in self.parameters if p not in shared)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The textbook loop has no group.
            return cs.MultiTaskOptimizer(
                self.trunk,
                torch.optim.SGD(self.parameters, lr=0.05),
                TASKS,
                METHODS[self.method](),
                cs.Sequential() if self.method == "Phase 1" else cs.Joint(),
                backward=textbook if self.way == "textbook" else None,
                process_group=dist.group.WORLD if self.way == "replicated" else None,
            )

    def loss(self, task: str, features: Tensor | None = None) -> Tensor:
        z = self.trunk(self.x[self.number]) if features is None else features
        target = self.targets[self.number, TASKS.index(task)]
        return (self.heads[task](z) - target).square().mean()

    def step(self) -> None:
        if self.method == AT_FEATURES:
            z = self.trunk(self.x[self.number])
            losses = {task: self.loss(task, z) for task in TASKS}
            if self.way == "textbook":
                self.textbook_at_features(z, losses)
            else:
                self.opt.backward(losses, features=z)
            self.opt.optimizer.step()
        else:
            if self.way == "textbook":
                # A new optimizer, because the textbook loop keeps no buffers of updates.
                state, self.opt = self.opt.state_dict(), self.made()
                self.opt.load_state_dict(state)
                gc.collect()
            self.opt.step(self.loss)
        self.number += 1

    def textbook_at_features(self, z: Tensor, losses: dict[str, Tensor]) -> None:
        """Computes all gradients in plain torch; only the task weights come from cs_kernels."""
        self.opt.optimizer.zero_grad()
        rows, ranks = [], dist.get_world_size()
        for task, loss in losses.items():
            heads = [*self.heads[task].parameters()]
            row, *of_head = torch.autograd.grad(loss, [z, *heads], retain_graph=True)
            rows.append(row.flatten())
            for parameter, grad in zip(heads, of_head, strict=True):
                parameter.grad = grad
        gradients = torch.stack(rows).double()
        gramian = gradients @ gradients.T / ranks**2  # The gradients are means over the ranks.
        dist.all_reduce(gramian)
        weights = METHODS[self.method]().weights(gramian, cs.Step(self.number, tuple(TASKS)))
        z.backward((weights @ gradients).to(z.dtype).view_as(z))
        average(self.shared)
        average(self.heads.parameters())

    def counted_step(self) -> dict[str, dict[str, tuple[int, float]]]:
        """Counts a step's collectives; their number must match the process groups' own counts."""

        def made() -> int:
            return sum(g._get_sequence_number_for_group() for g in dist.distributed_c10d._pg_map)

        before = made()
        with Collectives() as found:
            self.step()
        counted = sum(n for of_part in found.by_kind.values() for n, _ in of_part.values())
        assert counted == made() - before, (counted, made() - before)
        return found.by_kind

    def digest(self) -> str:
        """A hash of the bits of all parameters and buffers."""
        result = hashlib.sha256()
        for tensor in whole([*self.parameters, *self.trunk.buffers()]):
            result.update(tensor.detach().contiguous().numpy().tobytes())
        return result.hexdigest()


class Balanced(Training):
    """A forward and a backward pass per task in a plain loop, with a GradientBalancer."""

    def start(self) -> None:
        self.network = nn.ModuleDict({"trunk": self.trunk, "heads": self.heads})
        self.wrapper: Any = _Losses(self)
        if self.way == "DDP":
            options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.13 deprecates broadcast_buffers.
                self.wrapper = DistributedDataParallel(
                    self.wrapper, broadcast_buffers=False, **options
                )
            # `Collectives` counts the all-reduce of a hook, which torch's dispatcher sees.
            self.wrapper.register_comm_hook(None, allreduce_hook)
        # foreach refuses a mix of sharded and whole tensors.
        self.sgd = torch.optim.SGD(self.parameters, lr=0.05, foreach=False)
        method = METHODS[self.method]()
        self.balancer = cs.GradientBalancer(self.shared, TASKS, method, self.sgd, sketch=SKETCH)

    def step(self) -> None:
        self.sgd.zero_grad()
        for task in TASKS:
            waits = self.way == "DDP" and task != TASKS[-1]
            unsynchronized = self.wrapper.no_sync() if waits else contextlib.nullcontext()
            with unsynchronized, self.balancer.task(task):
                self.wrapper(task).backward()
        if self.way == "fully_shard":
            average(self.heads.parameters())
        self.sgd.step()
        self.number += 1


class _Losses(nn.Module):
    """The module that DistributedDataParallel wraps: a task's loss."""

    def __init__(self, training: Balanced) -> None:
        super().__init__()
        self.network, self._loss = training.network, training.loss

    def forward(self, task: str) -> Tensor:
        return self._loss(task)


def whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The whole tensors, with shards gathered from all ranks."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def case(
    way: str, method: str, rank: int, size: int, width: int, expected: list[Tensor]
) -> dict[str, Any]:
    """The counts of one rank; a method's first way sets `expected`, which other ways must match."""
    made = Balanced if method == BALANCED else Training
    training = made(way, method, rank, size, width)
    nbytes = 4 * training.numel
    training.step()
    with GradientMemory(training.parameters) as memory:
        training.step()  # Shows which of the buffers that persist between steps hold gradients.
        memory.start()
        training.step()
        peak, kept = memory.peak, memory.now()
    grads = (p.grad for p in training.parameters)
    updates = [update.clone() for update in whole(g for g in grads if g is not None)]
    if not expected:
        expected[:] = updates
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(updates, expected, strict=True)
    )
    assert error <= TOLERANCE, (way, method, error)
    return {
        "way": way,
        "method": method,
        "ranks": size,
        "tasks": len(TASKS),
        "numel": training.numel,
        "by_kind": training.counted_step(),
        "peak": peak / nbytes,
        "kept": kept / nbytes,
        "error": error,
        "digest": training.digest(),
    }


def cases(rank: int, size: int, width: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The counts of every way with each of the methods."""
    torch.use_deterministic_algorithms(False)  # Otherwise torch would needlessly fill new memory.
    result = []
    for method in methods:
        expected: list[Tensor] = []
        for way in ("DDP", "fully_shard") if method == BALANCED else WAYS:
            result.append(case(way, method, rank, size, width, expected))
            gc.collect()
    return result


def on_ranks(size: int, width: int, methods: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the counts of all ranks; these and the bits of parameters must agree between ranks."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from ranks import Ranks  # From tests/; this file is __main__.

    pool = Ranks(size)
    try:
        of_ranks = pool.run(cases, size, width, methods)
    finally:
        pool.stop()
    for of_case in zip(*of_ranks, strict=True):
        for key in ("digest", "by_kind"):
            assert all(c[key] == of_case[0][key] for c in of_case), of_case
        greatest = {key: max(c[key] for c in of_case) for key in ("peak", "kept", "error")}
        yield {**{k: v for k, v in of_case[0].items() if k != "digest"}, **greatest}


def check_formulas(c: dict[str, Any]) -> None:
    """Compares counts with the formulas of docs/benchmarks.md, which omit up to 3%."""
    ring = 4 * c["numel"] * (c["ranks"] - 1) / c["ranks"]
    expected = {"all-reduce": 2 * c["tasks"] * ring}
    if c["method"] == AT_FEATURES or (c["way"], c["method"]) == ("replicated", KEPT):
        expected = {"all-reduce": 2 * ring}
    elif c["method"] == BALANCED:
        sketches = 4 * c["tasks"] * SKETCH * (c["ranks"] - 1) / c["ranks"]
        expected = {"all-reduce": 2 * (ring + sketches)}
    elif c["way"] == "replicated" and c["method"] != "Phase 1":
        expected = {"reduce-scatter": c["tasks"] * ring, "all-gather": ring}
    for kind, sent in expected.items() if c["way"] != "fully_shard" else ():
        assert abs(c["by_kind"]["devices"][kind][1] - sent) <= 3e-2 * sent, (c, kind, sent)


def main() -> None:
    """Counts and prints all cases, and appends a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="narrow, 2 ranks, no record")
    quick = parser.parse_args().quick
    origin = records.origin()
    methods, found = ["Phase 2", AT_FEATURES, KEPT, BALANCED] if quick else [*METHODS], []
    for size in (2,) if quick else (1, 2, 4):
        for c in on_ranks(size, 32 if quick else 64, methods):
            check_formulas(c)
            print(records.line(c))
            found.append(c)
    if not quick:
        print(f"record appended to {records.append('ranks', {**origin, 'cases': found})}")


if __name__ == "__main__":
    main()
