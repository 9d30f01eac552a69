"""Fused Phase 2 against the copy bandwidth of the same moments, and against the peers.

The speed of memory on a shared machine changes from one second to the next. So every round first
copies as many bytes as a step moves, and the quoted fraction is the median over rounds of the ratio
of the two. A peer is quoted as the ratio of medians.
"""

import random
import statistics
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from peers import TORCHJD, stacked, textbook_pcgrad, torchjd_matrix, torchjd_step
from shapes import NETWORKS
from timing import median_seconds, seconds
from torch import Tensor, nn

import cs_kernels as cs

CASES = [
    pytest.param(
        network, tasks, dtype, id=f"{network}-K{tasks}-{str(dtype).removeprefix('torch.')}"
    )
    for network in ("resnet18", "small")
    for tasks in (2, 4, 8)
    for dtype in (torch.float32, torch.bfloat16)
]


@dataclass
class Problem:
    """One trunk's weights, normalizations and gradients, and room for the update."""

    tasks: int
    weights: list[Tensor]
    gamma: Tensor
    running_var: Tensor
    grads: list[Tensor]
    updates: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.updates = [torch.zeros_like(weight) for weight in self.weights]

    @property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def bytes(self) -> int:
        """Each gradient and weight read once, the update written once."""
        return (self.tasks + 2) * self.numel * self.weights[0].element_size()

    def of_task(self, i: int) -> list[Tensor]:
        return self.grads[i :: self.tasks]

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(
            self.tasks,
            [w.to(dtype) for w in self.weights],
            self.gamma,
            self.running_var,
            [g.to(dtype) for g in self.grads],
        )

    def step(self) -> list[Tensor]:
        layers = len(self.weights)
        priorities: list[Tensor] = torch.ops.cs_kernels.phase2_update_(
            self.updates,
            self.grads,
            self.weights,
            self.gamma,
            self.running_var,
            [1e-5] * (layers * self.tasks),
            [0] * layers,
            [1] * layers,
            self.tasks,
        )
        return priorities


def make(network: str, tasks: int, dtype: torch.dtype) -> Problem:
    """Random gradients: half of all pairs conflict, so nearly every group is visited again."""
    torch.manual_seed(0)
    shapes = NETWORKS[network]
    return Problem(
        tasks,
        [torch.randn(shape).to(dtype) for shape in shapes],
        torch.rand(tasks * sum(shape[0] for shape in shapes)) + 0.5,
        torch.rand(tasks * sum(shape[0] for shape in shapes)) + 0.5,
        [torch.randn(shape).to(dtype) for shape in shapes for _ in range(tasks)],
    )


def plain_formula(problem: Problem, priorities: list[Tensor]) -> list[Tensor]:
    """sum_j G_j + a_i G_i of every group, in torch and in the gradients' own dtype."""
    updates = []
    for layer, priority in enumerate(priorities):
        start = layer * problem.tasks
        rows = torch.stack([g.flatten(1) for g in problem.grads[start : start + problem.tasks]])
        total = rows.sum(0)
        for i in range(problem.tasks):
            group = priority == i
            flat = rows[:, group].flatten(1)
            dots = flat @ flat[i]
            a_i = -(dots[dots < 0] / dots[i]).sum()
            total[group] += a_i * rows[i][group]
        updates.append(total.view_as(problem.weights[layer]))
    return updates


def check(problem: Problem) -> None:
    """The step's error against float64 is at most twice that of the plain formula."""
    priorities = problem.step()
    exact = problem.to(torch.float64)
    with cs.use_backend("reference"):
        expected = exact.step()
    for ours, theirs in zip(priorities, expected, strict=True):
        assert torch.equal(ours, theirs)
    plain = plain_formula(problem, priorities)
    for update, other, oracle in zip(problem.updates, plain, exact.updates, strict=True):
        allowed = 2 * (other.double() - oracle).abs().max()
        assert (update.double() - oracle).abs().max() <= allowed


def check_threads(problem: Problem) -> None:
    """One thread and two give the same bits."""
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        problem.step()
        results.append([update.clone() for update in problem.updates])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(("network", "tasks", "dtype"), CASES)
@torch.no_grad()
def test_phase2(
    benchmark: Any, report: Any, quick: bool, network: str, tasks: int, dtype: torch.dtype
) -> None:
    if quick and (network != "small" or tasks != 4):
        pytest.skip("the quick run times the small network at K = 4")
    random.seed(0)
    problem = make(network, tasks, dtype)
    check(problem)
    check_threads(problem)

    source = torch.randn(problem.bytes // 2 // problem.weights[0].element_size()).to(dtype)
    target = torch.zeros_like(source)
    copies: list[float] = []
    target.copy_(source)
    rounds = 20 if quick else 61
    benchmark.pedantic(
        problem.step,
        setup=lambda: copies.append(seconds(lambda: target.copy_(source))),
        rounds=rounds,
        warmup_rounds=3,
    )
    steps = benchmark.stats.stats.data
    copies = copies[-len(steps) :]

    of_tasks = [problem.of_task(i) for i in range(tasks)]
    matrix = torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in of_tasks])
    parameters = [nn.Parameter(weight.clone()) for weight in problem.weights]
    pcgrad = TORCHJD["PCGrad"](tasks)
    jacobians = stacked(of_tasks)
    slow = 3 if network == "resnet18" else 15
    peers = {
        "textbook PCGrad": median_seconds(lambda: textbook_pcgrad(of_tasks), slow),
        "TorchJD matrix": median_seconds(lambda: torchjd_matrix(pcgrad, matrix), 3 * slow),
        "TorchJD step": median_seconds(
            lambda: torchjd_step(pcgrad, parameters, jacobians), 3 * slow
        ),
    }
    other = make(network, tasks, dtype)

    def reference() -> None:
        with cs.use_backend("reference"):
            other.step()

    peers["reference"] = median_seconds(reference, slow)
    quantiles = statistics.quantiles(steps, n=10)
    report.add(
        "phase2",
        network=network,
        tasks=tasks,
        dtype=str(dtype).removeprefix("torch."),
        numel=problem.numel,
        bytes=problem.bytes,
        peers={
            name: {"seconds": value, "ratio": value / statistics.median(steps)}
            for name, value in peers.items()
        },
        milliseconds={name: 1e3 * quantiles[i] for name, i in (("p20", 1), ("p50", 4), ("p80", 7))},
        copy_gigabytes_per_second=problem.bytes / statistics.median(copies) / 1e9,
        times_the_limit=statistics.median(
            step / copy for step, copy in zip(steps, copies, strict=True)
        ),
    )
