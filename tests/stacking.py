"""Steps with `step_together` against steps with `step`, and networks for them."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from networks import AB, TASKS, Composed, Setup, with_task_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.engine.stacked.together import RunTrunk

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
BY_LAYER = cs.MGDA(groups="layer")
LAYERWISE = pytest.mark.parametrize("method", [cs.ConnectionStrength(), BY_LAYER], ids=repr)


def together(setup: Setup, batch: int) -> Callable[[RunTrunk], dict[str, Tensor]]:
    """The losses of `Setup.closure`."""
    x, targets = setup.batches[batch]

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {
            task: (setup.heads[task](z) - targets[TASKS.index(task)]).square().mean()
            for task, z in run(x).items()
        }

    return forward


def _assert_same_reports(
    found: cs.MultiTaskOptimizer, expected: cs.MultiTaskOptimizer, close: dict[str, float]
) -> None:
    one, other = expected.report(), found.report()
    assert (other.rows, other.layers) == (one.rows, one.layers)
    for name in ("products", "channels", "conflicts", "gramian", "task_weights"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), **close)
    for name in ("losses", "removed", "update_norm"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), **close)


def assert_trains_alike(
    *arguments: Any,
    epochs: int = 1,
    tasks: Callable[[int], Iterable[str] | None] = lambda batch: None,
    change: Callable[[Setup, int], object] = lambda setup, batch: None,
    close: dict[str, float] = CLOSE,
    **options: Any,
) -> cs.MultiTaskOptimizer:
    """Eight batches an epoch with `step` and with `step_together`; returns the second's.

    `change` is called before each batch, and with batch -1 before the start.
    """
    setups, opts = [], []
    for _ in range(2):
        # Adam would make rounding errors of zero gradients, of a bias before a norm, into updates.
        setup = Setup(optimizer=torch.optim.SGD, lr=0.05, momentum=0.9)
        change(setup, -1)
        own = copy.deepcopy(options)
        if parameters := own.get("weighting", cs.EqualWeights()).parameters():
            setup.optimizer.add_param_group({"params": parameters})
        setups.append(setup)
        opts.append(setup.start(*copy.deepcopy(arguments), **own))
    (first, second), (one, other) = setups, opts
    for number in range(8 * epochs):
        batch = number % 8
        for setup, opt in zip(setups, opts, strict=True):
            opt.start_epoch(number // 8)
            change(setup, batch)
        expected = one.step(first.closure(batch), tasks(batch))
        losses = other.step_together(together(second, batch), tasks(batch))
        assert list(losses) == list(expected)
        torch.testing.assert_close(losses, expected, **close)
        torch.testing.assert_close(second.state(), first.state(), **close)
        _assert_same_reports(other, one, close)
    assert str(other.coverage()) == str(one.coverage())
    assert all(type(p) is nn.Parameter for p in second.trunk._modules["stem"]._parameters.values())
    states = [opt.method.state_dict() for opt in opts]
    torch.testing.assert_close(*[state.pop("targets", None) for state in states], **close)
    assert states[0] == states[1]
    return other


def _leaning(_: nn.Module, z: Tensor, task: str) -> Tensor:
    """A loss of the output, in conflict with that of the other tasks."""
    at = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).view(z.shape)
    return (z * (at if task == "a" else 0.3 * at.flip(-1) - at)).tanh().mean()


def trained(
    network: nn.Module,
    x: Any,
    way: str,
    steps: int = 3,
    tasks: list[str] = AB,
    *,
    loss: Callable[[Any, Any, str], Tensor] = _leaning,
    trunk: Callable[[Any], nn.Module] = lambda network: network,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.02,
    chosen: Callable[[int], Iterable[str] | None] = lambda number: None,
    step: Callable[[Callable[[], object]], object] = lambda make: make(),
    watch: Callable[[cs.MultiTaskOptimizer, nn.Module], object] = lambda opt, network: None,
    **options: Any,
) -> tuple[cs.MultiTaskOptimizer, list[Tensor | None]]:
    """Some steps of a copy of a network; its optimizer and its state.

    `x` is the trunk's input, or a function that gets the trunk, or `run`, and calls it. `loss` gets
    the network, whose `number` is that of the step, an output of the trunk, and the task; `chosen`
    gives the tasks of a step, `step` makes one, `watch` is called after it. With the way "mixed",
    step 2 alone is one of `step`.
    """
    network = copy.deepcopy(network)
    own, torch_optimizer = trunk(network), optimizer(network.parameters(), lr=lr)
    opt = cs.MultiTaskOptimizer(own, torch_optimizer, tasks, **copy.deepcopy(options))
    call = x if callable(x) else lambda run: run(x)
    opt.start_epoch(0)

    def make() -> None:
        some = chosen(network.number)
        if way == "step" or (way == "mixed" and network.number == 2):
            opt.step(lambda task: loss(network, call(own), task), some)
        elif way == "backward":
            z = call(own)
            opt.backward({task: loss(network, z, task) for task in tasks})
            torch_optimizer.step()
        else:
            opt.step_together(
                lambda run: {t: loss(network, z, t) for t, z in call(run).items()}, some
            )

    for network.number in range(steps):
        step(make)
        watch(opt, network)
    return opt, [*network.state_dict().values(), *(p.grad for p in network.parameters())]


def assert_alike(
    network: nn.Module,
    x: Any,
    *,
    close: dict[str, float] = CLOSE,
    hides: bool = False,
    **options: Any,
) -> cs.MultiTaskOptimizer:
    """Trains with `step`, then with `step_together`; returns the second's optimizer.

    If the network hides parameters from the graph, their coverage may differ.
    """
    one, expected = trained(network, x, "step", **options)
    other, found = trained(network, x, "together", **options)
    torch.testing.assert_close(found, expected, **close)
    if not hides:
        assert str(other.coverage()) == str(one.coverage())
    _assert_same_reports(other, one, close)
    return other


def squares(x: Tensor) -> Callable[[RunTrunk], dict[str, Tensor]]:
    """A loss a task, alike but for what its normalizations do."""
    return lambda run: {task: z.square().mean() for task, z in run(x).items()}


def converted(trunk: nn.Module, tasks: list[str] = AB) -> nn.Module:
    torch.manual_seed(1)
    return with_task_norms(trunk.double(), tasks)


def small() -> nn.Module:
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


def vectors() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()


def pictures() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double()


def checkpointed(reentrant: bool, *parts: nn.Module) -> nn.Module:
    """Recomputes its parts in the backward pass."""

    def run(trunk: Any, x: Tensor) -> Tensor:
        for part in trunk.parts:
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    return Composed(run, parts=nn.ModuleList(parts))


def branches() -> nn.Module:
    """Two outputs, of which a task uses one, or a task both."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs))

    def run(trunk: Any, x: Tensor) -> list[Tensor]:
        x = trunk.stem(x)
        return [trunk.one(x), trunk.two(x)]

    return Composed(run, stem=layer(3, 4), one=layer(4, 5), two=layer(4, 5))


def head() -> nn.Module:
    """A network whose heads are called by the loss."""
    return Composed(
        lambda network, x: network.trunk(x),
        trunk=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
        heads=nn.ModuleDict({task: nn.Linear(4, 1) for task in AB}),
    )


def of_head(network: Any, z: Tensor, task: str) -> Tensor:
    result: Tensor = network.heads[task](z).sin().mean()
    return result
