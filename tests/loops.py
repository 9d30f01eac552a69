"""Training loops with captured and with eager steps, which must give the same results."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from networks import TASKS, Setup, assert_equal
from torch import Tensor
from torch.utils._pytree import tree_map

import cs_kernels as cs

STEPS = 14


class Loop:
    """A training loop whose batches are copied into static tensors."""

    def __init__(
        self,
        method: cs.Method | None = None,
        schedule: cs.Schedule | None = None,
        weighting: cs.Weighting | None = None,
        *,
        captured: bool,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        tasks: Iterable[str] | None = None,
        parts: int = 1,
        **options: Any,
    ) -> None:
        kind = optimizer or partial(torch.optim.SGD, momentum=0.9)
        self.setup = Setup(optimizer=kind, **{"lr": 0.05, **options})
        if weighting is not None and weighting.parameters():
            self.setup.optimizer.add_param_group({"params": weighting.parameters()})
        self.opt = self.setup.start(method, schedule, weighting=weighting, scaler=scaler)
        self.batch = [torch.empty_like(part) for part in self.setup.batches[0]]
        closures = [self._loss] * parts
        if captured:
            self.step: Callable[[], Any] = self.opt.capture(closures, tasks, warmup=2)
        else:
            self.step = lambda: self.opt.step(closures, tasks)
        self.losses: list[dict[str, Tensor]] = []

    def _loss(self, task: str) -> Tensor:
        x, targets = self.batch
        y = self.setup.heads[task](self.setup.trunk(x))
        return (y - targets[TASKS.index(task)]).square().mean()

    def train(
        self,
        start: int = 0,
        stop: int = STEPS,
        rate: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> "Loop":
        for number in range(start, stop):
            self.opt.start_epoch(number // 4)
            for static, new in zip(self.batch, self.setup.batches[number % 8], strict=True):
                static.copy_(new)
            self.losses.append(self.step())
            if rate is not None:
                rate.step()
        return self


def numbers(*parts: Any) -> Any:
    """State dicts, with lists in place of tensors."""
    states = [part if isinstance(part, dict) else part.state_dict() for part in parts]
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, states)


def assert_alike(captured: Loop, eager: Loop) -> None:
    assert_equal(captured.setup.state(), eager.setup.state())
    assert_equal(captured.losses, eager.losses)
    assert numbers(captured.opt) == numbers(eager.opt)


KINDS = dict.fromkeys(TASKS, "regression")
CASES: dict[str, Callable[..., Loop]] = {
    "ConnectionStrength": lambda **o: Loop(cs.ConnectionStrength(), **o),
    "Sum": lambda **o: Loop(cs.Sum(), **o),
    "PCGrad": lambda **o: Loop(cs.PCGrad(seed=3), **o),
    "PCGrad-layer": lambda **o: Loop(cs.PCGrad("mean", groups="layer"), **o),
    "GradDrop": lambda **o: Loop(cs.GradDrop([0.1, 0.0, 0.5], seed=4), **o),
    "NashMTL": lambda **o: Loop(cs.NashMTL(), **o),
    "NashMTL-layer": lambda **o: Loop(cs.NashMTL(groups="layer"), **o),
    "CAGrad": lambda **o: Loop(cs.CAGrad(), **o),
    "GradVac": lambda **o: Loop(cs.GradVac(beta=0.3, groups="layer"), **o),
    "DBMTL": lambda **o: Loop(cs.DBMTL(), None, cs.DynamicWeightAverage(), **o),
    "MGDA": lambda **o: Loop(cs.MGDA("loss+"), **o),
    "Dynamic": lambda **o: Loop(cs.GradDrop(), None, cs.DynamicWeightAverage(), **o),
    "Uncertainty": lambda **o: Loop(cs.UPGrad(), None, cs.UncertaintyWeights(KINDS), **o),
    "Tchebycheff": lambda **o: Loop(cs.PCGrad(), None, cs.SmoothTchebycheff(0.5, 1), **o),
    "FAMO": lambda **o: Loop(cs.GradDrop(), cs.Switch(1), cs.FAMO(reevaluate=False), **o),
    "GradNorm": lambda **o: Loop(cs.Sum(separate=True), None, cs.GradNorm(), **o),
    "Phase 1": lambda **o: Loop(None, cs.Sequential(), **o),
    "Switch": lambda **o: Loop(cs.PCGrad(), cs.Switch(2), **o),
    "Mixed": lambda **o: Loop(cs.NashMTL(), cs.Mixed(3, 1, "step"), cs.DynamicWeightAverage(), **o),
    "some tasks": lambda **o: Loop(cs.GradDrop(), tasks=["edges", "depth"], **o),
    "micro-batches": lambda **o: Loop(cs.PCGrad(), parts=3, **o),
}
