"""GradientBalancer: comparisons with plain loops in float64, and what it accepts."""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from networks import (
    GRAMIAN_METHODS,
    Injects,
    Marked,
    Returns,
    assert_equal,
    inferred,
    misaligned,
)
from plain_training import in_float64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs
from cs_kernels.balancing.sketches import Sketches

pytestmark = pytest.mark.loop

TASKS = ("a", "b", "c")
METHODS = [
    *(*GRAMIAN_METHODS, cs.Protect("b"), cs.Sum()),
    *(cs.Clipped(cs.UPGrad(), 1.0), cs.PCGrad(groups="layer")),
]


class Network(nn.Module):
    """A trunk of 1,510 parameters, whose sketches are exact, and a head per task."""

    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh()]
        self.trunk = nn.Sequential(*layers) if trunk is None else trunk
        self.heads = nn.ModuleDict({task: nn.Linear(30, 1) for task in TASKS})
        self.double()

    def forward(self, x: Tensor, task: str) -> Tensor:
        """The loss of a task; later tasks have larger losses."""
        scale = TASKS.index(task)
        return (self.heads[task](self.trunk(x)) - scale).square().mean() * 10**scale


class Training:
    """A network with a balancer and Adam, and batches by step and task."""

    def __init__(self, method: cs.Method, trunk: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.network = Network(trunk)
        self.adam = torch.optim.Adam(self.network.parameters(), 1e-2)
        shared = self.network.trunk.named_parameters()
        self.balancer = cs.GradientBalancer(shared, TASKS, method, self.adam, **options)

    def batch(self, step: int, task: str, rows: int = 8) -> Tensor:
        seed = 10 * step + TASKS.index(task)
        noise = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 6, generator=noise, dtype=torch.float64)

    def step(self, number: int, tasks: tuple[str, ...] = TASKS) -> None:
        self.adam.zero_grad()
        for task in tasks:
            with self.balancer.task(task):
                self.network(self.batch(number, task), task).backward()
        self.adam.step()

    def grads(self) -> list[Tensor]:
        return [torch.zeros(()) if p.grad is None else p.grad for p in self.network.parameters()]


def _plain_grads(training: Training, step: int, tasks: tuple[str, ...] = TASKS) -> list[Tensor]:
    """The gradients of a plain loop with the balancer's weights."""
    network, balancer = training.network, training.balancer
    sums = [torch.zeros(()) for _ in network.parameters()]
    for task in tasks:
        loss = network(training.batch(step, task), task)
        grads = torch.autograd.grad(loss, [*network.parameters()], allow_unused=True)
        weights = balancer.weights[task]
        for n, ((name, _), grad) in enumerate(zip(network.named_parameters(), grads, strict=True)):
            if grad is not None:
                weight = torch.ones(())
                if name.startswith("trunk"):
                    module = name.removeprefix("trunk.").rpartition(".")[0]
                    layers = balancer.report().layers
                    weight = weights[layers.index(module)] if layers else weights
                sums[n] = sums[n] + weight * grad
    return sums


def _assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


def test_gradients_add_up_in_a_grad_of_other_strides() -> None:
    training = Training(cs.UPGrad())
    training.step(0)
    training.adam.zero_grad()
    training.network.trunk[0].weight.grad = torch.zeros(6, 40).double().t()
    expected = _plain_grads(training, 1)
    for task in TASKS:
        with training.balancer.task(task):
            training.network(training.batch(1, task), task).backward()
    _assert_close(training.grads(), expected)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_gradients_are_weighted_as_they_arrive(method: cs.Method) -> None:
    """The previous step's weights scale the trunk's gradients only; one step lacks a task."""
    if isinstance(method, cs.DBMTL):
        pytest.skip("test_losses_for_the_method covers it")
    training = Training(copy.deepcopy(method))
    for step in range(5):
        tasks = TASKS if step != 2 else TASKS[1:]
        expected = _plain_grads(training, step, tasks)
        training.step(step, tasks)
        _assert_close(training.grads(), expected)
    if not isinstance(method, cs.Sum):
        weights = torch.stack([*training.balancer.weights.values()])
        assert weights.isfinite().all()
        assert not weights.allclose(torch.ones_like(weights))


