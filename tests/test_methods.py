"""Every method in the training loop, against its formula on torch.autograd.grad's results."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
    GRAMIAN_METHODS,
    TASKS,
    Setup,
    assert_equal,
    flat_grad,
    gradient_rows,
    optimizer_of,
    problem,
    refused,
    restore,
    saved,
    started_problem,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

METHODS: dict[str, Callable[..., cs.Method]] = {
    **{kind.__name__: kind for kind in (cs.PCGrad, cs.CAGrad, cs.MGDA, cs.AlignedMTL, cs.NashMTL)},
    **{kind.__name__: kind for kind in (cs.IMTLG, cs.UPGrad, cs.ConFIG, cs.NTKMTL, cs.DBMTL)},
    "MGDA-l2": lambda **options: cs.MGDA("l2", **options),
    "MGDA-loss": lambda **options: cs.MGDA("loss", **options),
    "MGDA-loss+": lambda **options: cs.MGDA("loss+", **options),
    "FairGrad": lambda **options: cs.FairGrad(2.0, **options),
    "GradVac": lambda **options: cs.GradVac(beta=0.3, **options),
    "Protect": lambda **options: cs.Protect("depth", **options),
    "Clipped": lambda **options: cs.Clipped(cs.GradVac(beta=0.3, **options), 0.5),
}
EVERY = {
    **METHODS,
    "GradDrop": lambda: cs.GradDrop([0.1, 0.9, 0.2], seed=4),
    "Sum": cs.Sum,
    "SAGO": lambda: cs.SAGO("depth"),
}


class Plain:
    """Heads, data and a trunk without normalization, so one forward pass serves all tasks."""

    def __init__(self, method: cs.Method, tasks: list[str] = TASKS, **options: Any) -> None:
        self.model, self.loss, self.x, self.targets = problem(tasks=TASKS)
        self.trunk = self.model.trunk
        self.adam = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.opt = cs.MultiTaskOptimizer(self.trunk, self.adam, tasks, method, **options)

    def losses(self, tasks: Iterable[str] = TASKS) -> dict[str, Tensor]:
        z = self.trunk(self.x)
        return {t: (self.model.heads[t](z) - self.targets[t]).square().mean() for t in tasks}

    def rows(self) -> Tensor:
        return gradient_rows([*self.trunk.parameters()], self.losses().values())

    def state(self) -> list[Tensor]:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in [*self.model.parameters(), *grads]]


def _own(base: type, **functions: Callable[..., object]) -> Any:
    """A user's method or weighting."""
    return type("Own", (base,), functions)()


LAYERS = {"all": [slice(None)], "layer": [slice(0, 48), slice(48, None)]}


@pytest.mark.pairwise
@pytest.mark.parametrize("groups", LAYERS)
@pytest.mark.parametrize("name", METHODS)
def test_update_is_the_weighted_sum(backend: str, name: str, groups: str) -> None:
    """Three steps; expected weights come from Gramians of plain autograd's gradients.

    With groups="layer", each module has its own weights.
    """
    setup, other = Plain(METHODS[name](groups=groups)), METHODS[name](groups=groups)
    for number in range(3):
        losses = {task: loss.detach() for task, loss in setup.losses().items()}
        of_layers = [setup.rows()[:, layer] for layer in LAYERS[groups]]
        gramians = torch.stack([rows @ rows.T for rows in of_layers])
        step = cs.Step(number, tuple(TASKS), weighted_losses=losses)
        weights = other.weights(gramians if groups == "layer" else gramians[0], step).view(-1, 3)
        setup.opt.step(setup.loss)
        expected = [of_one @ rows for of_one, rows in zip(weights, of_layers, strict=True)]
        torch.testing.assert_close(
            flat_grad(setup.trunk), torch.cat(expected), rtol=1e-9, atol=1e-12
        )


def test_graddrop_in_the_loop(backend: str) -> None:
    """Each task has its own leak, and each step its own random numbers."""
    setup = Plain(cs.GradDrop([0.0, 0.5, 1.0], seed=3))
    sizes = [p.numel() for p in setup.trunk.parameters()]
    for number in range(2):
        columns = zip(*(row.split(sizes) for row in setup.rows()), strict=True)
        updates = [torch.empty(n, dtype=torch.float64) for n in sizes]
        grads = [piece for pieces in columns for piece in pieces]
        torch.ops.cs_kernels.drop_signs_(updates, grads, [0.0, 0.5, 1.0], 3, number, 3)
        setup.opt.step(setup.loss)
        torch.testing.assert_close(flat_grad(setup.trunk), torch.cat(updates))


