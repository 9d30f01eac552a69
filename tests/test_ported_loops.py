"""Mistakes in ported loops that would otherwise go unnoticed during training."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    EVERY_METHOD,
    Setup,
    assert_equal,
    refused,
    sgd_of,
    started,
    started_problem,
)
from torch import nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

TWICE = RuntimeError, "optimizer has already used the update"


@BOTH_PHASES
def test_a_second_optimizer_step(schedule):
    """A second step would apply the update twice, even with clipped or new head gradients."""
    setup, opt = started(schedule=schedule)

    def new_gradients_of_heads():
        setup.heads.zero_grad()
        sum(p.sum() for p in setup.heads.parameters()).backward()

    ways = lambda: None, lambda: nn.utils.clip_grad_norm_(setup.parameters(), 1e-3)
    for number, way in enumerate((*ways, new_gradients_of_heads)):
        setup.optimizer.zero_grad()
        opt.step(setup.closure(number))
        way()
        with refused(partial(setup.state, False), *TWICE):
            setup.optimizer.step()
    scaled = Setup(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu")
    opt = scaled.start(schedule=schedule, scaler=scaler)
    opt.step(scaled.closure(0))
    with refused(partial(scaled.state, False), *TWICE):
        scaler.step(scaled.optimizer)


def test_steps_on_other_gradients():
    """Between two steps, the torch optimizer may step on gradients of another loss."""
    setup, opt = started(schedule=cs.Mixed(2, seed=3, draw="step"))
    opt.start_epoch(1)
    for number in range(4):
        opt.step(setup.closure(number))
        setup.optimizer.zero_grad()
        before = setup.state(grads=False)
        with cs.nn.active_task(setup.trunk, "depth"):
            setup.closure(number)("depth").backward()
        setup.optimizer.step()
        assert not all(map(torch.equal, before, setup.state(grads=False)))


def test_several_optimizers_and_one_more_step():
    setup = Setup()
    setup.optimizer = trunk, heads = [sgd_of(module) for module in (setup.trunk, setup.heads)]
    opt = setup.start()
    opt.step(setup.closure(0))
    heads.zero_grad()
    sum(p.sum() for p in setup.heads.parameters()).backward()
    heads.step()
    with pytest.raises(TWICE[0], match=TWICE[1]):
        trunk.step()


def test_a_normalization_outside_the_trunk():
    """Such a normalization would use the previously active task for every task."""
    blocks = (nn.Sequential(nn.Linear(n, m), nn.BatchNorm1d(m)) for n, m in ((4, 6), (6, 3)))
    network = cs.nn.convert_task_batchnorm(nn.Sequential(*blocks), AB)
    cs.nn.set_task(network, "a")
    trunk, decoder = network
    opt, x = cs.MultiTaskOptimizer(trunk, sgd_of(network), AB), torch.randn(8, 4)

    def loss(task):
        return network(x).square().mean()

    message = "trunk must contain every task-specific.*'a' active.*'b'"
    with refused(network.state_dict, ValueError, message):
        opt.step(loss)

    def active(task):
        with cs.nn.active_task(decoder, task):
            return loss(task)

    opt.step(active)
    assert decoder[1].b.num_batches_tracked == 1
    cs.MultiTaskOptimizer(network, sgd_of(network), AB).step(loss)


SAME = "got 3, two of which have the same code .*partial"


@pytest.mark.parametrize(
    ("closures", "message"),
    [
        # All of these read the last batch.
        (lambda s: [lambda task: s.closure(n)(task) for n in range(3)], SAME),
        (lambda s: [partial(lambda x, task: x * s.closure(n)(task), 1) for n in range(3)], SAME),
        (lambda s: (lambda task: s.closure(n)(task) for n in range(3)), SAME),
        # Each closure has its own batch, bound in one of several ways, or may draw a new one.
        (lambda s: [lambda task, n=n: s.closure(n)(task) for n in range(3)], None),
        (lambda s: [lambda t, *, n=b[0]: s.closure(0)(t) + n.sum() for b in s.batches], None),
        (lambda s: [partial(lambda n, task: s.closure(n)(task), n) for n in range(3)], None),
        (lambda s: [s.closure(n) for n in range(3)], None),
        (lambda s: [s.closure(0)] * 3, None),
    ],
)
def test_closures_of_micro_batches(closures, message):
    setup, opt = started()
    with refused(setup.state, ValueError, message) if message else nullcontext():
        opt.step(closures(setup))


def test_losses_of_one_forward_pass_in_a_closure():
    model, _, opt = started_problem(cs.PCGrad())
    features = model.trunk(torch.randn(7, 5).double())
    losses = {task: model.heads[task](features).square().mean() for task in AB}
    with pytest.raises(RuntimeError, match="second time") as caught:
        opt.step(lambda task: losses[task])
    assert "call backward({task: loss})" in caught.value.__notes__[-1]


LEAVE = "closure must leave gradients alone"
STEPS = "closure must not step the optimizer"


@EVERY_METHOD
@pytest.mark.parametrize(
    ("does", "schedule", "message"),
    [
        # Heads and normalizations of all tasks but the last would not train.
        (lambda setup, loss: setup.optimizer.zero_grad(), cs.Joint(), LEAVE),
        (lambda setup, loss: setup.optimizer.zero_grad(set_to_none=False), cs.Joint(), LEAVE),
        (lambda setup, loss: setup.heads.zero_grad(), cs.Joint(), LEAVE),
        # Each gradient would count twice.
        (lambda setup, loss: loss.backward(retain_graph=True), cs.Joint(), LEAVE),
        (lambda setup, loss: loss.backward(retain_graph=True), cs.Sequential(), LEAVE),
        (lambda setup, loss: setup.optimizer.step(), cs.Joint(), STEPS),
        (lambda setup, loss: setup.optimizer.step(), cs.Sequential(), STEPS),
    ],
)
def test_closures_that_do_the_work_of_a_step(method, does, schedule, message):
    setup, opt = started(method, schedule)

    def closure(task):
        loss = setup.closure(0)(task)
        does(setup, loss)
        return loss

    with refused(partial(setup.state, False), RuntimeError, message):
        opt.step(closure)
    assert all(p.grad is None for p in setup.parameters())
    opt.step(setup.closure(0))


def test_a_trace_of_a_closure_that_makes_its_own_backward_pass():
    setup, opt = started()

    def closure(task):
        loss = setup.closure(0)(task)
        loss.backward(retain_graph=True)
        return loss

    with refused(partial(setup.state, False), RuntimeError, LEAVE):
        opt.trace(closure)


def test_a_closure_that_changes_gradients_between_micro_batches():
    setup, opt = started(schedule=cs.Sequential())

    def closure(task):
        setup.optimizer.zero_grad()
        return setup.closure(0)(task)

    opt.step(closure)  # Nothing is lost: each task has its own optimizer step.
    opt.step([closure, setup.closure(1)])
    with pytest.raises(RuntimeError, match=LEAVE):
        opt.step([setup.closure(1), closure])


def test_a_frozen_teacher_with_another_task():
    """The teacher is converted, too, and always runs for "depth", whichever task is trained."""
    setup, opt = started()
    teacher = copy.deepcopy(setup.trunk).requires_grad_(False)

    def closure(task):
        with torch.no_grad(), cs.nn.active_task(teacher, "depth"):
            features = teacher(setup.batches[0][0])
        distance = (setup.trunk(setup.batches[0][0]) - features).square().mean()
        return setup.closure(0)(task) + distance

    opt.step(closure)


def test_steps_leave_no_memory_behind():
    """Torch never frees a patch of its compiler's limits, so later steps must not make any."""
    import torch._dynamo

    setup, opt = started()
    made = []
    original = torch._dynamo.config.patch
    opt.step(setup.closure(0))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(torch._dynamo.config), "patch", lambda *a, **o: made.append(o))
        for _ in range(3):
            opt.step(setup.closure(0))
    assert made == []
    assert torch._dynamo.config.patch == original


@BOTH_PHASES
def test_autocast_around_the_step(schedule):
    """Autocast's cache must not keep weights that an update has changed."""

    def trained(around):
        setup = Setup(dtype=torch.float32)
        opt = setup.start(schedule=schedule)

        def closure(task, n):
            with torch.autocast("cpu", torch.bfloat16):
                return setup.closure(n)(task)

        with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
            for n in range(3):
                opt.step(setup.closure(n) if around else partial(closure, n=n))
        return setup.state()

    assert_equal(trained(around=True), trained(around=False))