def test_weights_equal_the_method() -> None:
    """Products are exact to rounding, as the trunk has fewer parameters than a sketch has bins."""
    training = Training(cs.NashMTL())
    network = training.network
    rows = []
    for task in TASKS:
        loss = network(training.batch(0, task), task)
        grads = torch.autograd.grad(loss, [*network.trunk.parameters()])
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    gramian = torch.stack(rows) @ torch.stack(rows).T
    training.step(0)
    torch.testing.assert_close(training.balancer.gramian, gramian, rtol=1e-6, atol=0)
    expected = cs.NashMTL().weights(gramian)
    found = torch.stack([*training.balancer.weights.values()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_the_default_dtype_changes_nothing() -> None:
    expected = Training(cs.DBMTL())
    with in_float64():
        training = Training(cs.DBMTL())
    training.network.load_state_dict(expected.network.state_dict())
    for t, context in ((expected, contextlib.nullcontext()), (training, in_float64())):
        with context:
            for task in TASKS:
                loss = t.network(t.batch(0, task), task)
                with t.balancer.task(task, loss):
                    loss.backward()
            t.adam.step()
    assert torch.equal(training.balancer.gramian, expected.balancer.gramian)
    assert training.balancer.weights == expected.balancer.weights


def test_sum_changes_no_bit() -> None:
    training, plain = Training(cs.Sum()), Training(cs.Sum())
    plain.balancer.close()
    for step in range(3):
        training.step(step)
        plain.adam.zero_grad()
        for task in TASKS:
            plain.network(plain.batch(step, task), task).backward()
        plain.adam.step()
    for p, q in zip(training.network.parameters(), plain.network.parameters(), strict=True):
        assert torch.equal(p, q)
    report = training.balancer.report()
    assert (report.steps == 3).all()
    assert {"cosine/a,b", "conflict_share/b,c", "gradient_norm/a"} <= report.scalars().keys()


def test_micro_batches_add_up() -> None:
    whole, parts = Training(cs.PCGrad()), Training(cs.PCGrad())
    for step in range(3):
        whole.step(step)
        parts.adam.zero_grad()
        for half in (slice(4), slice(4, 8)):
            for task in TASKS:
                with parts.balancer.task(task):
                    (parts.network(parts.batch(step, task)[half], task) / 2).backward()
        parts.adam.step()
    found, expected = (t.balancer.report() for t in (parts, whole))
    torch.testing.assert_close(found.gramian, expected.gramian, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=0)


def test_one_pass_between_the_steps_that_solve() -> None:
    """`backward` equals one pass per task, with unweighted heads."""
    one, several = (Training(cs.UPGrad(), every=3) for _ in "12")
    passes = 0

    def count(_: object) -> None:
        nonlocal passes
        passes += 1

    for step in range(5):
        x = one.batch(step, "a")
        one.adam.zero_grad()
        z = one.network.trunk[0](x)
        z.register_hook(count)
        z = one.network.trunk[1:](z)
        losses = {t: (one.network.heads[t](z) - n).square().mean() for n, t in enumerate(TASKS)}
        assert one.balancer.backward(losses).keys() == losses.keys()
        several.adam.zero_grad()
        for n, task in enumerate(TASKS):
            with several.balancer.task(task):
                z = several.network.trunk(x)
                (several.network.heads[task](z) - n).square().mean().backward()
        _assert_close(one.grads(), several.grads())
        one.adam.step()
        several.adam.step()
        assert passes == [6, 7, 10, 11, 14][step]  # The first step's check makes three more.


class _Inside(torch.autograd.Function):
    """Runs a layer and accumulates its parameters' gradients in a separate, inner graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.x.grad = None
        ctx.y.backward(grad, retain_graph=True)
        return ctx.x.grad, None


@pytest.mark.parametrize("ends", [True, False], ids=["optimizer", "update"])
def test_a_layer_outside_the_trunk_that_a_function_hides(ends: bool) -> None:
    """The hidden layer's gradients are not weighted in any step; only the optimizer lists them."""
    trunk, hidden = nn.Linear(3, 4), nn.Linear(4, 4)
    sgd = torch.optim.SGD([*trunk.parameters(), *hidden.parameters()], 0.1)
    given = trunk.parameters(), TASKS[:2], cs.UPGrad(), sgd if ends else None
    balancer = cs.GradientBalancer(*given, every=9)

    def losses(run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        y = run(trunk(torch.linspace(-1, 1, 15).view(5, 3)))
        return {task: (y - 3 * n).square().mean() for n, task in enumerate(TASKS[:2])}

    for _ in range(3):
        expected = torch.autograd.grad(sum(losses(hidden).values()), [*hidden.parameters()])
        sgd.zero_grad()
        balancer.backward(losses(lambda z: _Inside.apply(z, hidden)))
        torch.testing.assert_close([p.grad for p in hidden.parameters()], [*expected])
        sgd.step()
        if not ends:
            balancer.update()
    assert balancer.weights["a"] != 1


class WithAuxiliaryLoss(nn.Module):
    """A layer that injects the gradient of an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 30)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return Injects.apply(output, output.square().mean())


def test_passes_through_one_graph_must_be_repeatable() -> None:
    """An injected gradient would count three times; the message says what to do."""
    training = Training(cs.UPGrad(), WithAuxiliaryLoss())
    network = training.network

    def losses() -> dict[str, Tensor]:
        z = network.trunk(training.batch(0, "a"))
        return {t: network.heads[t](z).square().mean() for t in TASKS}

    message = r"a pass of 'a' .* gave parameter layer.weight .*: use a forward pass and task\("
    with pytest.raises(RuntimeError, match=message):
        training.balancer.backward(losses())
    assert all(p.grad is None for p in network.parameters())
    training.step(0)
    assert len(training.balancer.backward({"a": losses()["a"]})) == 1
    unchecked = Training(cs.UPGrad(), WithAuxiliaryLoss(), check_passes=False)
    z = unchecked.network.trunk(unchecked.batch(0, "a"))
    unchecked.balancer.backward({t: unchecked.network.heads[t](z).mean() for t in TASKS})


def test_parameters_frozen_before_their_pass_are_left_out() -> None:
    """Gradients of such parameters do not arrive in `.grad`, so the method does not see them."""
    training = Training(cs.UPGrad())
    first, _, second, _ = training.network.trunk
    for n, task in enumerate(TASKS):
        with training.balancer.task(task):
            loss = training.network(training.batch(0, task), task)
            first.requires_grad_(False)
            loss.backward()
            first.requires_grad_(True)
        if n == 0:
            expected = sum(p.grad.square().sum() for p in second.parameters())
    assert all(p.grad is None for p in first.parameters())
    training.adam.step()
    torch.testing.assert_close(training.balancer.gramian[0, 0], expected, rtol=1e-6, atol=0)


class _Kept(torch.autograd.Function):
    """The identity; its backward pass returns all gradients in the same buffer."""

    buffer = torch.zeros(40, 6, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Kept.buffer.copy_(grad)


def test_gradients_whose_memory_the_next_pass_overwrites() -> None:
    training = Training(cs.UPGrad())
    network, rows = training.network, []
    for task in TASKS:
        xs = training.batch(0, task), training.batch(1, task)
        losses = [network(x, task) for x in xs]
        shared = [*network.trunk.parameters()]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(sum(losses), shared)]))
        with training.balancer.task(task):
            for x in xs:
                first = network.trunk[0]
                h = nn.functional.linear(x, _Kept.apply(first.weight), first.bias)
                z = network.trunk[1:](h)
                scale = TASKS.index(task)
                ((network.heads[task](z) - scale).square().mean() * 10**scale).backward()
    training.adam.step()
    expected = torch.stack(rows) @ torch.stack(rows).T
    torch.testing.assert_close(training.balancer.gramian, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_inside_a_block(fails: bool) -> None:
    """After each pass, `.grad` has its gradients; after a failed pass, the ones that arrived."""
    training = Training(cs.UPGrad())
    training.step(0)
    training.adam.zero_grad()
    network, weights = training.network, training.balancer.weights
    arrives = [*network.trunk.parameters()][2 if fails else 0 :]
    expected = [torch.zeros_like(p) for p in arrives]
    for task in 2 * TASKS:
        h = network.trunk[:2](training.batch(1, task))
        loss = network.heads[task](network.trunk[2:](h)).square().sum()
        grads = torch.autograd.grad(loss, arrives, retain_graph=True)
        expected = [e + weights[task] * g for e, g in zip(expected, grads, strict=True)]
        with training.balancer.task(task):
            if fails:
                h.register_hook(lambda grad: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            else:
                loss.backward()
            _assert_close([p.grad for p in arrives], expected)
        _assert_close([p.grad for p in arrives], expected)
    assert not fails or network.trunk[0].weight.grad is None


class _Scratch(torch.autograd.Function):
    """The identity; all its gradients are views of one buffer."""

    buffer = torch.empty(4, dtype=torch.float64)

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Scratch.buffer.copy_(grad.flatten())
        return _Scratch.buffer.view(2, 2)


class _DoublesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mul_(2)


def _with_scratch(*parameters: Tensor) -> Tensor:
    terms = [n * _Scratch.apply(p).square().sum() for n, p in enumerate(parameters, 1)]
    return torch.stack(terms).sum()


def _changed_in_place(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    y = _DoublesInPlace.apply(p * 1.0) + q.view(2, 2) + r
    return (y * torch.arange(4.0).view(2, 2)).square().sum()


@pytest.mark.parametrize("method", [cs.Sum(), cs.UPGrad()], ids=repr)
@pytest.mark.parametrize("loss_of", [_with_scratch, _changed_in_place])
def test_gradients_that_change_later_in_the_pass(
    loss_of: Callable[..., Tensor], method: cs.Method
) -> None:
    """`.grad` is not None, so plain torch adds each gradient as it arrives."""
    parameters = [nn.Parameter(torch.randn(2, 2).double()) for _ in range(3)]
    balancer = cs.GradientBalancer(parameters, TASKS, method)
    for _ in range(2):
        rows, weights = [], torch.stack([*balancer.weights.values()])
        for scale, _ in enumerate(TASKS, 1):
            for p in parameters:
                p.grad = torch.zeros_like(p)
            (scale * loss_of(*parameters)).backward()
            rows.append(torch.stack([p.grad for p in parameters]))
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for scale, task in enumerate(TASKS, 1):
            with balancer.task(task):
                (scale * loss_of(*parameters)).backward()
        balancer.update()
        found = torch.stack([p.grad for p in parameters])
        torch.testing.assert_close(found, torch.einsum("t,t...->...", weights, torch.stack(rows)))
        flat = torch.stack(rows).flatten(1)
        torch.testing.assert_close(balancer.gramian, flat @ flat.T, rtol=1e-5, atol=1e-8)


class _Mixed(nn.Module):
    """A trunk whose gradients are dense, channels_last, transposed, complex and expanded."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, dtype=dtype)
        last = nn.Conv2d(8, 8, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.last, self.shift = last, nn.Parameter(torch.zeros(8, 1, 1, dtype=dtype))
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=dtype))
        real = dtype if dtype.itemsize > 2 else torch.float32
        self.phase = nn.Parameter(torch.randn(8, dtype=real.to_complex()))

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(self.conv(x).relu() + self.shift).mean((2, 3))
        z = z @ self.turn.t().contiguous()
        return (z.to(self.phase.real.dtype) * self.phase).abs().float()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_kind_of_gradient(backend: str, dtype: torch.dtype) -> None:
    trunk = _Mixed(dtype)
    parameters = [*trunk.parameters()]
    balancer = cs.GradientBalancer(parameters, TASKS, cs.UPGrad())
    close = {"rtol": 2e-2, "atol": 0.1} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-6}
    for _ in range(3):
        weights = balancer.weights
        expected = [torch.zeros_like(p) for p in parameters]
        trunk.zero_grad()
        rows = []
        for n, task in enumerate(TASKS):
            row = torch.zeros(0)
            for _ in range(2):
                x = torch.randn(4, 3, 6, 6, dtype=dtype)
                losses = [(trunk(x) - n).square().mean() * 4**n for _ in range(2)]
                grads = torch.autograd.grad(losses[0], parameters)
                for total, g in zip(expected, grads, strict=True):
                    total += (g * weights[task]).to(g.dtype)
                real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
                flat = torch.cat([g.double().flatten() for g in real])
                row = row + flat if len(row) else flat
                with balancer.task(task):
                    losses[1].backward()
            rows.append(row)
        torch.testing.assert_close([p.grad for p in parameters], expected, **close)
        balancer.update()
        exact = torch.stack(rows) @ torch.stack(rows).T
        torch.testing.assert_close(balancer.gramian, exact, rtol=1e-4, atol=1e-4)
    assert len({float(w) for w in balancer.weights.values()}) > 1


def _trained() -> tuple[cs.GradientBalancer, nn.Linear]:
    """A balancer after a step that makes the weights differ from 1."""
    trunk = nn.Linear(6, 5)
    balancer = cs.GradientBalancer(trunk.parameters(), TASKS, cs.UPGrad())
    for n, task in enumerate(TASKS):
        with balancer.task(task):
            trunk(torch.randn(4, 6)).square().sum().mul(3**n).backward()
    balancer.update()
    assert 1.0 not in balancer.weights.values()
    trunk.zero_grad()
    return balancer, trunk


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: torch._neg_view(-grad),
        misaligned,
        inferred,
        lambda grad: grad.clone().as_subclass(Marked),
    ],
    ids=["negative", "misaligned", "inference", "subclass"],
)
def test_how_gradients_are_stored(change: Any) -> None:
    weight = nn.Parameter(torch.randn(5, 6))
    balancer = cs.GradientBalancer([weight], TASKS, cs.UPGrad())
    for _ in range(3):
        weight.grad, rows, weights = None, [], balancer.weights
        for n, task in enumerate(TASKS):
            x = torch.randn(4, 6)
            loss = (x @ weight.T - n).square().sum() * 2**n
            rows.append(torch.autograd.grad(loss, weight)[0].flatten())
            with balancer.task(task):
                ((x @ Returns.apply(weight, change).T - n).square().sum() * 2**n).backward()
        expected = torch.stack([*weights.values()]).float() @ torch.stack(rows)
        torch.testing.assert_close(weight.grad.as_subclass(Tensor).flatten(), expected)
        balancer.update()
        exact = (torch.stack(rows) @ torch.stack(rows).T).double()
        torch.testing.assert_close(balancer.gramian, exact, rtol=1e-5, atol=1e-4)


