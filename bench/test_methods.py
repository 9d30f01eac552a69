"""Every method against TorchJD and the textbook, from K x `.grad` to `.grad`.

"step" starts from the gradients that K backward passes have left in the parameters' `.grad` and
ends with the update in `.grad`; "matrix" starts from a K x N matrix that is already there and ends
with a vector. As in the other benchmark, the limit is a copy of as many bytes just before.
"""

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.peers import TORCHJD, best_options, stacked, torchjd_matrix, torchjd_step
from harness.shapes import NETWORKS, Shape, first_layers
from harness.synchronizations import host_synchronizations
from harness.textbook import TEXTBOOK
from harness.timing import Copy, median_ratio, median_seconds, seconds
from torch import Tensor, nn

import cs_kernels as cs

ROUNDS = {"small": (31, 11), "resnet18": (11, 9), "resnet50": (5, 1)}
"""The networks that are timed: rounds of ours, and of the peers."""

METHODS: dict[str, Callable[[], cs.Method]] = {
    "PCGrad": cs.PCGrad,
    "CAGrad": lambda: cs.CAGrad(0.4, rescale=0),
    "MGDA": cs.MGDA,
    "AlignedMTL": cs.AlignedMTL,
    "NashMTL": cs.NashMTL,
    "IMTLG": cs.IMTLG,
    "UPGrad": cs.UPGrad,
    "FairGrad": cs.FairGrad,
    "ConFIG": cs.ConFIG,
    "GradVac": cs.GradVac,
    "GradDrop": cs.GradDrop,
}


NO_LAYERS = cs.Layout((), cs.Coverage({}, {}, {}, {}))


class Problem:
    """The parameters of a trunk and K gradients of each."""

    def __init__(self, shapes: list[Shape], tasks: int) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.tasks = [str(task) for task in range(tasks)]
        self.trunk = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.parameters = list(self.trunk)
        self.grads = [[torch.randn(shape) for shape in shapes] for _ in range(tasks)]
        self.numel = sum(p.numel() for p in self.parameters)
        self._gradients = cs.TaskGradients(dict(self.trunk.named_parameters()), self.tasks)
        self._step = cs.Step(tasks=tuple(self.tasks))

    def step(self, method: cs.Method) -> None:
        for task, of_task in zip(self.tasks, self.grads, strict=True):
            for parameter, grad in zip(self.parameters, of_task, strict=True):
                parameter.grad = grad
            self._gradients.collect(task)
        method.combine(self._gradients, NO_LAYERS, self._step)

    def matrix(self) -> Tensor:
        return torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in self.grads])

    def update(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])

    def moved(self, name: str) -> int:
        """Gradients read for the Gramian and for the sum, or once; the update written."""
        tasks = len(self.tasks)
        reads = tasks if name == "GradDrop" else 2 * tasks
        return (reads + 1) * self.numel * 4


def on_matrix(method: cs.Method, matrix: Tensor) -> Tensor:
    if isinstance(method, cs.GramianMethod):
        return cs.functional.combine(matrix, method.weights(cs.functional.gramian(matrix)))
    update = torch.empty_like(matrix[0])
    torch.ops.cs_kernels.drop_signs_([update], list(matrix), [0.0] * len(matrix), 0, 0, len(matrix))
    return update


def check(problem: Problem, name: str, method: cs.Method, gramian: Tensor) -> None:
    """The update is that of weights from the exact Gramian, or of one sign."""
    problem.step(method)
    head = torch.stack([of_task[1].flatten() for of_task in problem.grads]).double()
    update = problem.parameters[1].grad
    assert update is not None
    if isinstance(method, cs.GramianMethod):
        expected = METHODS[name]().weights(gramian) @ head  # type: ignore[attr-defined]
    else:
        positive, negative = head.clamp(min=0).sum(0), head.clamp(max=0).sum(0)
        nearer = (update.flatten() - positive).abs() < (update.flatten() - negative).abs()
        expected = torch.where(nearer, positive, negative)
        assert abs(nearer.double().mean() - 0.5) < 0.05
    assert (update.flatten() - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("tasks", [2, 4, 8, 16])
@pytest.mark.parametrize("network", ROUNDS)
@torch.no_grad()
def test_methods(report: Any, quick: bool, network: str, tasks: int) -> None:
    problem = Problem(first_layers(network) if quick else NETWORKS[network], tasks)
    matrix = problem.matrix()
    gramian = torch.zeros(tasks, tasks, dtype=torch.float64)
    for piece in matrix.split(1 << 20, dim=1):
        gramian += piece.double() @ piece.double().T
    rounds, peers_rounds = (2, 1) if quick else ROUNDS[network]
    for name, make in METHODS.items():
        method = make()
        check(problem, name, method, gramian)
        copy = Copy(problem.moved(name))
        steps, copies = [], []
        for _ in range(rounds):
            copies.append(seconds(copy))
            steps.append(seconds(lambda: problem.step(method)))
        del copy
        theirs = TORCHJD[name](tasks)
        options = best_options(theirs)

        def torchjd() -> None:
            jacobians = stacked(problem.grads)
            torchjd_step(theirs, problem.parameters, jacobians, **options)

        peers = {
            "TorchJD step": median_seconds(torchjd, peers_rounds),
            "TorchJD matrix": median_seconds(lambda: torchjd_matrix(theirs, matrix), peers_rounds),
        }
        synchronizations = {
            "ours": host_synchronizations(lambda: problem.step(method)),
            "TorchJD": host_synchronizations(torchjd),
        }
        textbook = TEXTBOOK.get(name)
        if textbook is not None:
            slow = 1 if network == "resnet50" or tasks > 4 else min(3, peers_rounds)
            peers["textbook"] = (
                seconds(lambda: textbook(problem.grads))
                if network == "resnet50"
                else median_seconds(lambda: textbook(problem.grads), slow)
            )
            if network == "small":  # the same for every size
                synchronizations["textbook"] = host_synchronizations(
                    lambda: textbook(problem.grads)
                )
        step = statistics.median(steps)
        ours_matrix = median_seconds(lambda: on_matrix(method, matrix), rounds)
        report.add(
            "methods",
            method=name,
            network=f"{network}, 4 layers" if quick else network,
            tasks=tasks,
            numel=problem.numel,
            bytes=problem.moved(name),
            milliseconds={"step": 1e3 * step, "matrix": 1e3 * ours_matrix},
            times_the_limit=median_ratio(steps, copies),
            peers={
                peer: {
                    "seconds": value,
                    "ratio": value / (ours_matrix if peer == "TorchJD matrix" else step),
                }
                for peer, value in peers.items()
            },
            synchronizations=synchronizations,
        )


@pytest.mark.parametrize("tasks", [2, 4, 8, 16, 40])
def test_solvers(report: Any, quick: bool, tasks: int) -> None:
    """From the Gramian to the weights, also of a singular one."""
    torch.manual_seed(0)
    microseconds = {}
    for name, make in {**METHODS, "NTKMTL": cs.NTKMTL}.items():
        method = make()
        if not isinstance(method, cs.GramianMethod):
            continue
        worst = 0.0
        for rank in (2 * tasks, max(1, tasks // 2)):
            rows = torch.randn(tasks, rank, dtype=torch.float64)
            gramian = rows @ rows.T
            worst = max(worst, median_seconds(lambda: method.weights(gramian), 3 if quick else 300))
        microseconds[name] = 1e6 * worst
    report.add("solvers", tasks=tasks, microseconds=microseconds)
