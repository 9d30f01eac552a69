"""Steps with `step_together` against steps with `step`, and networks for them."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from networks import AB, TASKS, Setup, sgd_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.engine.stacked.mode import RunTrunk

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def setup_of_sgd() -> Setup:
    """Adam would make rounding errors of zero gradients, of a bias before a norm, into updates."""
    return Setup(optimizer=torch.optim.SGD, lr=0.05, momentum=0.9)


def together(setup: Setup, batch: int) -> Callable[[RunTrunk], dict[str, Tensor]]:
    """The losses of `Setup.closure`."""
    x, targets = setup.batches[batch]

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {
            task: (setup.heads[task](z) - targets[TASKS.index(task)]).square().mean()
            for task, z in run(x).items()
        }

    return forward


def assert_trains_alike(
    *arguments: Any,
    epochs: int = 1,
    tasks: Callable[[int], Iterable[str] | None] = lambda batch: None,
    change: Callable[[Setup], None] = lambda setup: None,
    **options: Any,
) -> cs.MultiTaskOptimizer:
    """Eight batches an epoch with `step` and with `step_together`; returns the second's."""
    first, second = setup_of_sgd(), setup_of_sgd()
    change(first)
    change(second)
    one = first.start(*copy.deepcopy(arguments), **copy.deepcopy(options))
    other = second.start(*copy.deepcopy(arguments), **copy.deepcopy(options))
    for epoch in range(epochs):
        one.start_epoch(epoch)
        other.start_epoch(epoch)
        for batch in range(8):
            expected = one.step(first.closure(batch), tasks(batch))
            losses = other.step_together(together(second, batch), tasks(batch))
            assert list(losses) == list(expected)
            torch.testing.assert_close(losses, expected, **CLOSE)
            torch.testing.assert_close(second.state(), first.state(), **CLOSE)
    assert all(
        isinstance(p, nn.Parameter) for p in second.trunk._modules["stem"]._parameters.values()
    )
    assert str(other.coverage()) == str(one.coverage())
    torch.testing.assert_close(other.report().losses, one.report().losses, **CLOSE)
    for name in ("products", "channels", "conflicts", "gramian", "task_weights"):
        found, wanted = getattr(other.report(), name), getattr(one.report(), name)
        torch.testing.assert_close(found, wanted, **CLOSE)
    return other


def trained(
    trunk: nn.Module,
    x: Any,
    way: str,
    steps: int = 3,
    tasks: list[str] = AB,
    step: Callable[[Callable[[], object]], object] = lambda make: make(),
    **options: Any,
) -> tuple[cs.MultiTaskOptimizer, list[Tensor]]:
    """Some steps of a copy of a trunk, whose output is the prediction; its state."""
    trunk = copy.deepcopy(trunk)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=0.02), tasks, **options)

    def loss(z: Tensor, task: str) -> Tensor:
        at = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).view(z.shape)
        return (z * (at if task == "a" else 0.3 * at.flip(-1) - at)).tanh().mean()

    for _ in range(steps):
        if way == "step":
            step(lambda: opt.step(lambda task: loss(trunk(x), task)))
        else:
            step(lambda: opt.step_together(lambda run: {t: loss(z, t) for t, z in run(x).items()}))
    return opt, [*trunk.state_dict().values(), *(p.grad for p in trunk.parameters())]


def assert_alike(trunk: nn.Module, x: Any, **options: Any) -> cs.MultiTaskOptimizer:
    _, expected = trained(trunk, x, "step", **options)
    opt, found = trained(trunk, x, "together", **options)
    torch.testing.assert_close(found, expected, **CLOSE)
    return opt


def converted(trunk: nn.Module, tasks: list[str] = AB) -> nn.Module:
    torch.manual_seed(1)
    trunk = cs.nn.convert_task_batchnorm(trunk, tasks).double()
    for norm in cs.nn.task_norms(trunk):
        for child in norm.children():
            nn.init.uniform_(child.weight, 0.5, 1.5)
    return trunk


def small(p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return converted(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3),
            nn.BatchNorm2d(5),
        )
    )


class Checkpointed(nn.Module):
    """Recomputes its parts in the backward pass."""

    def __init__(self, trunk: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.trunk[:3], self.trunk[3:]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def pictures() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()


class Branches(nn.Module):
    """Two outputs, of which a task uses one, or a task both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.one = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.two = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        return [self.one(x), self.two(x)]


class Head(nn.Module):
    """A network whose heads are called by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.heads = nn.ModuleDict({t: nn.Linear(4, 1) for t in AB})

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.trunk(x)
        return result
