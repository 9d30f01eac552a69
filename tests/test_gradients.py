"""Whose gradient is whose, and where gradients and the update live: `cs_kernels/gradients.py`."""

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    GRAMIAN_METHODS,
    TASKS,
    Composed,
    Setup,
    assert_same_gradients,
    optimizer_of,
    started,
    started_problem,
    step_by_hand,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

OWN = {f"heads.{task}.{name}": task for task in AB for name in ("weight", "bias")}
WAYS = pytest.mark.parametrize("way", ["step", "backward"])


def _update(opt: cs.MultiTaskOptimizer, loss: Callable[[str], Tensor], way: str) -> None:
    if way == "step":
        opt.step(loss)
    else:
        opt.backward({task: loss(task) for task in AB})


@pytest.mark.parametrize("method", GRAMIAN_METHODS, ids=repr)
@WAYS
def test_a_head_in_the_trunk_gets_its_own_gradient(
    backend: str, method: cs.GramianMethod, way: str
) -> None:
    """It gets no weight, and the Gramian is that of the trunk alone."""
    model, loss, opt = started_problem(copy.deepcopy(method))
    losses = {task: loss(task) for task in AB}
    expected = step_by_hand(copy.deepcopy(method), [*model.trunk.parameters()], losses)
    heads = {
        task: torch.autograd.grad(losses[task], [*model.heads[task].parameters()]) for task in AB
    }
    _update(opt, loss, way)
    for p, update in zip(model.trunk.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.flatten(), update, rtol=1e-9, atol=1e-12)
    for task in AB:
        for p, grad in zip(model.heads[task].parameters(), heads[task], strict=True):
            assert torch.equal(p.grad, grad)
    assert opt.coverage().own == OWN
    assert model.unused.weight.grad is None


@WAYS
def test_own_parameters_of_the_plain_sum(way: str) -> None:
    _, loss, opt = started_problem(cs.Sum())
    _update(opt, loss, way)
    assert opt.coverage().own == OWN


def test_own_parameters_in_the_report_and_in_a_checkpoint() -> None:
    model, loss, opt = started_problem(cs.NashMTL())
    opt.trace(loss)
    assert opt.coverage().own == OWN
    assert "heads.a.weight" in str(opt.coverage())
    assert "the gradient of 'a': no other task reaches it" in str(opt.coverage())
    opt.step(loss)
    # A resumed run knows it before its first pass, even one of a single task.
    again = optimizer_of(copy.deepcopy(model), cs.NashMTL())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again._engine.trunk.reach.owners() == opt._engine.trunk.reach.owners() != {}


def test_a_parameter_that_a_second_task_reaches_later_is_shared() -> None:
    _, loss, opt = started_problem(cs.NashMTL())
    opt.step(loss)
    assert "heads.a.weight" in opt.coverage().own

    def crossed(task: str) -> Tensor:
        return loss(task) + (0.1 * loss("a") if task == "b" else 0)

    opt.step(crossed)
    assert set(opt.coverage().own) == {"heads.b.weight", "heads.b.bias"}


def test_with_one_task_so_far_everything_is_shared() -> None:
    """A batch of one task says nothing about what the others reach."""
    _, loss, opt = started_problem(cs.PCGrad())
    opt.step(loss, tasks=["a"])
    assert opt.coverage().own == {}
    opt.step(loss, tasks=["b"])
    assert opt.coverage().own == OWN


@BOTH_PHASES
@pytest.mark.parametrize("some", [False, True])
def test_a_trunk_that_is_unfrozen_later_is_shared(schedule: cs.Schedule, some: bool) -> None:
    """A task with passes while a parameter was frozen has not said whether it reaches it."""
    setup, opt = started(schedule=schedule)
    setup.trunk.requires_grad_(False)
    setup.trunk.stem.bias.requires_grad_(some)
    setup.trunk.stem_norm.requires_grad_(True)
    opt.step(setup.closure(0))
    state = opt.state_dict()
    setup.trunk.requires_grad_(True)
    again = setup.start(schedule=schedule)
    again.load_state_dict(state)
    for one in (opt, again):
        for tasks in (TASKS[:1], TASKS):
            one.step(setup.closure(1), tasks=tasks)
            assert one.coverage().own == {}
        assert "stem.weight" in one.coverage().prioritized


def test_a_parameter_that_one_task_never_uses(backend: str) -> None:
    """Its gradient counts as zero for that task; one that nobody uses keeps None."""
    layers = {name: nn.Linear(n, 4) for name, n in (("common", 3), ("some", 4), ("unused", 4))}
    norms = {name: nn.BatchNorm1d(4) for name in ("norm", "some_norm")}

    def run(trunk: Composed, x: Tensor, deep: bool) -> Tensor:
        x = trunk.norm(trunk.common(x))
        return trunk.some_norm(trunk.some(x)) if deep else x

    trunk = cs.nn.convert_task_batchnorm(Composed(run, **layers, **norms), AB)
    opt = optimizer_of(trunk)
    x = torch.randn(16, 3)
    opt.step(lambda task: trunk(x, deep=task == "b").square().mean() + 0 * x.sum())
    assert trunk.unused.weight.grad is None
    assert trunk.some.weight.grad is not None
    assert set(opt.coverage().prioritized) == {"common.weight"}
    assert opt.coverage().own == {"some.weight": "b", "some.bias": "b"}


