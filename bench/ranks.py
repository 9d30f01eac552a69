"""Counts, without timing, the bytes that a step on many ranks sends, and its gradients' memory.

    python bench/ranks.py [--quick]

ResNet-18 with 4 tasks, on 1, 2 and 4 processes of this machine with gloo: replicated ranks, those
of `fully_shard`, and the textbook way, in which the whole gradient of every task is all-reduced.
Before anything is counted, the ranks hold the same bits, and the updates are those of the textbook
way. `--quick` has a narrow network and 2 processes, and keeps no record.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import records
from harness.collectives import PARTS, Collectives
from harness.gradient_memory import GradientMemory
from harness.shapes import NETWORKS
from page import table
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import cs_kernels as cs

TASKS = ["segmentation", "depth", "normals", "edges"]
METHODS: dict[str, Callable[[], cs.Method]] = {
    "Phase 2": cs.ConnectionStrength,
    "PCGrad": cs.PCGrad,
    "Phase 1": cs.ConnectionStrength,
}
WAYS = ("textbook", "replicated", "fully_shard")
STEPS = 4
"""The first one learns the passes, the third one's memory and the fourth one's bytes count."""
TOLERANCE = 1e-5
"""The largest difference, relative to the largest element of each tensor's update."""


# --- the network ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block; smooth, so that rounding cannot turn a unit on or off."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        stride = 1 if inputs == channels else 2
        self.first = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if inputs != channels:
            self.shortcut.append(nn.Conv2d(inputs, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.first_norm(self.first(x)))
        return functional.silu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet18(width: int) -> nn.Sequential:
    """ResNet-18's trunk without ReLU; its first layer has `width` channels, 64 in the original."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = [
        block
        for inputs, channels in pairwise(widths)
        for block in (Block(inputs, channels), Block(channels, channels))
    ]
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.SiLU()]
    return nn.Sequential(*stem, nn.AvgPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1))


def shared_parameters(trunk: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters outside task-specific normalization, by name."""
    own = {p for norm in cs.nn.task_norms(trunk) for p in norm.parameters()}
    return {name: p for name, p in trunk.named_parameters() if p not in own}


def same_shapes(trunk: nn.Module) -> bool:
    """Whether a trunk's convolutions are those of the other benchmarks."""
    found = (tuple(p.shape) for p in shared_parameters(trunk).values())
    return Counter(found) == Counter(NETWORKS["resnet18"])


class Training:
    """A rank's network, batches and steps."""

    def __init__(self, way: str, method: str, rank: int, size: int, width: int) -> None:
        torch.manual_seed(0)
        self.way, self.rank, self.size = way, rank, size
        self.joint = method != "Phase 1"
        self.method = METHODS[method]()
        # Fixed statistics: a batch's own would be those of two pictures.
        self.trunk = cs.nn.convert_task_batchnorm(resnet18(width), TASKS).eval()
        for norm in cs.nn.task_norms(self.trunk):
            for child in norm.children():
                nn.init.uniform_(child.weight, 0.5, 1.5)
                nn.init.uniform_(child.running_var, 0.5, 1.5)
        self.heads = nn.ModuleDict(
            {task: nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 8)) for task in TASKS}
        )
        self.x = torch.randn(STEPS, size, 2, 3, 32, 32)[:, rank]
        self.targets = torch.randn(STEPS, len(TASKS), size, 2, 8)[:, :, rank]
        shared = shared_parameters(self.trunk)
        self.numel = sum(p.numel() for p in shared.values())
        self.itemsize = next(iter(shared.values())).itemsize
        if way == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh("cpu", (size,))
            for block in self.trunk:
                if isinstance(block, Block):
                    fully_shard(block, mesh=mesh)
            fully_shard(self.trunk, mesh=mesh)
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.shared = shared_parameters(self.trunk)
        self.sgd = torch.optim.SGD(self.parameters, lr=0.05)
        self.opt = cs.MultiTaskOptimizer(
            self.trunk,
            self.sgd,
            TASKS,
            self.method,
            cs.Joint() if self.joint else cs.Sequential(),
            process_group=dist.group.WORLD if way == "replicated" else None,
        )
        ranks = self.opt._engine.ranks
        self.control = ranks.messages.hosts if ranks.is_distributed else None
        assert (self.control is None) == (way == "textbook")
        self.collectives = Collectives(self.control)
        if way == "textbook":
            self.opt.trace(self.loss)

    number = 0

    def loss(self, task: str) -> Tensor:
        output = self.heads[task](self.trunk(self.x[self.number]))
        return (output - self.targets[self.number, TASKS.index(task)]).square().mean()

    def step(self) -> None:
        if self.way == "textbook":
            self._textbook_step()
        else:
            self.opt.step(self.loss)
        self.number += 1

    # --- the textbook way ---

    def _textbook_step(self) -> None:
        if not self.joint:
            for task in TASKS:
                self.sgd.zero_grad()
                row = self._row(task)
                for parameter, grad in zip(self.shared.values(), row, strict=True):
                    parameter.grad = grad
                self._average_others()
                del row, grad
                self.sgd.step()
            return
        self.sgd.zero_grad()
        gradients = cs.TaskGradients(self.shared, TASKS)
        for n, task in enumerate(TASKS):
            gradients.rows[n] = [*self._row(task)]
        self._average_others()
        with torch.no_grad():
            step = cs.Step(number=self.number, tasks=tuple(TASKS))
            self.method.combine(gradients, self.opt._engine.trunk.layout(), step)
        self.sgd.step()

    def _row(self, task: str) -> Sequence[Tensor]:
        """The gradients of a task, one behind the other in memory, and one all-reduce of them."""
        with cs.nn.active_task(self.trunk, task):
            self.loss(task).backward()
        grads = [p.grad for p in self.shared.values() if p.grad is not None]
        assert len(grads) == len(self.shared)
        row = torch.cat([grad.flatten() for grad in grads])
        for parameter in self.shared.values():
            parameter.grad = None
        with self.collectives.part("gradients"):
            dist.all_reduce(row)
        row.div_(self.size)
        parts = torch.split(row, [grad.numel() for grad in grads])
        return [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]

    def _average_others(self) -> None:
        """The gradients of heads and normalizations."""
        shared = set(self.shared.values())
        others = [p.grad for p in self.parameters if p not in shared and p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in others])
        with self.collectives.part("other gradients"):
            dist.all_reduce(flat)
        flat.div_(self.size)
        for grad, part in zip(others, flat.split([g.numel() for g in others]), strict=True):
            grad.copy_(part.view_as(grad))

    # --- what is counted ---

    def counted_step(self) -> Collectives:
        """A step's collectives; the groups' own numbers and torch's counter agree."""
        groups = [dist.group.WORLD] if self.control is None else [dist.group.WORLD, self.control]
        if self.control is not None:  # Both ways may have groups of their own.
            groups += [g for g in self.opt._engine.ranks._groups if g is not dist.group.WORLD]
        before = {g.group_name: g._get_sequence_number_for_group() for g in groups}
        debug = CommDebugMode()
        tracker = debug.advanced_module_tracker
        # Without its hooks, which fail where a module runs several times in a step.
        tracker.name, tracker.module_parents_dict = "Global", {"Global": set()}
        none = dict.fromkeys(("__enter__", "__exit__"), lambda *_: None)
        with mock.patch.multiple(tracker, **none), debug, self.collectives.counting():
            self.step()
        found = self.collectives
        expected = {str(op): n for op, n in debug.get_comm_counts().items()}
        assert {op.replace("::", "."): n for op, n in found.by_operator().items()} == expected
        for group in groups:
            made = group._get_sequence_number_for_group() - before[group.group_name]
            assert made == found.by_group()[group.group_name], (group.group_name, made, found.found)
        assert set(found.by_group()) <= set(before)
        return found

    def updates(self) -> Iterator[Tensor]:
        """Whole updates of the last step, of the shared parameters and of the others."""
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is not None:
                yield grad.full_tensor() if hasattr(grad, "full_tensor") else grad

    def digest(self) -> str:
        """A hash of the bits of all parameters and buffers."""
        result = hashlib.sha256()
        for tensor in [*self.parameters, *self.trunk.buffers()]:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            result.update(whole.detach().contiguous().numpy().tobytes())
        return result.hexdigest()


