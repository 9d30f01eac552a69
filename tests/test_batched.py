"""`backward(losses, batched=True)` makes the same update as one pass per task."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from networks import GRAMIAN_METHODS, Composed, refused, sgd_of, with_gradient
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop

ABC = ["a", "b", "c"]


class Branched(nn.Module):
    """A trunk with a layer for one task, a layer for two, and a layer that `uses_late` turns on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.alone, self.both, self.late = (nn.Linear(8, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.uses_late = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.stem(x)
        both = self.norm(self.both(h))
        c = h[:, :6] + self.late(h) if self.uses_late else h[:, :6]
        return {"a": both + self.alone(h), "b": both, "c": c}


class Training:
    """A loop whose backward passes are batched or not."""

    def __init__(self, batched: bool, *arguments: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.batched = batched
        self.trunk = Branched().double()
        self.heads = nn.ModuleDict({task: nn.Linear(6, 2) for task in ABC}).double()
        self.sgd = sgd_of(self.trunk, self.heads, lr=0.01)
        if "weighting" in options:
            self.sgd.add_param_group({"params": options["weighting"].parameters()})
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.sgd, ABC, *arguments, **options)

    def losses(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        return {
            task: (self.heads[task](z) - seed - n).square().mean()
            for n, (task, z) in enumerate(self.trunk(x).items())
        }

    def backward(self, losses: dict[str, Tensor], **options: Any) -> None:
        due = {task: loss for task, loss in losses.items() if task in self.opt.due_tasks}
        self.opt.backward(due, batched=self.batched, **options)

    def step(self, seed: int) -> None:
        self.backward(self.losses(seed))
        self.sgd.step()

    def grads(self) -> list[Tensor | None]:
        return [p.grad for p in (*self.trunk.parameters(), *self.heads.parameters())]


def assert_alike(first: Training, second: Training) -> None:
    """Compares gradients, including which of them are None."""
    for one, other in zip(first.grads(), second.grads(), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields a list to which every batched pass appends its number of losses."""
    numbers: list[int] = []
    grad = torch.autograd.grad

    def counting(outputs: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("is_grads_batched"):
            numbers.append(len(outputs))
        return grad(outputs, *arguments, **options)

    with patch("torch.autograd.grad", counting):
        yield numbers


METHODS = [
    *GRAMIAN_METHODS,
    cs.GradDrop(),
    cs.SAGO("b"),
    cs.PCGrad(groups="layer"),
    cs.UPGrad(update_every=3),
    cs.Protect("a", refresh_every=3),
    cs.Protect("b", rank=2, refresh_every=2),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_passes_one_by_one_train_the_same(method: cs.Method) -> None:
    """Own, partly shared and unused parameters; absent tasks; micro-batches; frozen layers."""
    pair = [Training(batched, copy.deepcopy(method)) for batched in (False, True)]
    with counted() as numbers:
        for seed in range(8):
            for run in pair:
                losses = run.losses(seed)
                if seed == 3 and method.keeps is None:
                    losses.pop("c")
                if seed == 4:
                    run.backward(run.losses(20), update=False)
                run.trunk.both.requires_grad_(seed != 5)
                losses = run.losses(seed) if seed == 5 else losses
                run.backward(losses)
            assert_alike(*pair)
            for run in pair:
                run.sgd.step()
    assert len(numbers) >= 2


def _distances(x: Tensor) -> Tensor:
    return torch.cdist(x, x + 1)


def _rolled(x: Tensor) -> Tensor:
    return x * x.mean().roll(1)


@pytest.mark.parametrize("operation", [_distances, _rolled])
def test_operations_that_torch_vmap_gets_wrong(operation: Callable[[Tensor], Tensor]) -> None:
    grads = []
    for batched in (False, True):
        torch.manual_seed(0)
        trunk = nn.Linear(3, 4).double()
        opt = cs.MultiTaskOptimizer(trunk, torch.optim.SGD(trunk.parameters()), ABC, cs.UPGrad())
        x = torch.randn(5, 3, dtype=torch.float64)
        with counted() as numbers:
            for _ in range(2):
                trunk.zero_grad()
                z = operation(trunk(x))
                losses = {task: (z * (n + z)).sum() for n, task in enumerate(ABC)}
                opt.backward(losses, batched=batched)
        assert len(numbers) == batched
        grads.append([p.grad for p in trunk.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


def test_a_weighting_with_parameters() -> None:
    """The weighting's parameters get their gradients in `.grad`, like a head's."""
    pair, sigmas = [], []
    for batched in (False, True):
        weighting = cs.UncertaintyWeights(dict.fromkeys(ABC, "regression"))
        pair.append(Training(batched, cs.UPGrad(), weighting=weighting))
        sigmas.append(weighting.log_sigma)
    for seed in range(4):
        for run in pair:
            run.step(seed)
        assert_alike(*pair)
        for one, other in zip(*(of_run.values() for of_run in sigmas), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


def test_a_scaler() -> None:
    pair = [
        Training(batched, cs.PCGrad(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
        for batched in (False, True)
    ]
    for seed in range(3):
        for run in pair:
            run.backward(run.losses(seed))
        assert_alike(*pair)
        for run in pair:
            run.opt.scaler.step(run.sgd)
            run.opt.scaler.update()


def test_a_task_reaches_another_layer() -> None:
    """The graph of a step may differ from the one that was checked."""
    pair = [Training(batched, cs.UPGrad()) for batched in (False, True)]
    with counted() as numbers:
        for seed in range(6):
            for run in pair:
                run.trunk.uses_late = seed in (2, 3)
                run.backward(run.losses(seed))
            assert_alike(*pair)
            for run in pair:
                run.sgd.step()
    assert len(numbers) >= 4


def test_gradients_have_memory_of_their_own() -> None:
    run = Training(True, cs.PCGrad())
    for seed in range(3):
        run.step(seed)
    grads = [grad for grad in run.grads() if grad is not None]
    assert all(g.untyped_storage().nbytes() == g.numel() * g.element_size() for g in grads)


def _dropped(self: Composed, x: Tensor) -> Tensor:
    return functional.dropout(self.inner(x), 0.5)


RUNS: dict[str, Callable[..., Tensor]] = {
    "function": lambda self, x: with_gradient(torch.clone, lambda grad: 1.0 * grad)(self.inner(x)),
    "checkpoint": lambda self, x: checkpoint(_dropped, self, x, use_reentrant=False),
    "reentrant": lambda self, x: checkpoint(_dropped, self, x, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore:reentrant checkpointing prevents")
@pytest.mark.parametrize("how", ["function", "checkpoint", "reentrant", "hook", "hook after"])
def test_what_cannot_be_batched(how: str) -> None:
    """Passes are made one by one, with a warning unless there is a hook."""
    pair = [Training(batched, cs.PCGrad()) for batched in (False, True)]
    seen: list[int] = []
    for run in pair:
        if how == "hook after":
            run.trunk.both.weight.register_post_accumulate_grad_hook(lambda _: seen.append(1))
        elif how == "hook":
            run.trunk.both.weight.register_hook(lambda _: seen.append(1))
        else:
            run.trunk.both = Composed(RUNS[how], inner=run.trunk.both)
    for seed in range(3):
        for run in pair:
            torch.manual_seed(seed)
            losses = run.losses(seed)
            before = len(seen)
            if run.batched and "hook" not in how and seed == 1:  # Batching is not tried again.
                with pytest.warns(UserWarning, match="batched=True has no effect, because a"):
                    run.backward(losses)
            else:
                run.backward(losses)
            if "hook" in how and seed:  # The first step makes further passes as a check.
                assert len(seen) - before == 2
        assert_alike(*pair)
        for run in pair:
            run.sgd.step()


@pytest.mark.filterwarnings("ignore:reentrant checkpointing prevents")
def test_a_graph_that_begins_to_hide_parameters() -> None:
    """Gradients that a batched pass misses come from separate passes."""

    def changing(self: Composed, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # A leaf, at which the graph seems to end.
        return checkpoint(self.inner, x, use_reentrant=True) if self.number else self.inner(x)

    pair = [Training(batched, cs.UPGrad()) for batched in (False, True)]
    for run in pair:
        run.trunk.stem[0] = Composed(changing, inner=run.trunk.stem[0])
    for seed in range(4):
        for run in pair:
            run.trunk.stem[0].number = int(seed >= 2)
            run.backward(run.losses(seed))
        assert_alike(*pair)
        for run in pair:
            run.sgd.step()


def test_refused() -> None:
    run = Training(True, cs.PCGrad())
    run.step(0)
    with refused(run.trunk.state_dict, ValueError, "batched must be False with features"):
        run.backward(run.losses(0), features=[torch.ones(1)])
    run = Training(True, cs.PCGrad(), backward=lambda loss, **options: loss.backward(**options))
    with refused(run.trunk.state_dict, ValueError, "batched must be False with backward="):
        run.backward(run.losses(0))
