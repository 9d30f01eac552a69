"""Small networks and data for the tests of the training loop."""

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layers import Kind
from plain import projected_rows, strength
from torch import Tensor, nn

import cs_kernels as cs

TASKS = ["depth", "normals", "edges"]
AB = ["a", "b"]

BOTH_PHASES = pytest.mark.parametrize("schedule", [cs.Joint(), cs.Sequential()], ids=repr)
EVERY_METHOD = pytest.mark.parametrize(
    "method", [cs.Sum(), cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr
)
GRAMIAN_METHODS = [
    method()
    for method in cs.GramianMethod.__subclasses__()
    if method.__name__ in cs.__all__ and method not in (cs.Clipped, cs.Protect)
]


class Block(nn.Module):
    """A residual block with one normalization in a Sequential, and one that `forward` calls."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.second = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        result: Tensor = torch.relu(self.norm(self.second(y)) + x)
        return result


class Trunk(nn.Module):
    """A residual encoder and a transposed convolution; one layer has no normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(8)
        self.block = Block(8)
        self.bare = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.up_norm = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = self.bare(self.block(x))
        result: Tensor = torch.relu(self.up_norm(self.up(torch.relu(x))))
        return result


PRIORITIZED = {
    "stem.weight": "stem_norm",
    "block.first.0.weight": "block.first.1",
    "block.second.weight": "block.norm",
    "up.weight": "up_norm",
}


class Composed(nn.Module):
    """A module of submodules, and a function that computes its output with them."""

    number = 0
    """The number of the step, for a network that changes from step to step."""

    def __init__(self, run: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.run(self, *inputs, **options)


def with_gradient(
    forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor | None]
) -> Callable[[Tensor], Tensor]:
    """An autograd function with these two methods; `forward` may hide parameters from autograd."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor | None:
            return backward(grad)

    return Function.apply


def with_task_norms(trunk: nn.Module, tasks: list[str] = AB) -> nn.Module:
    """Converts the batch normalizations, with scales that differ between tasks."""
    cs.nn.convert_task_batchnorm(trunk, tasks)
    for norm in cs.nn.task_norms(trunk):
        for child in norm.children():
            nn.init.uniform_(child.weight, 0.5, 1.5)
    return trunk


class Setup:
    """A converted trunk, heads, data, and a torch optimizer, from a seed."""

    def __init__(
        self,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        tasks: list[str] = TASKS,
        **options: float,
    ) -> None:
        torch.manual_seed(seed)
        self.tasks = tasks
        self.trunk = with_task_norms(Trunk().to(dtype), tasks)
        self.heads = nn.ModuleDict({task: nn.Conv2d(6, 1, 1) for task in tasks}).to(dtype)
        shapes = (4, 3, 6, 6), (len(tasks), 4, 1, 12, 12)
        self.batches = [tuple(torch.randn(s, dtype=dtype) for s in shapes) for _ in range(8)]
        self.optimizer = optimizer(self.parameters(), **(options or {"lr": 1e-2}))

    def parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.heads.parameters()]

    def start(
        self, method: cs.Method | None = None, schedule: cs.Schedule | None = None, **options: Any
    ) -> cs.MultiTaskOptimizer:
        return cs.MultiTaskOptimizer(
            self.trunk, self.optimizer, self.tasks, method, schedule, **options
        )

    def closure(self, batch: int) -> Callable[[str], Tensor]:
        x, targets = self.batches[batch]

        def loss(task: str) -> Tensor:
            y = self.heads[task](self.trunk(x))
            return (y - targets[self.tasks.index(task)]).square().mean()

        return loss

    def state(self, grads: bool = True) -> list[Tensor]:
        """Copies of everything that a step may change, with or without the gradients."""
        tensors = [*self.trunk.state_dict().values(), *self.heads.state_dict().values()]
        for values in self.optimizer.state_dict()["state"].values():
            tensors += [v for v in values.values() if isinstance(v, Tensor)]
        if grads:
            tensors += [p.grad for p in self.parameters() if p.grad is not None]
        return [t.clone() for t in tensors]


def started(*arguments: Any, **options: Any) -> tuple[Setup, cs.MultiTaskOptimizer]:
    setup = Setup()
    return setup, setup.start(*arguments, **options)


def stem_priority(setup: Setup) -> Tensor:
    """The top-priority tasks of the stem's channels, from the current scales and statistics."""
    norms = [setup.trunk.stem_norm.of(task) for task in setup.tasks]
    strengths = cs.functional.connection_strength(
        setup.trunk.stem.weight,
        torch.stack([norm.weight for norm in norms]),
        torch.stack([norm.running_var for norm in norms]),
        eps=[norm.eps for norm in norms],
    )
    return cs.functional.task_priority(strengths)


def projected_update(weight: Tensor, norm: nn.Module, grads: list[Tensor], kind: Kind) -> Tensor:
    """The update of a prioritized layer by the paper's formulas, without the package."""
    children = [*norm.children()]
    strengths = strength(
        weight.detach(),
        torch.stack([child.weight.detach() for child in children]),
        torch.stack([child.running_var for child in children]),
        [child.eps for child in children],
        kind,
    )
    priority = (strengths / strengths.sum(1, keepdim=True)).argmax(0)
    update = torch.empty_like(weight)
    rows = projected_rows(torch.stack(grads), priority, kind)
    for row, channel in zip(rows, update.unbind(kind.out_channel_dim), strict=True):
        channel.copy_(row.view(channel.shape))
    return update


def assert_equal(first: object, second: object) -> None:
    """Asserts that tensors, or lists and dictionaries of them, are equal without a tolerance."""
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def same_bits(first: object, second: object) -> bool:
    """Whether two states have the same entries; NaN equals NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        nans = first.isnan(), second.isnan()
        return torch.equal(*nans) and torch.equal(first[~nans[0]], second[~nans[1]])
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_bits(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_bits, first, second))
    return first == second


def saved(setup: Setup, *others: Any) -> list[dict[str, Any]]:
    parts = setup.trunk, setup.heads, setup.optimizer, *others
    return copy.deepcopy([part.state_dict() for part in parts])


def restore(states: list[dict[str, Any]], setup: Setup, *others: Any) -> None:
    parts = setup.trunk, setup.heads, setup.optimizer, *others
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict(state)


@contextmanager
def refused(
    state: Callable[[], object],
    error: type[Exception] | tuple[type[Exception], ...],
    match: str,
) -> Iterator[None]:
    """Asserts that the block raises and leaves the state unchanged."""
    before = copy.deepcopy(state())
    with pytest.raises(error, match=match):
        yield
    assert_equal(before, state())


class Whole(nn.Module):
    """A trunk and heads in one module, which many tests pass as a trunk that includes the heads."""

    def __init__(self, tasks: list[str] = AB) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in tasks})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(x))
        return result


def problem(
    seed: int = 0, tasks: list[str] = AB
) -> tuple[Whole, Callable[[str], Tensor], Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Whole(tasks).double()
    x = torch.randn(7, 5).double()
    targets = {task: (1 + 3 * n) * torch.randn(7, 1).double() for n, task in enumerate(tasks)}
    return model, lambda task: (model(x, task) - targets[task]).square().mean(), x, targets


def sgd_of(*modules: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    parameters = [p for module in modules for p in module.parameters()]
    # foreach, the default on a GPU, refuses a mix of sharded and whole tensors.
    return torch.optim.SGD(parameters, lr=lr, foreach=False)


def optimizer_of(
    trunk: nn.Module, *arguments: Any, tasks: list[str] = AB, lr: float = 0.1, **options: Any
) -> cs.MultiTaskOptimizer:
    """An optimizer that holds only the trunk's parameters."""
    return cs.MultiTaskOptimizer(trunk, sgd_of(trunk, lr=lr), tasks, *arguments, **options)


def started_problem(
    *arguments: Any, tasks: list[str] = AB, **options: Any
) -> tuple[Whole, Callable[[str], Tensor], cs.MultiTaskOptimizer]:
    model, loss, *_ = problem(tasks=tasks)
    return model, loss, optimizer_of(model, *arguments, tasks=tasks, **options)


def gradient_rows(parameters: list[nn.Parameter], losses: Iterable[Tensor]) -> Tensor:
    """The tasks' gradients, [K, N], from torch.autograd.grad."""
    grads = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
    return torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in grads])


