"""Situations that docs/errors.md and docs/loop.md have a remedy for: the remedy is exact."""

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import AB
from torch import Tensor, nn
from torch.nn import functional as F

import cs_kernels as cs

pytestmark = pytest.mark.loop


def _losses(z: Tensor, heads: nn.ModuleDict) -> dict[str, Tensor]:
    """In conflict: equal heads have opposed targets."""
    signs = zip(AB, (1, -1), strict=True)
    return {task: (heads[task](z) - sign).square().mean() for task, sign in signs}


def _heads() -> nn.ModuleDict:
    head = nn.Linear(6, 1)
    return nn.ModuleDict({task: copy.deepcopy(head) for task in AB})


class _Lbfgs:
    """Five steps of LBFGS, with a closure of MultiTaskOptimizer or of plain torch."""

    def __init__(self, line_search: str | None) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(12, 4)
        self.trunk, self.heads = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), _heads()
        self.parameters = [*self.trunk.parameters(), *self.heads.parameters()]
        self.lbfgs = torch.optim.LBFGS(self.parameters, max_iter=7, line_search_fn=line_search)

    def losses(self) -> dict[str, Tensor]:
        return _losses(self.trunk(self.x), self.heads)

    def trained(self, closure: Callable[[], Any]) -> Tensor:
        for _ in range(5):
            self.lbfgs.step(closure)
        return nn.utils.parameters_to_vector(self.parameters).detach()

    def ours(self) -> Tensor:
        sgd = torch.optim.SGD(self.parameters, lr=0)
        opt = cs.MultiTaskOptimizer(self.trunk, sgd, AB, cs.UPGrad())
        return self.trained(lambda: sum(opt.step(lambda task: self.losses()[task]).values()))

    def plain(self) -> Tensor:
        shared = [*self.trunk.parameters()]

        def closure() -> Tensor:
            losses = self.losses()
            gradients = [torch.autograd.grad(x, shared, retain_graph=True) for x in losses.values()]
            total = torch.stack([*losses.values()]).sum()
            self.lbfgs.zero_grad()
            total.backward()
            rows = torch.stack([nn.utils.parameters_to_vector(grads) for grads in gradients])
            weights = cs.UPGrad().weights(rows @ rows.T)
            for parameter, *grads in zip(shared, *gradients, strict=True):
                parameter.grad = sum(w * g for w, g in zip(weights, grads, strict=True))
            return total.detach()

        return self.trained(closure)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_around_a_step(float64: None, line_search: str | None) -> None:
    ours, plain = (_Lbfgs(line_search) for _ in range(2))
    start = nn.utils.parameters_to_vector(ours.parameters).detach()
    result = ours.ours()
    assert (result - start).abs().max() > 0.1
    torch.testing.assert_close(result, plain.plain(), rtol=0, atol=1e-10)


def test_sparse_gradients_of_an_embedding(float64: None) -> None:
    """Equal to one pass with the task weights of the features' gradients."""
    embedding, heads = nn.Embedding(20, 6, sparse=True), _heads()
    optimizers = [
        torch.optim.SparseAdam(embedding.parameters()),
        torch.optim.Adam(heads.parameters()),
    ]
    opt = cs.MultiTaskOptimizer(embedding, optimizers, AB, cs.PCGrad())
    z = embedding(torch.tensor([1, 2, 3, 2]))
    losses = _losses(z, heads)
    rows = torch.stack(
        [torch.autograd.grad(x, z, retain_graph=True)[0].flatten() for x in losses.values()]
    )
    gramian = rows @ rows.T
    assert gramian[0, 1] < 0
    weights = cs.PCGrad().weights(gramian)  # Of two tasks, the order does not matter.
    total = sum(w * x for w, x in zip(weights, losses.values(), strict=True))
    (expected,) = torch.autograd.grad(total, embedding.weight, retain_graph=True)
    opt.backward(losses, features=z)
    assert embedding.weight.grad.is_sparse
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected.to_dense())


class _Counting(nn.Linear):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x)


def test_a_state_of_the_trunk_advances_once_per_pass() -> None:
    trunk, heads, x = _Counting(4, 6), _heads(), torch.randn(8, 4)
    sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
    opt.step(lambda task: _losses(trunk(x), heads)[task])
    assert trunk.passes == 2
    opt.backward(_losses(trunk(x), heads))
    assert trunk.passes == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_a_discriminator_in_the_generator_s_step(frozen: bool) -> None:
    """Held by the generator's optimizer, it is trained for the generator, and nothing raises."""
    trunk, heads, judge = nn.Linear(4, 6), _heads(), nn.Linear(1, 1)
    sgd = torch.optim.SGD([p for m in (trunk, heads, judge) for p in m.parameters()], lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
    judge.requires_grad_(not frozen)
    before = judge.weight.detach().clone()
    z = trunk(torch.randn(8, 4))
    losses = _losses(z, heads)
    losses["a"] = losses["a"] + F.softplus(-judge(heads["a"](z))).mean()
    opt.backward(losses)
    sgd.step()
    assert torch.equal(judge.weight, before) == frozen


@pytest.fixture
def quantization() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("torch.ao.quantization")


def _blocks() -> nn.Sequential:
    parts = [[nn.Conv2d(n, 4, 3), nn.BatchNorm2d(4), nn.ReLU()] for n in (3, 4)]
    return nn.Sequential(*parts[0], *parts[1])


def _prepared(quantization: Any, network: nn.Module, *, fused: bool) -> Any:
    if fused:
        network = quantization.fuse_modules_qat(network, [["0", "1", "2"], ["3", "4", "5"]])
    network.qconfig = quantization.get_default_qat_qconfig("x86")
    return quantization.prepare_qat(network)


def _stepped(trunk: nn.Module, method: cs.Method | None = None) -> cs.MultiTaskOptimizer:
    sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, method)
    x = torch.randn(2, 3, 8, 8)
    opt.step(lambda task: (trunk(x) - (1 if task == "a" else -1)).square().mean())
    return opt


def test_quantization_aware_training(quantization: Any) -> None:
    fused = _prepared(quantization, _blocks(), fused=True)
    assert type(fused[0]).__name__ == "ConvBnReLU2d"
    _stepped(fused, cs.PCGrad())
    with pytest.raises((AttributeError, ValueError)):
        _stepped(cs.nn.convert_task_batchnorm(_prepared(quantization, _blocks(), fused=True), AB))
    with pytest.raises(AssertionError, match="did not find fuser method"):
        _prepared(quantization, cs.nn.convert_task_batchnorm(_blocks(), AB), fused=True)
    converted = cs.nn.convert_task_batchnorm(_blocks(), AB)
    opt = _stepped(_prepared(quantization, converted, fused=False))
    assert "2 of 4 shared parameters are prioritized" in str(opt.coverage())
    converted = cs.nn.convert_task_batchnorm(_blocks(), AB)
    _stepped(converted)
    alone = _prepared(quantization, cs.nn.extract_task(converted, "a").train(), fused=True)
    alone(torch.randn(2, 3, 8, 8)).sum().backward()
