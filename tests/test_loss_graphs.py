"""Losses must depend on this trunk, and only on parameters that the optimizer holds."""

import copy
from functools import partial

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    EVERY_METHOD,
    TASKS,
    Setup,
    assert_equal,
    problem,
    refused,
    sgd_of,
    started,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop


@BOTH_PHASES
@EVERY_METHOD
def test_a_forgotten_head(method: cs.Method, schedule: cs.Schedule) -> None:
    setup = Setup()
    del setup.optimizer.param_groups[0]["params"][-2:]  # The last head's parameters.
    opt = setup.start(method, schedule)
    before = setup.state()
    for call in (opt.step, opt.trace):
        with pytest.raises(
            ValueError, match=r"optimizer must hold.*Conv2d\.(weight|bias).*'edges'"
        ):
            call(setup.closure(0))
        if not isinstance(schedule, cs.Sequential):
            assert_equal(before, setup.state())


@EVERY_METHOD
@pytest.mark.parametrize("name", ["trunk.bare.weight", "heads.normals.weight"])
def test_a_parameter_that_is_unfrozen_later(method: cs.Method, name: str) -> None:
    """A parameter of the trunk or of a head trains as soon as the optimizer holds it."""
    setup = Setup()
    late = nn.ModuleDict({"trunk": setup.trunk, "heads": setup.heads}).get_parameter(name)
    late.requires_grad_(False)
    params = setup.optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not late]
    opt, value = setup.start(method), late.detach().clone()
    opt.step(setup.closure(0))
    late.requires_grad_(True)
    for _ in range(2):
        message = r"optimizer must hold.*'(depth|normals)'"
        with refused(partial(setup.state, False), ValueError, message):
            opt.step(setup.closure(1))
    setup.optimizer.add_param_group({"params": [late]})
    opt.step(setup.closure(1))
    assert not torch.equal(value, late)


@pytest.mark.parametrize("before", [0, 1])
def test_a_head_that_the_optimizer_does_not_hold_in_backward(before: int) -> None:
    """No hook sees the head's module, but the graph contains its parameters once they train."""
    model, loss, *_ = problem()
    held = sgd_of(model.trunk, model.heads["a"])
    opt = cs.MultiTaskOptimizer(model.trunk, held, AB, cs.PCGrad())

    def train(steps: int, frozen: bool) -> None:
        model.heads["b"].requires_grad_(not frozen)
        for _ in range(steps):
            opt.backward({task: loss(task) for task in AB})
            held.step()

    train(before, frozen=True)
    with pytest.raises(ValueError, match=r"optimizer must hold.*(\(1, 6\)|\(1,\)).*loss of 'b'"):
        train(40 * before + 1, frozen=False)
    assert all(p.grad is None for group in held.param_groups for p in group["params"])


@BOTH_PHASES
@EVERY_METHOD
@pytest.mark.parametrize("steps", [0, 1])
def test_a_loss_from_another_copy(method: cs.Method, schedule: cs.Schedule, steps: int) -> None:
    """Only one task's loss is from the copy, in the first step or later."""
    setup, other = Setup(), Setup()
    setup.optimizer.param_groups[0]["params"] += other.parameters()
    opt = setup.start(method, schedule)
    for _ in range(steps if method.separate_gradients else 0):  # A sum does not distinguish tasks.
        opt.step(setup.closure(0))

    def loss(task: str) -> Tensor:
        if task != "edges":
            return setup.closure(1)(task)
        with cs.nn.active_task(other.trunk, task):
            return other.closure(1)(task)

    with pytest.raises(ValueError, match=r"depend on a parameter of trunk.*'edges'"):
        opt.step(loss)


def test_a_loss_from_another_copy_in_backward() -> None:
    (model, loss, *_), (twin, other, *_) = problem(), problem()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model, twin), AB, cs.PCGrad())
    with pytest.raises(ValueError, match=r"depend on a parameter of trunk.*'b'"):
        opt.backward({"a": loss("a"), "b": other("b")})


@BOTH_PHASES
@EVERY_METHOD
def test_parameters_that_were_replaced(method: cs.Method, schedule: cs.Schedule) -> None:
    """After a checkpoint is loaded with `assign`, the optimizer still holds the old parameters."""
    setup, opt = started(method, schedule)
    opt.step(setup.closure(0))
    setup.trunk.load_state_dict(copy.deepcopy(setup.trunk.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"trunk must keep the parameters.*stem\.weight"):
        opt.step(setup.closure(0))


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad()], ids=repr)
def test_a_new_parameter_that_the_optimizer_holds(method: cs.Method) -> None:
    """If the new parameter went unnoticed, it would get the plain sum."""
    setup, opt = started(method)
    opt.step(setup.closure(0))
    stem = setup.trunk.stem
    stem.weight = nn.Parameter(stem.weight.detach().clone())
    setup.optimizer.add_param_group({"params": [stem.weight]})
    for _ in range(2):
        with refused(partial(setup.state, False), ValueError, r"got a new parameter stem\.weight"):
            opt.step(setup.closure(1))
    setup.start(method).step(setup.closure(1))


def test_a_task_whose_part_is_frozen_later() -> None:
    """The task then reaches no shared parameter, which is allowed."""
    trunk = nn.ModuleDict({task: nn.Linear(3, 4) for task in AB})
    heads, x = nn.ModuleDict({task: nn.Linear(4, 1) for task in AB}), torch.randn(5, 3)
    opt = cs.MultiTaskOptimizer(trunk, sgd_of(trunk, heads), AB, cs.PCGrad())

    def loss(task: str) -> Tensor:
        return heads[task](trunk[task](x)).square().mean()

    opt.step(loss)
    trunk["a"].requires_grad_(False)
    before = trunk["a"].weight.clone()
    opt.step(loss)
    assert torch.equal(before, trunk["a"].weight)
    assert heads["a"].weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY_METHOD
def test_checkpointed_trunks(method: cs.Method, reentrant: bool) -> None:
    """The trunk runs again in the backward pass, with the task still active.

    Reentrant checkpointing hides the parameters from the graph of the loss.
    """
    states = []
    for run in (lambda trunk, x: trunk(x), partial(checkpoint, use_reentrant=reentrant)):
        setup, opt = started(method)
        setup.trunk.eval()  # Two runs would update the statistics twice.
        x, targets = setup.batches[0]

        def loss(task: str) -> Tensor:
            y = setup.heads[task](run(setup.trunk, x.requires_grad_(reentrant)))
            return (y - targets[TASKS.index(task)]).square().mean()

        opt.trace(loss)
        for _ in range(2):
            opt.step(loss)
        states.append(setup.state())
    (torch.testing.assert_close if reentrant else assert_equal)(*states)


def test_a_normalization_unfrozen_later_must_be_held() -> None:
    trunk = cs.nn.convert_task_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), AB)
    trunk[1].requires_grad_(False)
    opt, x = cs.MultiTaskOptimizer(trunk, sgd_of(trunk[0]), AB), torch.randn(8, 3)
    opt.step(lambda task: (trunk(x) - 1).square().mean())
    trunk[1].requires_grad_(True)
    with refused(trunk.state_dict, ValueError, "optimizer"):
        opt.step(lambda task: (trunk(x) - 1).square().mean())
