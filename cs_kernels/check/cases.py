"""The checks of one backend on one device: operators, whole steps, a captured step, and times."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import cs_kernels as cs
from cs_kernels.ops import backends
from cs_kernels.ops.backends import use_backend

K = 4
"""The number of tasks."""
_LAYERS = [((48, 40), 0, 1), ((24, 16, 3, 3), 0, 1), ((16, 12, 2, 2), 1, 4)]
"""The shape, output channel dimension and groups of each weight."""
_VECTOR = (70_003,)
"""The shape of a tensor without channel groups; its length is odd and spans many blocks."""
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The largest allowed error of a result by dtype, relative to the largest magnitude in it. Float64
products are accumulated from float32 sums, and bfloat16 projections are rounded twice."""
STEP_LIMIT = 1e-8
"""The largest allowed relative error of a float64 parameter after training."""
_STEPS = 4


class WrongError(Exception):
    """A result's error exceeds its limit, or results differ between runs."""


Check = Callable[[str], float]
"""Takes a device type; returns the largest ratio of an error to its limit, or a ratio of times."""


def _arguments(name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """An operator's arguments on the CPU; updates that it does not read are filled with NaN."""
    torch.manual_seed(1)
    shapes = [shape for shape, _, _ in _LAYERS]
    dims, groups = [dim for _, dim, _ in _LAYERS], [groups for *_, groups in _LAYERS]
    channels = [shape[dim] * (groups if dim else 1) for shape, dim, groups in _LAYERS]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    gamma, variances = torch.randn(K * sum(channels)), torch.rand(K * sum(channels)) + 0.1
    eps = [1e-5] * (K * len(_LAYERS))
    grads: list[Tensor | None] = [
        torch.randn(shape).to(dtype) for shape in [*shapes, _VECTOR] for _ in range(K)
    ]
    grads[K + 1] = None
    updates = [torch.full(shape, torch.nan, dtype=dtype) for shape in [*shapes, _VECTOR]]
    priorities = [torch.randint(K, (number,)) for number in channels]
    trunk = updates, grads, priorities, dims, groups, K
    rows = torch.randn(len(_LAYERS), K, 2 * K, dtype=torch.float64)
    gramians = rows @ rows.mT
    if name == "connection_strength":
        own = [vector[: K * channels[0]].view(K, -1) for vector in (gamma, variances)]
        return weights[0], *own, eps[:K], True, 0, 1
    if name == "phase2_apply_":
        sums = [torch.randn(shape).to(dtype) for shape in [*shapes, _VECTOR]]
        return sums, grads, priorities, gramians, dims, groups, K
    if name.endswith("_weights"):
        options: dict[str, tuple[Any, ...]] = {
            "pcgrad": (1, 2),
            "cagrad": (0.4,),
            "aligned_mtl": ("min",),
            "fair_grad": (2.0,),
            "gradvac": (torch.full_like(gramians, 0.3), 0.1, 1, 2),
        }
        return gramians, *options.get(name.removesuffix("_weights"), ())
    offsets = [*accumulate((g.numel() for g in grads if g is not None), initial=5)][:-1]
    arguments: dict[str, tuple[Any, ...]] = {
        "task_priority": (torch.rand(K, 300),),
        "project_conflicts_": trunk,
        "phase2_update_": (updates, grads, weights, gamma, variances, eps, dims, groups, K),
        "channel_energies": (weights, dims, groups),
        "energy_priority": (torch.rand(sum(channels)).double(), gamma, variances, eps, channels),
        "phase2_products_": trunk,
        "gramian": (grads, [0, 0, 1, 1], 2, K),
        "combine_": (updates, grads, torch.rand(2, K).double(), [0, 0, 1, 1], K),
        "sketch_": (torch.zeros(1024), [g for g in grads if g is not None], offsets, 3),
        "sketch_and_weight_": (
            *(torch.zeros(1024), *([torch.randn_like(u) for u in updates] for _ in range(2))),
            *([999 * n for n in range(len(updates))], 3, torch.tensor(0.7).double(), True),
        ),
        "drop_signs_": (updates, grads, [0.0, 0.5, 0.0, 0.1], 1, 2, K),
    }
    return arguments[name]


def _call(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that an operator returns, then the tensors that it writes to."""
    operator = getattr(torch.ops.cs_kernels, name).default
    schema = operator._schema.arguments
    result = operator(*arguments)
    outputs = [value for value, a in zip(arguments, schema, strict=False) if a.is_write]
    return [leaf for leaf in tree_leaves([result, outputs]) if isinstance(leaf, Tensor)]


def _in_float64(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest magnitude; infinite for NaN."""
    difference = (actual.cpu().double() - expected.double()).abs().max()
    error = float(difference / expected.double().abs().max().clamp(min=1e-300))
    return error if error == error else float("inf")


@contextlib.contextmanager
def _without_synchronization(device: str) -> Iterator[None]:
    """Raises if the host synchronizes with a GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _operator(name: str, device: str) -> float:
    """Compares an operator with the float64 reference.

    Three runs must give the same bits; the second and third must not synchronize with the host.
    """
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        arguments = _arguments(name, dtype)
        with use_backend("reference"):
            expected = _call(name, tree_map_only(Tensor, _in_float64, arguments))
        on_device = tree_map_only(Tensor, lambda leaf: leaf.to(device, copy=True), arguments)
        first: list[Tensor] = []
        for run in range(3):
            copies = tree_map_only(Tensor, Tensor.clone, on_device)
            with _without_synchronization(device if run else "cpu"):
                results = _call(name, copies)
            first = first or results
            if not all(torch.equal(a, b) for a, b in zip(first, results, strict=True)):
                raise WrongError(f"runs 1 and {run + 1} differ bitwise, with {dtype}")
        for number, (result, right) in enumerate(zip(first, expected, strict=True)):
            error = _error(result, right)
            limit = LIMITS.get(result.dtype, 0.0)
            if not error <= limit:
                raise WrongError(
                    f"result {number} of {result.dtype} is wrong by {error:.1e} of its greatest"
                    f" magnitude, with gradients of {dtype}; the limit is {limit:.0e}"
                )
            worst = max(worst, error / limit if limit else 0.0)
    return worst


class _Training:
    """A small convolutional network, with a batch normalization and a head per task."""

    def __init__(self, method: cs.Method, device: str, *, captured: bool = False) -> None:
        torch.manual_seed(2)
        self.tasks = tuple("abcd")
        layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)]
        trunk = cs.nn.convert_task_batchnorm(nn.Sequential(*layers), self.tasks)
        heads = nn.ModuleDict({task: nn.Linear(8, 1) for task in self.tasks})
        self.network = nn.ModuleList([trunk, heads]).double().to(device)
        self.trunk, self.heads = trunk, heads
        self.batches = torch.randn(_STEPS, 8, 3, 8, 8, dtype=torch.float64).to(device)
        self.x = torch.empty_like(self.batches[0])
        self.sgd = torch.optim.SGD(self.network.parameters(), lr=0.05, momentum=0.9)
        self.opt = cs.MultiTaskOptimizer(trunk, self.sgd, self.tasks, method)
        make: Any = (
            partial(self.opt.capture, warmup=1) if captured else partial(partial, self.opt.step)
        )
        self.step: Callable[[], Any] = make(self.loss)

    def loss(self, task: str) -> Tensor:
        y: Tensor = self.heads[task](self.trunk(self.x).mean((2, 3)))
        return (y - float(self.tasks.index(task))).square().mean()

    def train(self, device: str) -> list[Tensor]:
        for number, batch in enumerate(self.batches):
            self.x.copy_(batch)
            with _without_synchronization(device if number > 1 else "cpu"):
                self.step()
        return [p.detach().cpu() for p in self.network.parameters()]


def _compared(actual: list[Tensor], expected: list[Tensor], baseline: str) -> float:
    error = max(map(_error, actual, expected))
    if not error <= STEP_LIMIT:
        raise WrongError(
            f"a parameter is wrong by {error:.1e} after {_STEPS} steps in float64, compared with"
            f" {baseline}; the limit is {STEP_LIMIT:.0e}"
        )
    return error / STEP_LIMIT


def _step(method: Callable[[], cs.Method], device: str) -> float:
    with use_backend("reference"):
        expected = _Training(method(), "cpu").train("cpu")
    return _compared(_Training(method(), device).train(device), expected, "the reference")


def _captured(device: str) -> float:
    eager = _Training(cs.ConnectionStrength(), device).train(device)
    captured = _Training(cs.ConnectionStrength(), device, captured=True).train("cpu")
    return _compared(captured, eager, "steps without capture")


def _seconds(run: Callable[[], object], device: str) -> float:
    """The median of five runs, after two warm-up runs."""
    times = []
    for number in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number > 1:
            times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def _phase2_over_copy(device: str) -> float:
    """The time of Phase 2, relative to a copy that moves as much memory.

    For 8 M float32 parameters and K = 4 tasks, Phase 2 reads K gradients and the weights and writes
    the update: K + 2 times the bytes of the parameters.
    """
    shapes = [(256, 256, 3, 3)] * 13
    weights = [torch.randn(shape, device=device) for shape in shapes]
    grads = [torch.randn(shape, device=device) for shape in shapes for _ in range(K)]
    updates = [torch.empty_like(weight) for weight in weights]
    gamma = torch.randn(256 * K * len(shapes), device=device)
    zeros, ones = [0] * len(shapes), [1] * len(shapes)
    eps = [1e-5] * (K * len(shapes))
    phase2 = partial(
        torch.ops.cs_kernels.phase2_update_,
        *(updates, grads, weights, gamma, gamma.abs() + 0.1, eps, zeros, ones, K),
    )
    # A copy reads and writes every element.
    source = torch.randn(sum(map(torch.numel, weights)) * (K + 2) // 2, device=device)
    target = torch.empty_like(source)
    return _seconds(phase2, device) / _seconds(lambda: target.copy_(source), device)


def _step_over_plain(device: str) -> float:
    """The time of a `ConnectionStrength` step, relative to the passes and SGD alone."""
    torch.manual_seed(3)
    tasks = tuple("abcd")
    widths = zip((3, 64, 128, 128), (64, 128, 128, 256), strict=True)
    blocks = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
    plain = nn.Sequential(*(layer for block in blocks for layer in block))
    trunk = cs.nn.convert_task_batchnorm(plain, tasks).to(device)
    sgd = torch.optim.SGD(trunk.parameters(), lr=1e-3)
    opt = cs.MultiTaskOptimizer(trunk, sgd, tasks, cs.ConnectionStrength())
    plain_trunk = copy.deepcopy(trunk)
    plain_sgd = torch.optim.SGD(plain_trunk.parameters(), lr=1e-3)
    x = torch.randn(16, 3, 32, 32, device=device)

    def plain_step() -> None:
        plain_sgd.zero_grad()
        for task in tasks:
            with cs.nn.active_task(plain_trunk, task):
                plain_trunk(x).square().mean().backward()
        plain_sgd.step()

    step = _seconds(lambda: opt.step(lambda _: trunk(x).square().mean()), device)
    return step / _seconds(plain_step, device)


STEPS: dict[str, Check] = {
    "step of ConnectionStrength": partial(_step, cs.ConnectionStrength),
    "step of PCGrad": partial(_step, cs.PCGrad),
    "step of UPGrad": partial(_step, cs.UPGrad),
}
GPU_ALONE: dict[str, Check] = {"captured step": _captured}
TIMES: dict[str, Check] = {
    "time of Phase 2 over a copy": _phase2_over_copy,
    "time of a step over a plain one": _step_over_plain,
}
CHECKS: dict[str, Check] = {
    **{name: partial(_operator, name) for name in backends.OPERATORS},
    **STEPS,
    **GPU_ALONE,
    **TIMES,
}


def names(device: str) -> list[str]:
    """The names of the correctness checks for a device type."""
    excluded: Sequence[str] = [*TIMES, *(GPU_ALONE if device == "cpu" else ())]
    return [name for name in CHECKS if name not in excluded]
