"""GradientBalancer: sketches relative to reading gradients once, steps relative to plain passes.

A plain step makes the same passes without a balancer: either a forward and a backward pass per task
on that task's batch, whose gradients add up; or one forward and one backward pass for all tasks.
Memory counts all tensors allocated after the forward pass, and is compared with a plain step's.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness.counting import GradientMemory
from harness.measure import in_turns, medians, ratio, timed
from harness.problems import assert_close
from harness.whole_steps import WholeStep
from torch import Tensor

import cs_kernels as cs

THREADS = 2
EVERY = 10


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sketch(report: Any, quick: bool, dtype: torch.dtype, threads: int) -> None:
    """Gradients have 4 M elements each, like a large layer; together they exceed every cache."""
    torch.set_num_threads(threads)
    count, numel = (2, 1 << 12) if quick else (6, 1 << 22)
    grads = [torch.randn(numel).to(dtype) for _ in range(count)]
    offsets = [n * numel for n in range(count)]
    sketches = []
    for backend in ("reference", "cpu"):
        with cs.use_backend(backend):
            sketches.append(torch.zeros(65536))
            torch.ops.cs_kernels.sketch_(sketches[-1], grads, offsets, 1)
    assert torch.equal(*sketches)
    total = torch.zeros(65536)

    updates, weight = [torch.zeros_like(grad) for grad in grads], torch.tensor(0.7).double()
    both = total, updates, grads, offsets, 1, weight, True

    def read() -> None:
        for grad in grads:
            grad.sum()

    def weigh() -> None:
        for update, grad in zip(updates, grads, strict=True):
            update.add_(grad, alpha=0.7)

    runs = {
        "sketch and weigh": timed(lambda: torch.ops.cs_kernels.sketch_and_weight_(*both)),
        "weigh": timed(weigh),
        "sketch": timed(lambda: torch.ops.cs_kernels.sketch_(total, grads, offsets, 1)),
        "read": timed(read),
        "Gramian": timed(lambda: torch.ops.cs_kernels.gramian(grads, [0] * count, 1, 1)),
    }
    times = in_turns(runs, 1 if quick else 31, 20)
    report(
        "sketches",
        dtype=str(dtype).removeprefix("torch."),
        numel=count * numel,
        threads=threads,
        milliseconds=medians(times),
        over_read=ratio(times["sketch"], times["read"]),
        over_gramian=ratio(times["sketch"], times["Gramian"]),
        over_weigh=ratio(times["sketch and weigh"], times["weigh"]),
    )


class _Balanced(WholeStep):
    """A step with a GradientBalancer, or a plain step; `own` means a forward pass per task."""

    def __init__(
        self, network: str, tasks: int, every: int, batch: int, *, own: bool, plain: bool
    ) -> None:
        super().__init__(network, tasks, batch=batch)
        self.own, self.plain = own, plain
        if not plain:
            shared = self.trunk.parameters()
            given = shared, self.heads, cs.UPGrad(), self.optimizer
            self.balancer = cs.GradientBalancer(*given, every=every)

    def passes(self) -> None:
        """Makes the passes of a step, without the optimizer's step."""
        if not self.own:
            self.backward(*self.forward())
            return
        self.optimizer.zero_grad()
        for task in self.heads:
            loss = self.losses({task: self.trunk(self.x)})[task]
            with contextlib.nullcontext() if self.plain else self.balancer.task(task):
                loss.backward()

    def backward(self, z: Tensor, losses: Mapping[str, Tensor]) -> None:
        if self.plain:
            super().backward(z, losses)
        else:
            self.balancer.backward(losses)

    def step(self) -> None:
        self.passes()
        self.optimizer.step()

    def peak(self) -> int:
        if not self.own:
            return super().peak()
        kept = [*self.parameters, *self.trunk.buffers()]
        with GradientMemory(kept, everything=True) as memory:
            self.step()
        return memory.peak

    def check(self) -> None:
        """Checks that the second step multiplies gradients by the first step's task weights."""
        if not self.plain:
            self.trunk.eval()  # Passes must not change the statistics.
            self.step()
            weights = torch.stack([*self.balancer.weights.values()])
            expected = weights @ self.rows()
            self.passes()
            assert_close([_flat(p.grad for p in self.shared)], [expected], 1e-4)
            self.trunk.train()
            for _ in range(self.balancer.every - 1):
                self.step()  # Runs of `every` steps then begin with an interval.


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])


@pytest.mark.parametrize(
    ("own", "batch"),
    [(True, 8), (True, 32), (True, 128), (False, 8)],
    ids=["own passes of 8", "own passes of 32", "own passes of 128", "one forward pass"],
)
@pytest.mark.parametrize("tasks", [2, 4, 8])
def test_steps(report: Any, quick: bool, tasks: int, own: bool, batch: int) -> None:
    torch.set_num_threads(THREADS)
    if quick and (tasks != 2 or batch != 8):
        pytest.skip("one small network")
    network = "small" if quick else "resnet18"
    rows = {
        name: _Balanced(network, tasks, every, batch, own=own, plain=name == "plain")
        for name, every in {"plain": 1, "every=1": 1, f"every={EVERY}": EVERY}.items()
        if not (own and every > 1)
    }
    for row in rows.values():
        row.check()

    cycles = {name: EVERY if name.endswith(str(EVERY)) else 1 for name in rows}

    def run(name: str) -> Any:
        milliseconds = timed(lambda: [rows[name].step() for _ in range(cycles[name])])
        return lambda: milliseconds() / cycles[name]

    times = in_turns({name: run(name) for name in rows}, 1 if quick else 15, 60)
    peaks = {name: max(row.peak() for _ in range(1 + cycles[name])) for name, row in rows.items()}
    numel = sum(p.numel() for p in rows["plain"].shared)
    for name in rows:
        report(
            "balancer",
            step=f"{'task' if own else 'backward'}, {name}",
            **rows[name].setting.facts(),
            milliseconds=medians(times)[name],
            over_plain=ratio(times[name], times["plain"]),
            threads=THREADS,
            peak_bytes=peaks[name],
            extra_bytes=peaks[name] - peaks["plain"],
            extra_over_gradient=(peaks[name] - peaks["plain"]) / (4 * numel),
        )
