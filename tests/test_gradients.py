"""`cs_kernels/gradients.py`: tasks' own parameters; the memory of gradients and updates."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

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
OWN_OF_B = {name: task for name, task in OWN.items() if task == "b"}
WAYS = {
    "step": lambda opt, loss, tasks: opt.step(loss, tasks=tasks),
    "backward": lambda opt, loss, tasks: opt.backward({task: loss(task) for task in tasks}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", GRAMIAN_METHODS, ids=repr)
def test_a_head_in_the_trunk_gets_its_own_gradient(
    backend: str, method: cs.GramianMethod, way: str
) -> None:
    """Heads' gradients get no task weight, and the Gramian covers only shared parameters."""
    model, loss, opt = started_problem(copy.deepcopy(method))
    losses = {task: loss(task) for task in AB}
    expected = step_by_hand(copy.deepcopy(method), [*model.trunk.parameters()], losses)
    heads = [torch.autograd.grad(losses[t], [*model.heads[t].parameters()]) for t in AB]
    WAYS[way](opt, loss, AB)
    found = [p.grad.flatten() for p in model.trunk.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for task, grads in zip(AB, heads, strict=True):
        assert all(map(torch.equal, (p.grad for p in model.heads[task].parameters()), grads))
    assert opt.coverage().own == OWN
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (cs.Sum, [(AB, False, OWN)]),
        # A step with one task does not show what the other tasks reach.
        (cs.PCGrad, [(["a"], False, {}), (["b"], False, OWN)]),
        # A parameter that a second task reaches later is shared.
        (cs.NashMTL, [(AB, False, OWN), (AB, True, OWN_OF_B)]),
    ],
)
def test_owners_of_parameters(
    method: type[cs.Method], steps: list[tuple[list[str], bool, dict[str, str]]], way: str
) -> None:
    """Owners appear in the coverage and in checkpoints."""
    model, loss, opt = started_problem(method())
    for tasks, crosses, own in steps:
        WAYS[way](
            opt, lambda t, c=crosses: loss(t) + (0.1 * loss("a") if c and t == "b" else 0), tasks
        )
        opt.optimizer.zero_grad()
        assert opt.coverage().own == own
        assert all(name in str(opt.coverage()) for name in own)
    assert "the gradient of 'b': no other task reaches it" in str(opt.coverage())
    again = optimizer_of(copy.deepcopy(model), method())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again.state_dict()["reach"] == opt.state_dict()["reach"] != ({},)


@BOTH_PHASES
@pytest.mark.parametrize("some", [False, True])
def test_a_trunk_that_is_unfrozen_later_is_shared(schedule: cs.Schedule, some: bool) -> None:
    """A pass while a parameter is frozen does not show whether the task reaches it."""
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
    """A layer that one task uses is that task's own; an unused layer gets no gradient."""
    layers = {name: nn.Linear(n, 4) for name, n in (("common", 3), ("some", 4), ("unused", 4))}
    norms = {name: nn.BatchNorm1d(4) for name in ("norm", "some_norm")}

    def run(trunk: Composed, x: Tensor, deep: bool) -> Tensor:
        x = trunk.norm(trunk.common(x))
        return trunk.some_norm(trunk.some(x)) if deep else x

    trunk = cs.nn.convert_task_batchnorm(Composed(run, **layers, **norms), AB)
    opt, x = optimizer_of(trunk), torch.randn(16, 3)
    opt.step(lambda task: trunk(x, deep=task == "b").square().mean() + 0 * x.sum())
    assert trunk.unused.weight.grad is None
    assert trunk.some.weight.grad is not None
    assert set(opt.coverage().prioritized) == {"common.weight"}
    assert opt.coverage().own == {"some.weight": "b", "some.bias": "b"}


def _cast_in_between(setup: Setup) -> None:
    """Casting a module casts `.grad`, the buffer of the next update, in place."""
    setup.trunk.double()
    setup.optimizer.zero_grad()
    setup.trunk.float()


CASTS: list[Callable[[Setup], object]] = [
    _cast_in_between,
    lambda setup: setup.trunk.to(memory_format=torch.channels_last),
    lambda setup: (setup.trunk.double(), setup.heads.double()),
    lambda setup: (setup.trunk.bfloat16(), setup.heads.bfloat16()),
]


@pytest.mark.parametrize("method", [cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr)
def test_moved_between_steps(backend: str, method: cs.Method) -> None:
    """The update has the parameter's current dtype and memory format."""
    setup = Setup(dtype=torch.float32, optimizer=torch.optim.SGD)
    opt, weight = setup.start(method), setup.trunk.stem.weight
    opt.step(setup.closure(0))
    for cast in CASTS:
        cast(setup)
        setup.batches = [tuple(t.to(weight.dtype) for t in batch) for batch in setup.batches]
        before = weight.detach().clone()
        opt.step(setup.closure(1))
        assert weight.grad.dtype is weight.dtype
        assert weight.grad.stride() == weight.stride()
        assert not torch.equal(weight, before)


@pytest.mark.parametrize("schedule", [cs.Joint(), cs.Mixed(9)], ids=repr)
def test_there_is_no_memory_beside_the_gradients(schedule: cs.Schedule) -> None:
    """A method gets autograd's own tensors; the update replaces the first task's gradients."""
    seen: list[int] = []

    class Seeing(cs.PCGrad):
        def combine(self, gradients: cs.TaskGradients, *others: Any) -> None:
            seen.extend(g.data_ptr() for g in gradients.of(gradients.reached()))
            super().combine(gradients, *others)

    model, loss, opt = started_problem(Seeing(), schedule)
    opt.start_epoch(9)
    made: list[int] = []
    for p in model.trunk.parameters():
        p.register_post_accumulate_grad_hook(lambda p: made.append(p.grad.data_ptr()))
    for _ in range(2):
        seen.clear(), made.clear()
        opt.step(loss)
        assert sorted(seen) == sorted(made)
        assert {p.grad.data_ptr() for p in model.trunk.parameters()} <= {*made}


@pytest.mark.parametrize("detached", [False, True])
def test_a_gradient_in_a_shared_bucket_is_copied(detached: bool) -> None:
    """The gradient is a view of a buffer that each pass overwrites, as in DDP."""
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
def test_no_gradient_stays_during_a_forward_pass(method: cs.Method, schedule: cs.Schedule) -> None:
    """Phase 1 frees the previous task's gradients; the plain sum frees the previous step's."""
    setup, opt = started(method, schedule)
    last: list[weakref.ref[Tensor]] = []
    alive = []

    def loss(task: str) -> Tensor:
        gc.collect()
        alive.extend(ref() is not None for ref in last)
        last.clear()
        return setup.closure(0)(task)

    setup.optimizer.register_step_pre_hook(
        lambda *_: last.append(weakref.ref(setup.trunk.stem.weight.grad))
    )
    for _ in range(2):
        opt.step(loss)
    assert alive
    assert not any(alive)
