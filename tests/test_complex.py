"""Complex parameters, which methods see as pairs of real numbers, with the real inner product."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from networks import AB, GRAMIAN_METHODS, assert_equal, optimizer_of
from ranks import Ranks, on_its_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cs_kernels as cs

pytestmark = pytest.mark.loop


class Spectral(nn.Module):
    """A layer that multiplies Fourier coefficients, and a transposed weight."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 8, dtype=dtype.to_real())
        self.scale = nn.Parameter(torch.randn(5, dtype=dtype))
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        coefficients = torch.fft.rfft(torch.tanh(self.layer(x)), dim=1) * self.scale.conj()
        return torch.fft.irfft(coefficients @ self.mix, n=8, dim=1)


def _losses(network: nn.Module, x: Tensor, task: str) -> Tensor:
    result: Tensor = (network(x) - (1 if task == "a" else -2)).square().mean()
    return result if task == "a" else result.sqrt()


def _flat(grads: list[Tensor]) -> Tensor:
    parts = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in grads]
    return torch.cat([part.flatten() for part in parts])


def test_a_lazily_conjugated_gradient() -> None:
    """`a * b.conj() * 1` gives `b` a gradient with the conjugate bit."""
    w = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    trunk = nn.ParameterList([w])
    z = torch.randn(5, dtype=torch.complex64) * w.conj() * 1
    losses = {"a": z.abs().square().sum(), "b": (z - 1).abs().square().sum()}
    (expected,) = torch.autograd.grad(sum(losses.values()), w, retain_graph=True)
    optimizer_of(trunk, cs.Sum(separate=True)).backward(losses)
    torch.testing.assert_close(w.grad, expected)


@pytest.mark.parametrize("method", GRAMIAN_METHODS, ids=repr)
def test_the_update_of_a_plain_loop(backend: str, method: cs.GramianMethod) -> None:
    network, x = Spectral(), torch.randn(7, 6, dtype=torch.float64)
    parameters = [*network.parameters()]
    losses = {task: _losses(network, x, task) for task in AB}
    grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses.values()]
    rows = torch.stack([_flat(list(of_task)) for of_task in grads])
    detached = {task: loss.detach() for task, loss in losses.items()}
    step = cs.Step(0, tuple(AB), detached, detached)
    weights = copy.deepcopy(method).weights(rows @ rows.T, step)
    opt = optimizer_of(network, copy.deepcopy(method))
    opt.count_conflicts()
    opt.backward(losses)
    update = _flat([p.grad for p in parameters if p.grad is not None])
    torch.testing.assert_close(update, weights @ rows, rtol=1e-9, atol=1e-12)
    assert "scale" in str(opt.conflicts())
    opt.optimizer.step()
    opt.step(lambda task: _losses(network, x, task))


def test_sums_keep_imaginary_parts() -> None:
    """ConnectionStrength, Sum in one pass and Sum with a pass per task give the same update."""
    found = []
    for method in (cs.ConnectionStrength(), cs.Sum(), cs.Sum(separate=True)):
        network = nn.Sequential(Spectral(), nn.Linear(8, 4).double(), nn.BatchNorm1d(4).double())
        cs.nn.convert_task_batchnorm(network, AB)
        x = torch.randn(7, 6, dtype=torch.float64)
        opt = optimizer_of(network, method)
        opt.step(lambda task: _losses(network, x, task))
        found.append([network[0].scale, network[0].mix])
        if method.prioritizes:
            plain = opt.coverage().plain
            assert plain["0.scale"] == "not the weight of a convolution or linear layer"
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-12, atol=1e-12)


def test_refusals_name_the_parameter() -> None:
    network = nn.Sequential(Spectral(torch.complex64), nn.Linear(8, 8), nn.BatchNorm1d(8))
    cs.nn.convert_task_batchnorm(network, AB)
    with pytest.raises(ValueError, match=r"got 0\.scale of torch\.complex64: use Sum\(\)"):
        optimizer_of(network, cs.GradDrop())
    network[0].requires_grad_(False)
    optimizer_of(network, cs.GradDrop())
    network = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3))
    network[0].weight = nn.Parameter(torch.zeros(3, 2, 1, dtype=torch.complex64))
    cs.nn.convert_task_batchnorm(network, AB)
    match = r"with a real-valued weight .*, got '0' with a torch\.complex"
    with pytest.raises(ValueError, match=match):
        optimizer_of(network, layers={"0": "1"})


def test_types_without_kernels_are_named() -> None:
    linear = nn.Linear(3, 4)
    linear.weight = nn.Parameter(torch.zeros(4, 3).to(torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"got weight of torch\.float8_e5m2: use Sum\(\)"):
        optimizer_of(linear, cs.PCGrad())
    optimizer_of(linear, cs.Sum())


def _on_ranks(rank: int, size: int, way: str) -> list[Tensor]:
    network, x = Spectral(), torch.randn(3, 8, 6, dtype=torch.float64)
    group = dist.group.WORLD if size > 1 else None
    opt = optimizer_of(network, cs.UPGrad(), process_group=group)
    for batch in x:
        mine = batch.chunk(size)[rank]
        with RealCollectives():
            if way == "step":
                opt.step(lambda task, x=mine: (network(x) - AB.index(task)).square().mean())
            else:
                opt.backward({t: (network(mine) - AB.index(t)).square().mean() for t in AB})
                opt.optimizer.step()
    return [p.detach().clone() for p in network.parameters()]


class RealCollectives(TorchDispatchMode):
    """Refuses collectives on complex tensors, which gloo supports and NCCL does not."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            leaves = tree_leaves([args, kwargs])
            assert not any(t.is_complex() for t in leaves if isinstance(t, Tensor)), function
        return function(*args, **(kwargs or {}))


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["step", "backward"])
def test_ranks(pools: Callable[[int], Ranks], way: str) -> None:
    first, second = pools(2).run(_on_ranks, 2, way)
    assert_equal(first, second)
    torch.manual_seed(0)
    alone = on_its_device(0, _on_ranks, 1, way)
    torch.testing.assert_close(first, alone, rtol=1e-9, atol=1e-12)