def test_another_device() -> None:
    shapes, cpu = [(3, 4), (1 << 18, 2)], torch.device("cpu")
    sketches = Sketches(2, shapes, [0, 0], 256, cpu, 0, set())
    sketches.open(0)
    for n, shape in enumerate(shapes):
        with pytest.raises(ValueError, match=r"gradients must be on cpu, .* got one on meta"):
            sketches.add(n, torch.zeros(shape, device="meta"))


def test_a_block_that_does_not_open(monkeypatch: Any) -> None:
    training = Training(cs.UPGrad())
    monkeypatch.setenv("CS_KERNELS_BACKEND", "none")
    with pytest.raises(ValueError, match="CS_KERNELS_BACKEND must be one of"):
        training.balancer.task(TASKS[0]).__enter__()
    monkeypatch.delenv("CS_KERNELS_BACKEND")
    with training.balancer.task(TASKS[0]):
        training.network(training.batch(0, TASKS[0]), TASKS[0]).sum().backward()
    training.adam.step()


def test_weights_of_a_state_become_float64() -> None:
    training = Training(cs.UPGrad())
    state = training.balancer.state_dict() | {"weights": torch.rand(1, len(TASKS))}
    training.balancer.load_state_dict(state)
    assert {w.dtype for w in training.balancer.weights.values()} == {torch.float64}