def test_moved_to_another_dtype_between_steps(backend: str) -> None:
    setup = Setup(dtype=torch.float64, optimizer=torch.optim.SGD)
    opt = setup.start()
    opt.step(setup.closure(0))
    for dtype in (torch.float32, torch.bfloat16):
        setup.trunk.to(dtype)
        setup.heads.to(dtype)
        setup.batches = [(x.to(dtype), y.to(dtype)) for x, y in setup.batches]
        before = setup.trunk.stem.weight.detach().clone()
        opt.step(setup.closure(1))
        assert setup.trunk.stem.weight.grad.dtype is dtype
        assert not torch.equal(setup.trunk.stem.weight, before)


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_the_update_is_cast_as_grad_between_steps(backend: str, method: cs.Method) -> None:
    """Casting a module casts `.grad` in place, which is the buffer of the next update."""
    setup = Setup(dtype=torch.float32, optimizer=torch.optim.SGD)
    opt = setup.start(method)
    opt.step(setup.closure(0))
    setup.trunk.double()
    setup.optimizer.zero_grad()
    setup.trunk.float()
    weight = setup.trunk.stem.weight
    for memory in (torch.channels_last, torch.contiguous_format):
        opt.step(setup.closure(1))
        assert weight.grad.dtype is torch.float32
        assert weight.grad.stride() == weight.stride()
        setup.trunk.to(memory_format=memory)


def test_memory_beside_the_gradients_is_one_update() -> None:
    """The buffers of the update are those of the step before."""
    setup, opt = started()
    opt.step(setup.closure(0))
    shared = [p for n, p in setup.trunk.named_parameters() if "norm" not in n and ".1." not in n]
    before = [p.grad.data_ptr() for p in shared]
    opt.step(setup.closure(1))
    assert before == [p.grad.data_ptr() for p in shared]


@pytest.mark.parametrize("detached", [False, True])
def test_a_gradient_in_somebodys_bucket_is_copied(detached: bool) -> None:
    """Views of one buffer that every backward pass writes again, as DistributedDataParallel's."""
    (model, loss, opt), (twin, other, straight) = (started_problem(cs.PCGrad()) for _ in range(2))
    shared = [*model.trunk.parameters()]
    sizes = [p.numel() for p in shared]
    views = torch.zeros(sum(sizes), dtype=torch.float64).split(sizes)
    places = {p: view.view_as(p) for p, view in zip(shared, views, strict=True)}

    def into_bucket(p: nn.Parameter) -> None:
        p.grad = places[p].copy_(p.grad).detach() if detached else places[p].copy_(p.grad)

    for p in shared:
        p.register_post_accumulate_grad_hook(into_bucket)
    opt.step(loss)
    straight.step(other)
    assert_same_gradients(model.trunk, twin.trunk)


@pytest.mark.parametrize(
    ("method", "schedule"), [(cs.Sum(), cs.Joint()), (cs.PCGrad(), cs.Sequential())], ids=str
)
def test_no_gradient_is_held_during_a_forward_pass(
    method: cs.Method, schedule: cs.Schedule
) -> None:
    """Phase 1 frees the last task's gradients, the plain sum those of the last step."""
    setup, opt = started(method, schedule)
    last: list[weakref.ref[Tensor]] = []
    seen = []

    def loss(task: str) -> Tensor:
        gc.collect()
        seen.extend(ref() for ref in last)
        last.clear()
        return setup.closure(0)(task)

    setup.optimizer.register_step_pre_hook(
        lambda *_: last.append(weakref.ref(setup.trunk.stem.weight.grad))
    )
    for _ in range(2):
        opt.step(loss)
    assert seen
    assert all(grad is None for grad in seen)


PEAK = """
import resource, sys, torch
import cs_kernels as cs
torch.set_num_threads(2)
tasks = [str(i) for i in range(4)]
trunk = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)])
heads = torch.nn.ModuleDict({t: torch.nn.Linear(1024, 1) for t in tasks})
sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=1e-9)
def losses():
    y = trunk(torch.ones(2, 1024))
    return {t: heads[t](y).sum() for t in tasks}
sum(losses().values()).backward()  # whatever torch needs for its first pass
sgd.zero_grad()
small = torch.nn.Linear(8, 8)
warm = cs.MultiTaskOptimizer(small, torch.optim.SGD(small.parameters(), 0.1), tasks, cs.PCGrad())
warm.backward({t: small(torch.ones(8)).sum() for t in tasks})
opt = cs.MultiTaskOptimizer(trunk, sgd, tasks, eval("cs." + sys.argv[1])())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(3):
    opt.backward(losses())
    sgd.step()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (8 * 1024 * 1024 * 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "copies"),
    [("PCGrad", 5), ("Sum", 1), pytest.param("GradDrop", 5, marks=pytest.mark.full)],
)
def test_peak_memory(method: str, copies: int) -> None:
    """K gradients and one update, of 32 MB each; the plain sum needs the one.

    The first pass of the script has left room for one.
    """
    command = [sys.executable, "-c", PEAK, method]
    peak = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout
    assert float(peak) < copies + 0.4