def flat_grad(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def step_by_hand(
    method: cs.GramianMethod, shared: list[nn.Parameter], losses: dict[str, Tensor]
) -> list[Tensor]:
    """A method's update of the shared parameters, from gradients of torch.autograd.grad."""
    rows = gradient_rows(shared, losses.values())
    step = cs.Step(0, tuple(losses), *[{t: loss.detach() for t, loss in losses.items()}] * 2)
    update = method.weights(rows @ rows.T, step) @ rows
    return list(update.split([p.numel() for p in shared]))


def assert_same_gradients(first: nn.Module, second: nn.Module, rtol: float = 0) -> None:
    grads = ([p.grad for p in module.parameters()] for module in (first, second))
    torch.testing.assert_close(*grads, rtol=rtol, atol=1e-3 * rtol)


class Injects(torch.autograd.Function):
    """Returns `x`; every backward pass also gives `auxiliary`, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


@contextmanager
def without_collections() -> Iterator[None]:
    """Disables garbage collections, which could run the package's finalizers at any line."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Returns(torch.autograd.Function):
    """The identity; its backward pass changes how the gradient is stored."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def misaligned(grad: Tensor) -> Tensor:
    """A copy whose address is no multiple of its element size."""
    memory = bytearray(1 + grad.numel() * grad.itemsize)
    return torch.frombuffer(memory, dtype=grad.dtype, offset=1).view(grad.shape).copy_(grad)


def inferred(grad: Tensor) -> Tensor:
    """A copy that is an inference tensor."""
    with torch.inference_mode():
        return grad * 1


class Marked(Tensor):
    """A tensor subclass."""