def case(
    way: str, method: str, rank: int, size: int, width: int, expected: list[Tensor]
) -> dict[str, Any]:
    """The counts of one rank; `expected` has the textbook way's updates, and gets them from it."""
    training = Training(way, method, rank, size, width)
    assert width != 64 or same_shapes(training.trunk)
    numel, itemsize = training.numel, training.itemsize
    whole = numel * itemsize
    training.step()
    with GradientMemory(training.parameters) as memory:
        training.step()  # Shows which of the memory that is kept from step to step has gradients.
        memory.start()
        training.step()
        peak, kept = memory.peak, memory.now()
    updates = [update.clone() for update in training.updates()]
    if way == "textbook":
        expected[:] = updates
    error = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(updates, expected, strict=True)
    )
    assert error <= TOLERANCE, (way, method, error)
    found = training.counted_step()
    buckets = getattr(training.opt._engine.ranks, "_buckets", None)
    return {
        "way": way,
        "method": method,
        "ranks": size,
        "tasks": len(TASKS),
        "numel": numel,
        "itemsize": itemsize,
        "buckets": None if buckets is None else [flat.nbytes for flat in buckets.flat],
        "sent": {part: found.sent(part) / whole for part in PARTS},
        "sent_bytes": {part: found.sent(part) for part in PARTS},
        "collectives": {part: found.number(part) for part in PARTS},
        "by_kind": found.by_kind(),
        "peak": peak / whole,
        "kept": kept / whole,
        "error": error,
        "digest": training.digest(),
    }