@pytest.mark.parametrize("tasks", [TASKS, ["depth", "edges"]], ids=len)
@pytest.mark.parametrize("name", EVERY)
def test_one_forward_pass_for_some_tasks(name: str, tasks: list[str]) -> None:
    """`backward` with some tasks matches `step` of an optimizer with only these tasks."""
    leaks = {"depth": 0.1, "normals": 0.9, "edges": 0.2}
    method = cs.GradDrop([leaks[t] for t in tasks], seed=4) if name == "GradDrop" else EVERY[name]()
    first, second = Plain(EVERY[name]()), Plain(method, tasks)
    for _ in range(3):
        losses = first.opt.backward(first.losses(tasks))
        first.adam.step()
        expected = second.opt.step(second.loss)
        assert list(losses) == tasks
        torch.testing.assert_close(losses, expected)
        assert not any(loss.requires_grad for loss in losses.values())
        torch.testing.assert_close(first.state(), second.state(), rtol=1e-9, atol=1e-12)


def test_backward_frees_the_graph_of_a_joint_update() -> None:
    setup = Plain(cs.PCGrad(), schedule=cs.Switch(1))
    losses = setup.losses()
    setup.opt.start_epoch(0)
    with pytest.raises(RuntimeError, match=r"Switch\(epoch=1\) is in Phase 1"):
        setup.opt.backward(losses)
    setup.opt.start_epoch(1)
    setup.opt.backward(losses)
    with pytest.raises(RuntimeError, match="second time"):
        losses["depth"].backward()


