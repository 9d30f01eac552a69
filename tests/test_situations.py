"""Remedies in docs/errors.md and docs/loop.md give the exact result."""

import copy
import importlib
import warnings

import pytest
import torch
from networks import AB, optimizer_of, sgd_of, step_by_hand
from torch import nn
from torch.nn import functional as F

import cs_kernels as cs

pytestmark = pytest.mark.loop


def _losses(z, heads):
    """Losses of tasks in conflict: equal heads, opposite targets."""
    signs = zip(AB, (1, -1), strict=True)
    return {task: (heads[task](z) - sign).square().mean() for task, sign in signs}


def _heads():
    head = nn.Linear(6, 1)
    return nn.ModuleDict({task: copy.deepcopy(head) for task in AB})


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_around_a_step(float64, line_search):
    """The closure calls `opt.step`, or is plain torch."""
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        x, trunk, heads = torch.randn(12, 4), nn.Sequential(nn.Linear(4, 6), nn.Tanh()), _heads()
        parameters, shared = [*trunk.parameters(), *heads.parameters()], [*trunk.parameters()]
        lbfgs = torch.optim.LBFGS(parameters, max_iter=7, line_search_fn=line_search)
        opt = cs.MultiTaskOptimizer(trunk, torch.optim.SGD(parameters, lr=0), AB, cs.UPGrad())

        def of_step():
            return sum(opt.step(lambda task: _losses(trunk(x), heads)[task]).values())

        def plain():
            losses = _losses(trunk(x), heads)
            update = step_by_hand(cs.UPGrad(), shared, losses)
            lbfgs.zero_grad()
            total = sum(losses.values())
            total.backward()
            for parameter, part in zip(shared, update, strict=True):
                parameter.grad = part.view_as(parameter)
            return total.detach()

        results.append(nn.utils.parameters_to_vector(parameters).detach())
        for _ in range(5):
            lbfgs.step(of_step if ours else plain)
        results.append(nn.utils.parameters_to_vector(parameters).detach())
    start, result, _, expected = results
    assert (result - start).abs().max() > 0.1
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)


def test_sparse_gradients_of_an_embedding(float64):
    """Gradients equal those of the sum of losses, weighted as the features' gradients are."""
    embedding, heads = nn.Embedding(20, 6, sparse=True), _heads()
    pair = torch.optim.SparseAdam(embedding.parameters()), torch.optim.Adam(heads.parameters())
    opt = cs.MultiTaskOptimizer(embedding, pair, AB, cs.PCGrad())
    z = embedding(torch.tensor([1, 2, 3, 2]))
    losses = _losses(z, heads)
    grads = [torch.autograd.grad(x, z, retain_graph=True)[0].flatten() for x in losses.values()]
    gramian = torch.stack(grads) @ torch.stack(grads).T
    assert gramian[0, 1] < 0
    weights = cs.PCGrad().weights(gramian)  # With two tasks, the order does not matter.
    total = sum(w * x for w, x in zip(weights, losses.values(), strict=True))
    (expected,) = torch.autograd.grad(total, embedding.weight, retain_graph=True)
    opt.backward(losses, features=z)
    assert embedding.weight.grad.is_sparse
    torch.testing.assert_close(embedding.weight.grad.to_dense(), expected.to_dense())


def test_a_state_of_the_trunk_advances_once_per_pass():
    trunk, heads, x = nn.Linear(4, 6), _heads(), torch.randn(8, 4)
    passes = []
    trunk.register_forward_hook(lambda *_: passes.append(1))
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB, cs.PCGrad())
    opt.step(lambda task: _losses(trunk(x), heads)[task])
    assert len(passes) == 2
    opt.backward(_losses(trunk(x), heads))
    assert len(passes) == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_a_discriminator_in_the_generator_s_step(frozen):
    """Unless frozen, a discriminator in the generator's optimizer trains for the generator."""
    trunk, heads, judge = nn.Linear(4, 6), _heads(), nn.Linear(1, 1)
    sgd = sgd_of(trunk, heads, judge)
    opt = cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
    judge.requires_grad_(not frozen)
    before = judge.weight.detach().clone()
    z = trunk(torch.randn(8, 4))
    losses = _losses(z, heads)
    losses["a"] = losses["a"] + F.softplus(-judge(heads["a"](z))).mean()
    opt.backward(losses)
    sgd.step()
    assert torch.equal(judge.weight, before) == frozen


def _blocks(*, converted):
    parts = [[nn.Conv2d(n, 4, 3), nn.BatchNorm2d(4), nn.ReLU()] for n in (3, 4)]
    network = nn.Sequential(*parts[0], *parts[1])
    return cs.nn.convert_task_batchnorm(network, AB) if converted else network


def _stepped(trunk, method=None):
    opt = optimizer_of(trunk, method)
    x = torch.randn(2, 3, 8, 8)
    opt.step(lambda task: (trunk(x) - (1 if task == "a" else -1)).square().mean())
    return opt


def test_quantization_aware_training():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = importlib.import_module("torch.ao.quantization")

        def prepared(network, *, fused):
            if fused:
                groups = [["0", "1", "2"], ["3", "4", "5"]]
                network = quantization.fuse_modules_qat(network, groups)
            network.qconfig = quantization.get_default_qat_qconfig("x86")
            return quantization.prepare_qat(network)

        trunk = prepared(_blocks(converted=False), fused=True)
        assert type(trunk[0]).__name__ == "ConvBnReLU2d"
        _stepped(trunk, cs.PCGrad())
        with pytest.raises((AttributeError, ValueError)):
            _stepped(cs.nn.convert_task_batchnorm(trunk, AB))
        with pytest.raises(AssertionError, match="did not find fuser method"):
            prepared(_blocks(converted=True), fused=True)
        opt = _stepped(prepared(_blocks(converted=True), fused=False))
        assert "2 of 4 shared parameters are prioritized" in str(opt.coverage())
        converted = _blocks(converted=True)
        _stepped(converted)
        alone = prepared(cs.nn.extract_task(converted, "a").train(), fused=True)
        alone(torch.randn(2, 3, 8, 8)).sum().backward()
