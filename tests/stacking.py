"""Networks for `step_together`, and comparisons of its steps with `step`."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from networks import AB, TASKS, Composed, Setup, with_task_norms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.engine.stacked.together import RunTrunk

CLOSE = {"rtol": 1e-11, "atol": 1e-12}
BY_LAYER = cs.MGDA(groups="layer")


def together(setup: Setup, batch: int) -> Callable[[RunTrunk], dict[str, Tensor]]:
    """The losses of `Setup.closure`, for `step_together`."""
    x, targets = setup.batches[batch]

    def forward(run: RunTrunk) -> dict[str, Tensor]:
        return {
            task: (setup.heads[task](z) - targets[TASKS.index(task)]).square().mean()
            for task, z in run(x).items()
        }

    return forward


def opposed(_: nn.Module, z: Tensor, task: str) -> Tensor:
    """A loss of the output, in conflict with the other tasks' losses."""
    at = torch.linspace(-1, 2, z.numel(), dtype=z.dtype).view(z.shape)
    return (z * (at if task == "a" else 0.3 * at.flip(-1) - at)).tanh().mean()


@dataclass
class Case:
    """A network, and how it is trained."""

    network: nn.Module
    """The network; its attribute `number` is set to the step's number."""
    x: Any
    """The trunk's input; or a function of the trunk (or `run`) and the network, giving outputs."""
    loss: Callable[[Any, Any, str], Tensor] = opposed
    """Computes a loss from the network, an output of the trunk, and the task."""
    tasks: Sequence[str] = (*AB,)
    trunk: Callable[[Any], nn.Module] = lambda network: network
    begins: Callable[[Any], Iterable[str] | None] = lambda network: None
    """Called with the network before a step; returns the tasks that take part."""
    hides: bool = False
    """Whether the network hides parameters from the graph, so that coverages may differ."""

    def trained(
        self, way: str, steps: int = 3, **options: Any
    ) -> tuple[cs.MultiTaskOptimizer, list[tuple[list[object], list[Any]]]]:
        """Trains a copy; returns its optimizer, and each step's exact and floating-point results.

        With the way "mixed", `step` makes step 2 and `step_together` all others.
        """
        network, options = copy.deepcopy((self.network, options))
        weights = options.get("weighting", cs.EqualWeights()).parameters()
        sgd = torch.optim.SGD([*network.parameters(), *weights], lr=0.02, momentum=0.9)
        trunk = self.trunk(network)
        opt = cs.MultiTaskOptimizer(trunk, sgd, self.tasks, **options)
        history = []

        def outputs(run: Callable[..., Any]) -> Any:
            return self.x(run, network) if callable(self.x) else run(self.x)

        def forward(run: RunTrunk) -> dict[str, Tensor]:
            return {task: self.loss(network, z, task) for task, z in outputs(run).items()}

        for network.number in range(steps):
            opt.start_epoch(network.number // 2)
            tasks = self.begins(network)
            if way == "step" or (way == "mixed" and network.number == 2):
                losses = opt.step(lambda task: self.loss(network, outputs(trunk), task), tasks)
            else:
                losses = opt.step_together(forward, tasks)
            report, state = opt.report(), opt.method.state_dict()
            targets = {key: x for key, x in state.items() if isinstance(x, Tensor)}
            others = {key: x for key, x in state.items() if key not in targets}
            facts = [[*losses], report.rows, report.layers, others]
            facts += [] if self.hides else [opt.coverage().own, str(opt.coverage())]
            names = "products", "channels", "conflicts", "gramian", "task_weights", "removed"
            results = losses, [getattr(report, name) for name in (*names, "update_norm")]
            grads = [p.grad for p in network.parameters()]
            results = *results, grads, network.state_dict(), targets, [*weights]
            history.append((facts, copy.deepcopy(results)))
        for module in network.modules():
            assert {*map(type, module._parameters.values())} <= {nn.Parameter, type(None)}
        return opt, history


def assert_alike(
    case: Case,
    steps: int = 3,
    *,
    close: dict[str, float] = CLOSE,
    way: str = "together",
    **options: Any,
) -> cs.MultiTaskOptimizer:
    """Trains with `step`, then with `step_together`; returns the second's optimizer."""
    (_, expected), (opt, history) = (case.trained(w, steps, **options) for w in ("step", way))
    for (facts, results), (own_facts, own) in zip(expected, history, strict=True):
        assert own_facts == facts
        torch.testing.assert_close(own, results, **close)
    return opt


def squares(x: Tensor) -> Callable[[RunTrunk], dict[str, Tensor]]:
    """One loss per task; the losses differ only by the tasks' normalizations."""
    return lambda run: {task: z.square().mean() for task, z in run(x).items()}


def converted(trunk: nn.Module, tasks: Sequence[str] = AB) -> nn.Module:
    torch.manual_seed(1)
    return with_task_norms(trunk.double(), [*tasks])


def small() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 5, 3)
    norms = nn.BatchNorm2d(6), nn.BatchNorm2d(5)
    return converted(nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1]))


def vectors() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()


def pictures() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3)).double()


def scenes(begins: Callable[[Any], Iterable[str] | None] = lambda network: None) -> Case:
    """The network and the batches of `Setup`."""
    setup = Setup()

    def loss(network: Any, z: Tensor, task: str) -> Tensor:
        target = setup.batches[network.number % 8][1][TASKS.index(task)]
        result: Tensor = (network.heads[task](z) - target).square().mean()
        return result

    return Case(
        Composed(lambda network, x: network.trunk(x), trunk=setup.trunk, heads=setup.heads),
        lambda run, network: run(setup.batches[network.number % 8][0]),
        loss,
        TASKS,
        lambda network: network.trunk,
        begins,
    )


def checkpointed(reentrant: bool, *parts: nn.Module) -> nn.Module:
    """A module that recomputes its parts in the backward pass."""

    def run(trunk: Any, x: Tensor) -> Tensor:
        for part in trunk.parts:
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    return Composed(run, parts=nn.ModuleList(parts))


def normed(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs))


def branches(tasks: Sequence[str] = AB) -> nn.Module:
    """A trunk with two outputs; a task uses one of them, or both."""

    def run(trunk: Any, x: Tensor) -> list[Tensor]:
        x = trunk.stem(x)
        return [trunk.one(x), trunk.two(x)]

    layers = {"stem": normed(3, 4), "one": normed(4, 5), "two": normed(4, 5)}
    return converted(Composed(run, **layers), tasks)