@pytest.mark.parametrize("name", METHODS)
def test_loss_scaling_changes_nothing(name: str) -> None:
    """With a GradScaler's factor, every method makes the same step up to rounding."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    setups = Plain(METHODS[name](), scaler=scaler), Plain(METHODS[name]())
    for _ in range(2):
        for setup in setups:
            setup.opt.step(setup.loss)
    both = [[*setup.model.parameters()] for setup in setups]
    torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_non_finite_gradients_reach_the_update(name: str) -> None:
    setup = Plain(EVERY[name]())
    losses = setup.losses()
    setup.opt.backward({**losses, "depth": losses["depth"] * torch.nan})
    assert flat_grad(setup.trunk).isnan().all()


@pytest.mark.each
@pytest.mark.parametrize("schedule", [cs.Joint(), cs.Mixed(4, seed=3, draw="step")], ids=repr)
@pytest.mark.parametrize("name", EVERY)
def test_resumed_run_is_bit_equal(name: str, schedule: cs.Schedule) -> None:
    """Runs resume in the middle of an epoch, with task-specific normalization and a weighting."""

    def trained(start: int, stop: int, states: list[dict[str, Any]] | None = None) -> list[Any]:
        setup = Setup()
        opt = setup.start(EVERY[name](), schedule, weighting=cs.DynamicWeightAverage())
        if states is not None:
            restore(states, setup, opt)
        for step in range(start, stop):
            opt.start_epoch(step // 2)
            opt.step(setup.closure(step % 3))
        return [saved(setup, opt), setup.state()]

    resumed = trained(5, 7, trained(0, 5)[0])
    assert_equal(resumed[1], trained(0, 7)[1])


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        (lambda loss: {}, ValueError, "losses must hold the loss of at least one task"),
        (lambda loss: {"flow": loss}, ValueError, "tasks must be among .*got 'flow'"),
        (lambda loss: {"depth": loss.expand(2)}, ValueError, "must hold a floating-point scalar"),
        (lambda loss: {"depth": loss.detach()}, ValueError, "losses must hold a loss with a graph"),
        (lambda loss: {"depth": 1.0}, TypeError, "losses must hold a tensor, got float"),
    ],
)
def test_bad_losses(
    losses: Callable[[Tensor], dict[str, object]], error: type[Exception], message: str
) -> None:
    setup = Plain(cs.PCGrad())
    setup.loss("depth").backward()
    counters = setup.opt.state_dict()
    with refused(setup.state, error, message):
        setup.opt.backward(losses(setup.loss("depth")))
    assert counters == setup.opt.state_dict()


@pytest.mark.parametrize("normalize", ["loss", "loss+"])
def test_mgda_with_a_negative_loss(normalize: str) -> None:
    """A negative loss does not flip its gradient: |loss| determines the weights."""
    model, loss, opt = started_problem(cs.MGDA(normalize))

    def shifted(task: str) -> Tensor:
        return loss(task) - (50.0 if task == "b" else 0.0)

    losses = torch.stack([shifted(task) for task in AB])
    rows = gradient_rows([*model.trunk.parameters()], losses)
    scaled = rows / losses.detach().abs().unsqueeze(1)
    if normalize == "loss+":
        scaled = scaled / rows.norm(dim=1, keepdim=True)
    weights = cs.MGDA().weights(scaled @ scaled.T)
    assert losses[1] < 0 < weights.min()
    opt.step(shifted)
    torch.testing.assert_close(flat_grad(model.trunk), weights @ rows, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", [cs.MGDA("loss"), cs.Sum(), cs.PCGrad()], ids=repr)
def test_losses_of_one_element_are_scalars(method: cs.Method) -> None:
    _, loss, opt = started_problem(method, weighting=cs.DynamicWeightAverage())
    opt.start_epoch(0)

    def shaped(task: str) -> Tensor:
        return loss(task).reshape((1,) if task == "a" else ())

    of_step = opt.step([shaped, shaped])
    of_backward = opt.backward({task: shaped(task) for task in AB})
    assert all(value.shape == () for value in [*of_step.values(), *of_backward.values()])


@BOTH_PHASES
def test_one_step_object_per_step(schedule: cs.Schedule) -> None:
    """Weightings, methods and the report share the object."""
    seen: list[cs.Step] = []

    def weigh(self: cs.Weighting, task: str, loss: Tensor, step: cs.Step) -> Tensor:
        seen.append(step)
        return 2 * loss

    def weights(self: cs.Method, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        seen.append(step)
        return torch.full_like(gramian[..., 0], 1 / gramian.shape[-1])

    weighting = _own(cs.Weighting, weigh=weigh, observe=lambda self, step: seen.append(step))
    _, loss, opt = started_problem(_own(cs.GramianMethod, weights=weights), schedule, weighting)
    assert repr(opt.method) == "Own()"
    for number in range(2):
        seen.clear()
        losses, step = opt.step(loss, tasks=["b", "a"]), seen[0]
        assert all(other is step for other in seen)
        assert len(seen) == (3 if isinstance(schedule, cs.Sequential) else 4)
        assert (step.number, step.tasks) == (number, ("a", "b"))
        assert step.losses == losses
        assert opt.report().step == number
        assert step.weighted_losses == {task: 2 * value for task, value in losses.items()}
        assert list(losses) == ["b", "a"]


@pytest.mark.parametrize(
    ("method", "weighting", "error", "message"),
    [
        (
            _own(cs.GramianMethod, weights=lambda self, gramian: gramian[0]),
            *(None, TypeError, r"weights\(gramian, step\), got Own\.weights"),
        ),
        (
            _own(cs.Method, combine=lambda self, gradients, layout, step: None),
            *(None, RuntimeError, r"method must assign the updates.*Own\(\)"),
        ),
        (  # Even without super().__init__().
            _own(cs.GramianMethod, __init__=lambda self: None, weights=lambda *_: [1.0, 1.0]),
            *(None, TypeError, r"weights as a tensor, got \[1.0, 1.0\] from Own"),
        ),
        (
            cs.PCGrad(),
            _own(cs.Weighting, weigh=lambda self, task, loss, step: loss.detach()),
            *(ValueError, "weighting must return a weighted loss with a graph"),
        ),
    ],
)
def test_methods_with_mistakes(
    method: cs.Method, weighting: cs.Weighting | None, error: type[Exception], message: str
) -> None:
    model, loss, *_ = problem()
    with pytest.raises(error, match=message):
        optimizer_of(model, method, weighting=weighting).step(loss)


def test_a_method_that_writes_grad_itself() -> None:
    """Without `assign`, no row is kept for the next step."""

    def combine(self: cs.Method, gradients: cs.TaskGradients, *_: object) -> None:
        for i in gradients.reached():
            gradients.parameters[i].grad = sum(g for g in gradients.of([i]) if g is not None)

    model, loss, opt = started_problem(_own(cs.Method, combine=combine), lr=0.0)
    updates = []
    for _ in range(2):
        opt.step(loss)
        updates.append(flat_grad(model.trunk))
    assert torch.equal(*updates)


def test_a_sum_of_separate_gradients() -> None:
    """`Sum(separate=True)` trains like `Sum()`, reports cosines, and limits the number of tasks."""
    states, reports = [], []
    for separate in (False, True):
        setup = Setup()
        opt = setup.start(cs.Sum(separate))
        for number in range(3):
            opt.step(setup.closure(number))
        states.append(setup.state())
        reports.append(opt.report())
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-12)
    assert reports[0].cosines is None
    assert reports[1].cosines.shape == (3, 3)
    assert reports[1].task_weights.tolist() == [1, 1, 1]
    assert [report.method for report in reports] == ["Sum()", "Sum(separate=True)"]
    many = [f"t{n}" for n in range(65)]
    optimizer_of(nn.Linear(2, 2), cs.Sum(), tasks=many)
    with pytest.raises(ValueError, match=r"at most 64 tasks for Sum\(separate=True\), got 65"):
        optimizer_of(nn.Linear(2, 2), cs.Sum(separate=True), tasks=many)


def test_pcgrad_with_the_mean_of_three_gradients() -> None:
    assert cs.PCGrad("mean").weights(torch.eye(3)).tolist() == [1 / 3] * 3


NEED_NO_LOSSES = [method for method in GRAMIAN_METHODS if not isinstance(method, cs.DBMTL)]


@pytest.mark.parametrize("method", NEED_NO_LOSSES, ids=repr)
def test_weights_of_a_float32_gramian(method: cs.GramianMethod) -> None:
    gramian = torch.tensor([[1.0, -0.5], [-0.5, 2.0]])
    found = copy.deepcopy(method).weights(gramian)
    expected = copy.deepcopy(method).weights(gramian.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
