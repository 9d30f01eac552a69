"""Whole training steps in the demo's network: the paper's training-time table.

All methods take turns in every round, so that what else the machine does falls on all alike.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from textbook import textbook_pcgrad
from timing import seconds
from torch import Tensor, nn

import cs_kernels as cs

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from network import Head, Trunk

CHANNELS = {"disparity": 1, "normals": 3, "edges": 1}
TASKS = list(CHANNELS)
ROWS: dict[str, Callable[[], tuple[cs.Method, cs.Schedule]]] = {
    "Phase 1": lambda: (cs.ConnectionStrength(), cs.Sequential()),
    "Sum": lambda: (cs.Sum(), cs.Joint()),
    "Phase 2": lambda: (cs.ConnectionStrength(), cs.Joint()),
    "PCGrad": lambda: (cs.PCGrad(), cs.Joint()),
    "CAGrad": lambda: (cs.CAGrad(), cs.Joint()),
    "MGDA": lambda: (cs.MGDA(), cs.Joint()),
    "AlignedMTL": lambda: (cs.AlignedMTL(), cs.Joint()),
    "NashMTL": lambda: (cs.NashMTL(), cs.Joint()),
    "IMTLG": lambda: (cs.IMTLG(), cs.Joint()),
    "UPGrad": lambda: (cs.UPGrad(), cs.Joint()),
    "GradDrop": lambda: (cs.GradDrop(), cs.Joint()),
    "textbook PCGrad": lambda: (_Textbook(), cs.Joint()),
}


class _Textbook(cs.Method):
    def combine(self, gradients: Any, layout: Any) -> None:
        parameters = gradients.reached()
        updates = textbook_pcgrad([[row[i] for i in parameters] for row in gradients.rows])
        for i, update in zip(parameters, updates, strict=True):
            gradients.parameters[i].grad = update
        gradients.clear()


class Network:
    """The demo's network, a batch, and one method to train it."""

    def __init__(self, method: cs.Method, schedule: cs.Schedule) -> None:
        torch.manual_seed(0)
        self.trunk = cs.nn.convert_task_batchnorm(Trunk(), TASKS)
        self.heads = nn.ModuleDict({task: Head(n) for task, n in CHANNELS.items()})
        adam = torch.optim.Adam([*self.trunk.parameters(), *self.heads.parameters()], lr=1e-4)
        self.opt = cs.MultiTaskOptimizer(self.trunk, adam, TASKS, method, schedule)
        self.picture = torch.randn(6, 3, 96, 96)
        self.targets = {task: torch.randn(6, n, 96, 96) for task, n in CHANNELS.items()}

    def loss(self, task: str) -> Tensor:
        output = self.heads[task](self.trunk(self.picture))
        return (output - self.targets[task]).abs().mean()

    def step(self) -> None:
        self.opt.step(self.loss)


def test_training_steps(report: Any, quick: bool) -> None:
    networks = {name: Network(*make()) for name, make in ROWS.items()}
    for network in networks.values():
        network.step()
    rounds = 2 if quick else 25
    times: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(rounds):
        for name, network in networks.items():
            times[name].append(seconds(network.step))
    activities = [torch.profiler.ProfilerActivity.CPU]
    for name, network in networks.items():
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                network.step()
        spent = {event.key: event.cpu_time_total / 3e6 for event in profile.key_averages()}
        surgery = spent.get("cs_kernels.collect", 0.0) + spent.get("cs_kernels.surgery", 0.0)
        ratios = [ours / first for ours, first in zip(times[name], times["Phase 1"], strict=True)]
        report.add(
            "steps",
            method=name,
            milliseconds=1e3 * statistics.median(times[name]),
            surgery_milliseconds=1e3 * surgery,
            over_phase_1=statistics.median(ratios) - 1,
        )