def test_a_layer_without_elements() -> None:
    layers = nn.ModuleDict({"none": nn.Module(), "some": nn.Linear(3, 2)})
    layers["none"].empty = nn.Parameter(torch.zeros(0))
    balancer = cs.GradientBalancer(layers.named_parameters(), ["a"], cs.UPGrad(groups="layer"))
    with balancer.task("a"):
        layers["some"](torch.ones(1, 3)).sum().backward()
    balancer.update()
    assert balancer.report().gramian.isfinite().all()


def test_sparse_gradients_between_the_steps_that_solve() -> None:
    weight = nn.Parameter(torch.randn(5, 3))
    balancer = cs.GradientBalancer([weight], TASKS[:2], cs.NTKMTL(), every=2)
    x, index = torch.randn(4, 3), torch.tensor([1, 3, 3])

    def sparse() -> Tensor:
        return nn.functional.embedding(index, weight, sparse=True).square().sum()

    def dense() -> Tensor:
        return 9 * (x @ weight.T).square().sum()

    both = dense, dense
    for losses in (both, both, (sparse, dense), both, (dense, sparse)):
        weight.grad, weights = None, balancer.weights
        expected = torch.zeros_like(weight)
        for task, loss in zip(balancer.tasks, losses, strict=True):
            grad = torch.autograd.grad(loss(), weight)[0].to_dense()
            expected += weights[task].float() * grad
            with balancer.task(task):
                loss().backward()
        torch.testing.assert_close(weight.grad, expected)
        balancer.update()
    assert 1.0 not in weights.values()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_graphs_of_gradients() -> None:
    balancer, trunk = _trained()
    x = torch.randn(4, 6)
    with balancer.task(TASKS[0]):
        trunk(x).square().sum().backward(create_graph=True)
    (again,) = torch.autograd.grad(trunk.weight.grad.sum(), trunk.weight)
    (plain,) = torch.autograd.grad(trunk(x).square().sum(), trunk.weight, create_graph=True)
    (expected,) = torch.autograd.grad(plain.sum(), trunk.weight)
    torch.testing.assert_close(again, expected * balancer.weights[TASKS[0]].float())


def test_graphs_know_that_a_gradient_has_changed() -> None:
    balancer, trunk = _trained()
    with balancer.task(TASKS[0]):
        trunk(torch.randn(4, 6)).square().sum().backward()
    scale = torch.ones((), requires_grad=True)
    penalty = (scale * trunk.weight.grad).sum()
    with balancer.task(TASKS[1]):
        trunk(torch.randn(4, 6)).square().sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_losses_for_the_method() -> None:
    training = Training(cs.DBMTL())
    for step in range(3):
        tasks = TASKS[step == 1 :]
        expected = _plain_grads(training, step, tasks)
        training.adam.zero_grad()
        for task in tasks:
            loss = training.network(training.batch(step, task), task)
            with training.balancer.task(task, loss):
                loss.backward()
        _assert_close(training.grads(), expected)
        training.adam.step()
    with pytest.raises(ValueError, match=r"DBMTL\(\) needs the losses, but \['.*'\] have none"):
        training.step(3)
    assert training.balancer.report().step == 4


@contextlib.contextmanager
def _weights_stay(training: Training) -> Iterator[None]:
    before = training.balancer.weights
    yield
    assert training.balancer.weights == before


def test_non_finite_gradients_do_not_change_weights() -> None:
    training = Training(cs.GradVac())
    training.step(0)
    state = training.balancer.state_dict()["method"]["state"]["targets"]
    with _weights_stay(training):
        training.adam.zero_grad()
        for task in TASKS:
            with training.balancer.task(task):
                factor = float("inf") if task == "b" else 1.0
                (training.network(training.batch(1, task), task) * factor).backward()
        training.adam.zero_grad()  # The parameters stay finite.
        training.adam.step()
    report = training.balancer.report()
    assert not report.finite
    assert report.finite_tasks.tolist() == [task != "b" for task in TASKS]
    assert [report.scalars()[f"finite/{task}"] for task in TASKS] == [1, 0, 1]
    assert "weights kept: gradients of b were not finite\n" in str(report)
    assert torch.equal(training.balancer.state_dict()["method"]["state"]["targets"], state)
    training.step(2)
    assert training.balancer.report().finite


def test_a_step_that_the_scaler_skips() -> None:
    """A skipped step does not affect later ones; products exclude the scale."""
    scaled, plain = (Training(cs.NashMTL()) for _ in "12")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled.balancer.close()
    shared = scaled.network.trunk.named_parameters()
    scaled.balancer = cs.GradientBalancer(shared, TASKS, cs.NashMTL(), scaled.adam, scaler=scaler)
    for step in range(3):
        plain.step(step)
        for broken in (False, True) if step == 1 else (False,):
            scaled.adam.zero_grad()
            for task in TASKS:
                with scaled.balancer.task(task):
                    loss = scaled.network(scaled.batch(step, task), task)
                    scaler.scale(loss * (float("inf") if broken else 1.0)).backward()
            before = scaled.balancer.report().step
            scaler.step(scaled.adam)
            scaler.update()
            assert scaled.balancer.report().step == before + (not broken)
        if step == 0:
            found, expected = (t.balancer.report() for t in (scaled, plain))
            torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=0)
    # The skipped step's passes were discarded.
    assert scaled.balancer.report().finite
    found, expected = (t.balancer.report() for t in (scaled, plain))
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=0)


def test_absent_tasks_and_zero_gradients() -> None:
    """Such tasks keep their last norm and cosines; pairs never seen together have cosine 0."""
    training = Training(cs.MGDA())
    training.step(0, ("a",))
    assert training.balancer.weights["b"] == 1
    training.step(1, ("b",))
    report = training.balancer.report()
    assert report.together.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert report.gramian[0, 1] == 0
    assert "never together with a" in str(report)
    training.step(2)
    before = training.balancer.report()
    training.adam.zero_grad()
    for task in TASKS:
        with training.balancer.task(task):
            loss = training.network(training.batch(3, task), task)
            (loss * (task != "a")).backward()
    training.adam.step()
    after = training.balancer.report()
    torch.testing.assert_close(after.cosines[0], before.cosines[0])
    assert after.gradient_norms[0] == before.gradient_norms[0]
    assert (after.gradient_norms[1:] != before.gradient_norms[1:]).all()


