"""Phase 2 of a network's layers on random numbers, and whether its result is right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import cs_kernels as cs
from harness.shapes import NETWORKS, first_layers
from harness.textbook import textbook_pcgrad


@dataclass
class Problem:
    """One trunk's weights, normalizations and gradients, and buffers for the update."""

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

    def step(self) -> Tensor:
        """The priorities of one layer after the other."""
        layers = len(self.weights)
        priorities: Tensor = torch.ops.cs_kernels.phase2_update_(
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


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(*networks: str, tasks: Sequence[int] = (2, 4, 8)) -> pytest.MarkDecorator:
    """Every network with some numbers of tasks in both types."""
    return pytest.mark.parametrize(
        ("network", "tasks", "dtype"),
        [
            pytest.param(network, number, dtype, id=f"{network}-K{number}-{name_of(dtype)}")
            for network in networks
            for number in tasks
            for dtype in (torch.float32, torch.bfloat16)
        ],
    )


def make(network: str, tasks: int, dtype: torch.dtype, quick: bool = False) -> Problem:
    """Random gradients: half of all pairs conflict, so nearly every group is visited again."""
    torch.manual_seed(0)
    shapes = first_layers(network) if quick else NETWORKS[network]
    return Problem(
        tasks,
        [torch.randn(shape).to(dtype) for shape in shapes],
        torch.rand(tasks * sum(shape[0] for shape in shapes)) + 0.5,
        torch.rand(tasks * sum(shape[0] for shape in shapes)) + 0.5,
        [torch.randn(shape).to(dtype) for shape in shapes for _ in range(tasks)],
    )


def plain_formula(problem: Problem, priorities: Tensor) -> list[Tensor]:
    """sum_j G_j + a_i G_i of every group, in torch and in the gradients' own dtype."""
    updates = []
    of_layers = priorities.split([len(weight) for weight in problem.weights])
    for layer, priority in enumerate(of_layers):
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


def pcgrad_peers(problem: Problem) -> dict[str, Callable[[], object]]:
    """PCGrad of the peers that are installed, and the reference, on the same gradients."""
    of_tasks = [problem.of_task(i) for i in range(problem.tasks)]
    peers: dict[str, Callable[[], object]] = {"textbook PCGrad": lambda: textbook_pcgrad(of_tasks)}
    if find_spec("torchjd") is not None:
        from harness.peers import TORCHJD, stacked, torchjd_matrix, torchjd_step

        pcgrad = TORCHJD["PCGrad"](problem.tasks)
        matrix = torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in of_tasks])
        parameters = [nn.Parameter(weight.clone()) for weight in problem.weights]
        jacobians = stacked(of_tasks)
        peers["TorchJD matrix"] = lambda: torchjd_matrix(pcgrad, matrix)
        peers["TorchJD step"] = lambda: torchjd_step(pcgrad, parameters, jacobians)

    def reference() -> None:
        with cs.use_backend("reference"):
            problem.step()

    return {**peers, "reference": reference}


def check(problem: Problem) -> None:
    """The step's error against float64 is at most twice that of the plain formula."""
    priorities = problem.step()
    exact = problem.to(torch.float64)
    with cs.use_backend("reference"):
        expected = exact.step()
    assert torch.equal(priorities, expected)
    plain = plain_formula(problem, priorities)
    for update, other, oracle in zip(problem.updates, plain, exact.updates, strict=True):
        # Or, as in the tests, the roundings of storing: two in half precision, added up in float32.
        roundings = 1 if update.dtype is torch.float32 else 2
        rounding = roundings * torch.finfo(update.dtype).eps / 2 * oracle.abs().max()
        allowed = torch.maximum(2 * (other.double() - oracle).abs().max(), rounding)
        assert (update.double() - oracle).abs().max() <= allowed