def cases(rank: int, size: int, width: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Every way and some methods."""
    torch.use_deterministic_algorithms(False)  # New memory is not filled: it would be for nothing.
    result = []
    for method in methods:
        expected: list[Tensor] = []
        for way in WAYS:
            result.append(case(way, method, rank, size, width, expected))
            gc.collect()
    return result


def on_ranks(sizes: Sequence[int], width: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The counts of every number of ranks: the same on each, which all hold the same bits."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    # Not this file, which is __main__.
    from ranks import Ranks

    result = []
    for size in sizes:
        pool = Ranks(size)
        try:
            of_ranks = pool.run(cases, size, width, methods)
        finally:
            pool.stop()
        for of_case in zip(*of_ranks, strict=True):
            first = of_case[0]
            for other in of_case[1:]:
                assert other["digest"] == first["digest"], (first, other)
                assert other["collectives"] == first["collectives"], (first, other)
                assert other["sent"] == first["sent"], (first, other)
            memory = {key: max(c[key] for c in of_case) for key in ("peak", "kept")}
            error = max(c["error"] for c in of_case)
            result.append({**first, **memory, "error": error})
            del result[-1]["digest"]
    return result


def check_formulas(found: Sequence[dict[str, Any]]) -> None:
    """Compares counts with the formulas of docs/benchmarks.md, to 0.1 % for padding."""
    for c in found:
        tasks, ranks = c["tasks"], c["ranks"]
        elements = {
            ("replicated", True): tasks + 1,
            ("replicated", False): 2 * tasks,
            ("textbook", True): 2 * tasks,
            ("textbook", False): 2 * tasks,
        }.get((c["way"], c["method"] != "Phase 1"))
        if elements is not None:
            expected = elements * (ranks - 1) / ranks
            assert abs(c["sent"]["gradients"] - expected) <= 1e-3 * expected, (c, expected)


def main(arguments: Sequence[str] | None = None) -> None:
    """Counts, prints and keeps a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="narrow, 2 ranks, no record")
    options = parser.parse_args(arguments)
    origin = records.origin()
    if options.quick:
        found = on_ranks((2,), 8, ("Phase 2",))
    else:
        found = on_ranks((1, 2, 4), 64, tuple(METHODS))
    check_formulas(found)
    print(table("ranks", found))
    if not options.quick:
        print(f"\nrecord appended to {records.append('ranks', {**origin, 'cases': found})}")


if __name__ == "__main__":
    main()