def _steps_of(method: cs.Method, *steps: dict[str, Tensor | None], **options: Any) -> Any:
    """A balancer after steps in which one parameter gets the given gradients, by task."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    sgd = torch.optim.SGD([p], lr=0.0)
    balancer = cs.GradientBalancer([p], ["a", "b"], method, sgd, **options)
    for step in steps:
        p.grad = None
        for task, grad in step.items():
            if grad is not None:
                with balancer.task(task):
                    (p * grad).sum().backward()
        if "drop" not in step:
            sgd.step()
    return balancer


_A, _B = torch.tensor([1.0, 0, 0]).double(), torch.tensor([-1.0, 1, 0]).double()


@pytest.mark.parametrize("method", GRAMIAN_METHODS, ids=repr)
def test_norms_change_while_a_task_is_absent(method: cs.Method) -> None:
    """The Gramian has a's new norm, but b's norm and their cosine from the step before."""
    if isinstance(method, cs.DBMTL | cs.GradVac | cs.PCGrad):
        pytest.skip("the method reads losses, or its weights depend on the step")
    balancer = _steps_of(copy.deepcopy(method), {"a": 100 * _A, "b": _B}, {"a": _A})
    gramian = torch.tensor([[1.0, -1.0], [-1.0, 2.0]]).double()
    torch.testing.assert_close(balancer.gramian, gramian, rtol=1e-5, atol=0)
    weights = torch.stack([*balancer.weights.values()])
    torch.testing.assert_close(weights, method.weights(gramian), rtol=1e-4, atol=1e-6)


def test_dropped_passes_do_not_count() -> None:
    """After a spike, the loop calls `zero_grad` and takes the next batch."""
    step = {"a": _A, "b": _B}
    dropped = {"a": 1000 * _A, "b": _B, "drop": None}
    found = _steps_of(cs.NTKMTL(), step, dropped, step)
    expected = _steps_of(cs.NTKMTL(), step, step)
    assert torch.equal(found.gramian, expected.gramian)


def test_passes_outside_of_any_task_after_dropped_passes() -> None:
    """The penalty's gradient is in `.grad` when the first block opens."""
    p = nn.Parameter(torch.zeros(3).double())
    balancer = cs.GradientBalancer([p], ["a"], cs.Sum())
    with balancer.task("a"):
        (p * 1000 * _A).sum().backward()
    p.grad = None
    (p * _B).sum().backward()
    with balancer.task("a"):
        (p * _A).sum().backward()
    balancer.update()
    torch.testing.assert_close(balancer.gramian, (_A @ _A).reshape(1, 1))


@pytest.mark.parametrize("dropped", ["p", "q"])
def test_dropped_passes_of_other_parameters(dropped: str) -> None:
    """The dropped pass reaches only p or only q; the next pass reaches both."""
    p, q = (nn.Parameter(torch.zeros(3).double()) for _ in "12")
    balancer = cs.GradientBalancer([p, q], ["a"], cs.Sum())
    alone = p if dropped == "p" else q
    with balancer.task("a"):
        (alone * 1000 * _A).sum().backward()
    p.grad = q.grad = None
    with balancer.task("a"):
        (q * _A + p * _B).sum().backward()
    balancer.update()
    torch.testing.assert_close(balancer.gramian, torch.tensor([[3.0]]).double())


def test_losses_of_steps_that_a_scaler_skips() -> None:
    """The scale is not part of a loss, and a skipped step's loss does not count."""
    weights = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        p = nn.Parameter(torch.ones(3, dtype=torch.float64))
        sgd = torch.optim.SGD([p], lr=0.0)
        balancer = cs.GradientBalancer([p], ["a", "b"], cs.DBMTL(), sgd, scaler=scaler)
        for skipped in (True, False) if scaler else (False,):
            sgd.zero_grad()
            for task, grad in (("a", 2 * _A), ("b", _B + 3)):
                loss = (p * grad).sum()
                loss = loss if scaler is None else scaler.scale(loss)
                with balancer.task(task, loss):
                    loss.backward()
            if scaler is None:
                sgd.step()
                continue
            assert p.grad is not None
            p.grad[0] = torch.inf if skipped else p.grad[0]
            scaler.step(sgd)
            scaler.update()
        weights.append(torch.stack([*balancer.weights.values()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=0)


def test_the_loss_of_a_zero_gradient_does_not_count() -> None:
    p, weights = nn.Parameter(torch.ones(3, dtype=torch.float64)), []
    balancer = cs.GradientBalancer([p], ["a", "b"], cs.DBMTL())
    for factor, constant in ((1, 5), (0, 7)):
        for task, grad in (("a", _A), ("b", factor * _B)):
            loss = (p * grad).sum() + (constant if task == "b" else 90)
            with balancer.task(task, loss):
                loss.backward()
        balancer.update()
        weights.append(balancer.weights)
    assert weights[0] == weights[1]


def test_losses_of_blocks_without_gradients_count() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    head = nn.Parameter(torch.ones(3, dtype=torch.float64))
    found = []
    for order in ((head, p), (p, head)):
        balancer = cs.GradientBalancer([p], ["a"], cs.DBMTL())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for reached in order:
                loss = (reached * 2).sum()
                with balancer.task("a", loss):
                    loss.backward()
        balancer.update()
        found.append(balancer._products.losses.tolist())
        balancer.close()
    assert found == [[12.0]] * 2


@pytest.mark.parametrize("hooked", ["parameter", "node"])
def test_gradients_that_a_hook_moves(hooked: str) -> None:
    """If a hook runs the optimizer or moves a gradient elsewhere, `.grad` is None after a pass."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    moved = torch.zeros(3, dtype=torch.float64)

    def move(*_: object) -> None:
        assert p.grad is not None
        moved.add_(p.grad)
        p.grad = None

    node = torch.autograd.graph.get_gradient_edge(p).node
    if hooked == "node":  # As Megatron does.
        node.register_hook(move)
    else:
        p.register_post_accumulate_grad_hook(move)
    balancer = cs.GradientBalancer([p], ["a", "b"], cs.NTKMTL())
    for _ in range(2):
        moved.zero_()
        weights = balancer.weights
        for task, grad in (("a", _A), ("b", 9 * _B)):
            with balancer.task(task):
                (p * grad).sum().backward()
        balancer.update()
        torch.testing.assert_close(moved, weights["a"] * _A + weights["b"] * 9 * _B)
    assert balancer.report().together.all()


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_are_weighted_in_their_own_memory(kept: bool) -> None:
    """A gradient that a hook keeps is unchanged: its weighted values get new memory."""
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    addresses, held = [], list[Tensor]()
    node = torch.autograd.graph.get_gradient_edge(p).node
    node.register_prehook(lambda grads: addresses.append(grads[0].data_ptr()))
    if kept:
        p.register_hook(held.append)
    balancer = cs.GradientBalancer([p], ["a", "b"], cs.NTKMTL())
    for _ in range(2):
        p.grad, weights = None, balancer.weights
        held.clear()
        for task, grad in (("a", _A), ("b", 9 * _B)):
            with balancer.task(task):
                (p * grad).sum().backward()
        balancer.update()
    assert weights["a"] != 1
    torch.testing.assert_close(p.grad, weights["a"] * _A + weights["b"] * 9 * _B)
    assert (p.grad.data_ptr() == addresses[-2]) != kept
    assert all(map(torch.equal, held, [_A, 9 * _B]))


def test_weights_stay_in_a_step_without_gradients() -> None:
    """Weights are unchanged, even if the method would give others for zero gradients."""
    step = {"a": 300 * _A, "b": _B}
    method = cs.Clipped(cs.Sum(), 1.0)
    expected = _steps_of(method, step).weights
    for other in ({}, {"a": 0 * _A, "b": 0 * _B}, {"a": torch.nan * _A, "b": _B}):
        assert _steps_of(method, step, other).weights == expected


def test_every_step_solves_until_all_tasks_were_seen() -> None:
    steps: list[dict[str, Tensor | None]] = [{"a": _A}, {"a": _A, "b": 9 * _B}, {"a": _A}]
    balancer = _steps_of(cs.NTKMTL(), *steps, every=2)
    assert balancer.weights["b"] != 1
    assert balancer.report().steps.tolist() == [[2, 1], [1, 1]]
    state = _steps_of(cs.NTKMTL(), {"a": _A}, {"a": _A}, every=2).state_dict()
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    balancer = cs.GradientBalancer([p], ["a", "b"], cs.NTKMTL(), every=2)
    for loads in (False, True):
        if loads:  # The state's run has seen one task, the balancer both.
            balancer.load_state_dict(state)
        for task, grad in (("a", _A), ("b", 9 * _B)):
            with balancer.task(task):
                (p * grad).sum().backward()
        balancer.update()
    assert balancer.report().steps.tolist() == [[3, 1], [1, 1]]


@pytest.mark.parametrize(
    ("every", "period"), [(2, 2), (2, 3), (3, 3), (7, 4), (9, 11), (10, 2), (10, 10), (20, 3)]
)
def test_tasks_with_a_period_are_read(every: int, period: int) -> None:
    """`every` may divide the period of a task, or the other way around."""
    steps = 40 * every * period
    has_b = [n % period == 1 for n in range(steps)]
    # `_B` counts the task's steps up, so the norm tells which of them was read last.
    given = [{"a": _A, "b": (n + 1) * _B if b else None} for n, b in enumerate(has_b)]
    report = _steps_of(cs.Sum(), *given, every=every).report()
    (a, together), (_, b) = report.steps.tolist()
    assert abs(a - steps / every) <= 2
    assert b == together
    assert 0.7 < b / (a / period) < 1.4
    last = round(float(report.gradient_norms[1]) / 2**0.5) - 1
    assert steps - last <= 6 * every * period


def test_one_task_alone() -> None:
    network = Network()
    sgd = torch.optim.SGD(network.parameters(), 0.1)
    balancer = cs.GradientBalancer(network.trunk.parameters(), ["a"], cs.UPGrad(), sgd)
    for _ in range(3):
        with balancer.task("a"):
            network(torch.ones(2, 6).double(), "a").backward()
        sgd.step()
    assert balancer.weights == {"a": 1.0}


def test_frozen_thawed_and_converted_parameters() -> None:
    training = Training(cs.PCGrad())
    trunk = training.network.trunk
    trunk[0].requires_grad_(False)
    for step in range(4):
        if step == 2:
            trunk[0].requires_grad_(True)
        if step == 3:
            trunk[2].weight.data = trunk[2].weight.data.clone()
        expected = _plain_grads_of_training(training, step)
        training.step(step)
        _assert_close(training.grads(), expected)
    training.network.float()
    training.adam.state.clear()
    training.adam.zero_grad()
    with training.balancer.task("a"):
        training.network(training.batch(4, "a").float(), "a").backward()
    assert not training.balancer._sketches.is_empty


def _plain_grads_of_training(training: Training, step: int) -> list[Tensor]:
    """Like `_plain_grads`, but networks may have frozen parameters."""
    shadow = copy.deepcopy(training.network)
    sums = []
    for task in TASKS:
        shadow.zero_grad()
        shadow(training.batch(step, task), task).backward()
        weight = training.balancer.weights[task]
        sums.append(
            [
                torch.zeros(())
                if p.grad is None
                else p.grad.clone() * (weight if name.startswith("trunk") else 1)
                for name, p in shadow.named_parameters()
            ]
        )
    return [a + b + c for a, b, c in zip(*sums, strict=True)]


def _fail_after_a_pass(training: Training) -> None:
    with training.balancer.task("a"):
        training.network(training.batch(1, "a"), "a").backward()
        raise ZeroDivisionError


def test_an_exception_drops_the_sketches() -> None:
    training = Training(cs.PCGrad())
    training.step(0)
    with _weights_stay(training):
        with pytest.raises(ZeroDivisionError):
            _fail_after_a_pass(training)
        training.adam.step()
    assert "weights kept: gradients were not finite, or a pass raised" in str(
        training.balancer.report()
    )
    training.step(2)


def _fail_before_a_pass(training: Training) -> None:
    with training.balancer.task("a"):
        raise ZeroDivisionError


@pytest.mark.parametrize("fail", [_fail_after_a_pass, _fail_before_a_pass])
def test_a_step_that_is_repeated_after_an_exception(fail: Callable[[Training], None]) -> None:
    """`zero_grad()` drops the failed passes, so the step counts as if none had failed."""
    training, other = Training(cs.UPGrad()), Training(cs.UPGrad())
    for number in range(25):  # Drops of passes count from the end of the last step.
        with pytest.raises(ZeroDivisionError):
            fail(training)
        training.step(number)
        other.step(number)
        assert training.balancer.report().finite
        assert_equal(training.balancer.weights, other.balancer.weights)


def test_passes_outside_of_any_task() -> None:
    """Gradients of such passes have weight 1, and enter no sketch."""
    training = Training(cs.NashMTL())
    training.step(0)
    training.adam.zero_grad()
    training.network(training.batch(1, "a"), "a").backward()
    expected = [*training.grads()]
    shadow = copy.deepcopy(training.network)
    shadow.zero_grad()
    shadow(training.batch(1, "a"), "a").backward()
    plain = [torch.zeros(()) if p.grad is None else p.grad for p in shadow.parameters()]
    _assert_close(expected, plain)
    assert training.balancer._sketches.is_empty


class Cached(nn.Module):
    """A trunk with reentrant checkpointing, whose gradients arrive in an inner pass."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30)]
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True)
        return found


class Tied(nn.Module):
    """A trunk that uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 30)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.last(torch.tanh(self.first(x)))))
        return y


@pytest.mark.parametrize("trunk", [Cached, Tied])
def test_trunks(trunk: Callable[[], nn.Module]) -> None:
    training = Training(cs.UPGrad(), trunk())
    for step in range(3):
        expected = _plain_grads_of_training(training, step)
        training.step(step)
        _assert_close(training.grads(), expected)


def test_a_parameter_that_is_thawed_inside_a_block() -> None:
    p, q = (nn.Parameter(torch.ones(3).double()) for _ in "12")
    q.requires_grad_(False)
    sgd = torch.optim.SGD([p, q], lr=0.0)
    balancer = cs.GradientBalancer([p, q], ["a", "b"], cs.NTKMTL(), sgd)
    for _ in range(2):
        sgd.zero_grad()
        weight = balancer.weights["b"]
        with balancer.task("a"):
            (p * _A).sum().backward()
        with balancer.task("b"):
            q.requires_grad_(True)
            (p * _B + q * _A).sum().backward()
        q.requires_grad_(False)
        torch.testing.assert_close(q.grad, weight * _A)
        sgd.step()
    assert not q.requires_grad
    torch.testing.assert_close(balancer.gramian[1, 1], torch.tensor(3.0).double())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on(copied: Callable[[Any], Any]) -> None:
    training = Training(cs.GradVac(), every=2)
    for step in range(3):
        training.step(step)
    twin = copied(training)
    assert twin.balancer.optimizer is twin.adam
    for step in range(3, 6):
        training.step(step)
        twin.step(step)
    for p, q in zip(training.network.parameters(), twin.network.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("options", [{"every": 2}, {"sketch": 256}], ids=str)
@pytest.mark.parametrize("method", [cs.GradVac(), cs.UPGrad(groups="layer")], ids=repr)
def test_a_resumed_run_is_the_same(method: cs.Method, options: dict[str, int]) -> None:
    training = Training(copy.deepcopy(method), **options)
    for step in range(3):
        training.step(step)
    states = [
        copy.deepcopy(part.state_dict())
        for part in (training.network, training.adam, training.balancer)
    ]
    resumed = Training(copy.deepcopy(method), **options)
    for part, state in zip((resumed.network, resumed.adam, resumed.balancer), states, strict=True):
        part.load_state_dict(state)
    for step in range(3, 6):
        training.step(step)
        resumed.step(step)
    for p, q in zip(training.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(p, q)


class Wrapper(torch.optim.Optimizer):
    """A wrapper like Accelerate's: without hooks, and it steps only in the last micro-batch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_last = False

    def step(self, closure: Any = None) -> None:
        if self.is_last:
            self.optimizer.step(closure)


def test_the_optimizer_of_a_framework() -> None:
    training = Training(cs.UPGrad())
    training.balancer.close()
    wrapper = Wrapper(training.adam)
    shared = training.network.trunk.parameters()
    training.balancer = cs.GradientBalancer(shared, TASKS, optimizer=wrapper)
    for wrapper.is_last in (False, True):
        for task in TASKS:
            with training.balancer.task(task):
                training.network(training.batch(0, task), task).backward()
        wrapper.step()
        assert training.balancer.report().step == wrapper.is_last


_NETWORK = Network()


_SGD = torch.optim.SGD(_NETWORK.parameters(), 0.1)


def _made(parameters: Any = None, tasks: Any = TASKS, *arguments: Any, **options: Any) -> Any:
    parameters = _NETWORK.trunk.parameters() if parameters is None else parameters
    return cs.GradientBalancer(parameters, tasks, *arguments, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: _made([]), ValueError, "parameters must have at least one"),
        (lambda: _made(_NETWORK.trunk), TypeError, "parameters must be an iterable.*Sequential"),
        (
            lambda: _made([torch.ones(3)]),
            TypeError,
            "parameters must be torch.nn.Parameter, got Tensor",
        ),
        (lambda: _made(None, "abc"), TypeError, "tasks must be a sequence of names, got 'abc'"),
        (lambda: _made(None, {"a", "b"}), TypeError, "tasks must be a sequence of names"),
        (lambda: _made(None, []), ValueError, "tasks must name at least one task, got none"),
        (lambda: _made(None, ["a", "a"]), ValueError, "tasks must be distinct, got 'a' twice"),
        (lambda: _made(None, ["a", "a.b"]), ValueError, "names without a dot, got 'a.b'"),
        (lambda: _made(None, TASKS, cs.ConnectionStrength()), TypeError, "Connec.*MultiTaskOptim"),
        (lambda: _made(None, TASKS, cs.GradDrop()), TypeError, "method must be a Gramian method"),
        (lambda: _made(None, TASKS, cs.CAGrad(update_every=2)), ValueError, "use every="),
        (
            lambda: _made(optimizer=[torch.optim.Adam(_NETWORK.parameters())]),
            TypeError,
            r"optimizer must be a torch optimizer or None, got list: .*call update\(\)",
        ),
        (
            lambda: _made(optimizer=torch.optim.lr_scheduler.StepLR(_SGD, 1)),
            TypeError,
            "optimizer must be a torch optimizer or None, got StepLR",
        ),
        (
            lambda: _made(optimizer=SimpleNamespace(optimizer=None)),
            TypeError,
            "optimizer must be a torch optimizer or None, got SimpleNamespace",
        ),
        (lambda: _made(sketch=1000), ValueError, "power of two from 256 to 1073741824, got 1000"),
        (lambda: _made(sketch=128), ValueError, "sketch must be at least 256, got 128"),
        (lambda: _made(None, TASKS, cs.UPGrad), TypeError, "got the class UPGrad"),
        (lambda: _made(scaler=1), TypeError, "scaler must be a torch.amp.GradScaler, got 1"),
        (lambda: _made(scaler=torch.amp.GradScaler), TypeError, "scaler must be a .*GradScaler"),
        (lambda: _made(process_group=3), TypeError, "process_group must be a process group.*got 3"),
        (lambda: _made(every=0), ValueError, "every must be at least 1, got 0"),
        (lambda: _made(seed=-1), ValueError, r"seed must lie in \[0, 2\^63\), got -1"),
        (
            lambda: _made(method=cs.UPGrad(groups="layer")),
            ValueError,
            r"parameters must have names .*named_parameters\(\)",
        ),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
    _made().close()  # The failed constructor left nothing behind.


@pytest.mark.slow
@pytest.mark.parametrize(("set_to_none", "before", "passes"), [(True, 20, 62), (False, 333, 1000)])
def test_a_loop_that_never_ends_a_step_is_warned_about(
    set_to_none: bool, before: int, passes: int, monkeypatch: Any
) -> None:
    """The optimizer that steps is not the one that the balancer was given."""
    training = Training(cs.UPGrad())
    training.adam = torch.optim.Adam(training.network.parameters())
    zero_grad = partial(training.adam.zero_grad, set_to_none=set_to_none)
    monkeypatch.setattr(training.adam, "zero_grad", zero_grad)
    for number in range(before):
        training.step(number)
    with pytest.warns(UserWarning, match=f"{passes} passes .* no step has ended: pass the optim"):
        training.step(before)
    assert training.balancer.report().step == 0
    training.step(before + 1)  # Warns only once.


def test_skipped_steps_in_a_row_are_not_warned_about() -> None:
    """A scaler skips steps until it finds the right scale, and parameters stay unchanged."""
    training = Training(cs.UPGrad())
    for number in range(25):
        training.adam.zero_grad()
        with training.balancer.task("a"):
            training.network(training.batch(number, "a"), "a").backward()
    training.step(25)
    assert training.balancer.report().step == 1


def test_steps_without_a_marked_pass_are_warned_about() -> None:
    training = Training(cs.UPGrad(), every=20)

    def unmarked() -> None:
        training.adam.zero_grad()
        sum(training.network(training.batch(0, task), task) for task in TASKS).backward()
        training.adam.step()

    for _ in range(9):
        unmarked()
    with pytest.warns(UserWarning, match="10 steps have ended without a block of"):
        unmarked()
    unmarked()
    # Steps that do not solve make one pass for all tasks, which counts as marked.
    for number in range(30):
        training.adam.zero_grad()
        x = training.network.trunk(training.batch(number, "a"))
        training.balancer.backward({t: training.network.heads[t](x).mean() for t in TASKS})
        training.adam.step()


def test_misuse() -> None:
    training = Training(cs.UPGrad())
    balancer, network = training.balancer, training.network
    with pytest.raises(ValueError, match=r"no other .* got parameter 0.weight.*close\(\)"):
        cs.GradientBalancer(network.trunk.named_parameters(), TASKS)
    with pytest.raises(ValueError, match=r"task must be one of \['a', 'b', 'c'\], got 'd'"):
        balancer.task("d").__enter__()
    with balancer.task("a"):
        with pytest.raises(RuntimeError, match=r"task\('b'\) must not be inside task\('a'\)"):
            balancer.task("b").__enter__()
        with pytest.raises(RuntimeError, match=r"the end of a step must not be inside task\('a'\)"):
            training.adam.step()
        with pytest.raises(RuntimeError, match=r"backward\(losses\) must not be inside"):
            balancer.backward({"b": network(training.batch(0, "b"), "b")})
        network(training.batch(0, "a"), "a").backward()
    with pytest.warns(UserWarning, match=r"no gradient .* has arrived"), balancer.task("b"):
        pass
    with warnings.catch_warnings(), balancer.task("b"):
        warnings.simplefilter("error")  # Warns once per task.
    with pytest.raises(RuntimeError, match=r"update\(\) must not be called .*got Adam"):
        balancer.update()
    with pytest.raises(ValueError, match="losses must hold the loss of at least one task"):
        balancer.backward({})
    with pytest.raises(ValueError, match=r"losses must only have keys of .*got 'd'"):
        balancer.backward({"d": network(training.batch(0, "a"), "a")})
    state = balancer.state_dict()
    changes: list[tuple[Mapping[str, Any], str]] = [
        ({"tasks": ("a", "b")}, r"tasks \['a', 'b', 'c'\], got \['a', 'b'\]"),
        ({"tasks": None}, "reading it raised TypeError"),
        ({"weights": [1.0]}, "reading it raised AttributeError"),
        ({"method": {}}, r"the entries \['name', 'state'\], got \[\]"),
        ({"products": {}}, r"the entries \['gramian', .*got \[\]"),
        ({"method": {"name": "PCGrad", "state": {}}}, "for method UPGrad, got one for PCGrad"),
        ({"steps": -1}, "steps must lie in"),
        ({"weights": torch.ones(1, 2)}, r"shape \(modules, tasks\) = \(1, 3\)"),
        ({"products": {**state["products"], "gramian": torch.ones(2)}}, r"shape \(1, 3, 3\)"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            balancer.load_state_dict({**state, **change})
    for incomplete in ({}, None, {"tasks": TASKS}):
        with pytest.raises(ValueError, match=r"state must have the entries \['tasks', "):
            balancer.load_state_dict(incomplete)
    embedding = nn.Embedding(4, 3, sparse=True)
    sparse = cs.GradientBalancer(embedding.parameters(), ["a"])
    with (
        pytest.raises(TypeError, match=r"must be dense, .* parameter 0"),
        sparse.task("a"),
    ):
        embedding(torch.tensor([1])).sum().backward()
    balancer.close()
    with pytest.raises(RuntimeError, match="is closed"):
        balancer.task("a").__enter__()
    training.network(training.batch(0, "a"), "a").backward()


def test_a_report_states_its_errors() -> None:
    """Cosines from small sketches deviate by about the errors that the report states."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(20_000))
    first, other = torch.randn(20_000), torch.randn(20_000)
    second = 0.4 * first + other
    deviations = []
    for seed in range(100):
        balancer = cs.GradientBalancer([p], ["a", "b"], cs.Sum(), sketch=512, seed=seed)
        for task, direction in (("a", first), ("b", second)):
            with balancer.task(task):
                (p @ direction).backward()
        balancer.update()
        report = balancer.report()
        exact = nn.functional.cosine_similarity(first, second, dim=0)
        deviations.append((report.cosines[0, 1] - exact) / report.cosine_errors[0, 1])
        balancer.close()
    assert 0.7 < torch.stack(deviations).std() < 1.4
    assert abs(torch.stack(deviations).mean()) < 0.4


def test_a_report_of_modules_with_one_that_counts() -> None:
    """The error over all modules equals the error of the only module with nonzero gradients."""
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.randn(5000)) for _ in "12")
    named = [("one.weight", p), ("other.weight", q)]
    balancer = cs.GradientBalancer(named, TASKS[:2], cs.UPGrad(groups="layer"), sketch=512)
    for task in TASKS[:2]:
        with balancer.task(task):
            (p @ torch.randn(5000) + 0 * q.sum()).backward()
    balancer.update()
    report = balancer.report()
    of_one = report.cosine_errors[0, 0, 1].item()
    assert report.scalars()["cosine_error/a,b"] == pytest.approx(of_one)


@pytest.mark.compile
def test_compiled_network() -> None:
    training = Training(cs.UPGrad())
    compiled = torch.compile(training.network.trunk, backend="aot_eager")
    for step in range(3):
        expected = _plain_grads_of_training(training, step)
        training.adam.zero_grad()
        for task in TASKS:
            with training.balancer.task(task):
                z = compiled(training.batch(step, task))
                scale = TASKS.index(task)
                loss = (training.network.heads[task](z) - scale).square().mean() * 10**scale
                loss.backward()
        _assert_close(training.grads(), expected)
        training.adam.step()
