"""Every method in the training loop: against its formula on gradients from torch.autograd.grad."""

from collections.abc import Callable

import pytest
import torch
from networks import (
    AB,
    BOTH_PHASES,
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
    sgd_of,
    started_problem,
    step_by_hand,
)
from torch import Tensor, nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

METHODS: dict[str, Callable[..., cs.Method]] = {
    "PCGrad": cs.PCGrad,
    "CAGrad": cs.CAGrad,
    "MGDA": cs.MGDA,
    "MGDA-l2": lambda **options: cs.MGDA("l2", **options),
    "MGDA-loss": lambda **options: cs.MGDA("loss", **options),
    "MGDA-loss+": lambda **options: cs.MGDA("loss+", **options),
    "AlignedMTL": cs.AlignedMTL,
    "NashMTL": lambda **options: cs.NashMTL(update_every=2, **options),
    "IMTLG": cs.IMTLG,
    "UPGrad": cs.UPGrad,
    "FairGrad": lambda **options: cs.FairGrad(2.0, **options),
    "ConFIG": cs.ConFIG,
    "NTKMTL": cs.NTKMTL,
    "DBMTL": cs.DBMTL,
    "GradVac": lambda **options: cs.GradVac(beta=0.3, **options),
}
EVERY = {**METHODS, "GradDrop": lambda: cs.GradDrop(0.1, seed=4), "Sum": cs.Sum}


class Plain:
    """A trunk without normalization, heads and data: one forward pass serves all tasks."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in TASKS}).double()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        self.x = torch.randn(7, 5).double()
        self.targets = torch.randn(3, 7, 1).double() * torch.tensor([1, 5, 0.2]).view(3, 1, 1)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.heads.parameters()]

    def loss(self, task: str, features: Tensor | None = None) -> Tensor:
        y = self.heads[task](self.trunk(self.x) if features is None else features)
        return (y - self.targets[TASKS.index(task)]).square().mean()

    def losses(self) -> dict[str, Tensor]:
        features = self.trunk(self.x)
        return {task: self.loss(task, features) for task in TASKS}

    def shared_rows(self) -> Tensor:
        return gradient_rows([*self.trunk.parameters()], self.losses().values())

    def optimizer_of(self, method: cs.Method, **options: object) -> cs.MultiTaskOptimizer:
        return cs.MultiTaskOptimizer(self.trunk, self.optimizer, TASKS, method, **options)

    def shared_update(self) -> Tensor:
        return flat_grad(self.trunk)

    def state(self) -> list[Tensor]:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return [t.detach().clone() for t in [*self.parameters(), *grads]]


@pytest.mark.parametrize("name", METHODS)
def test_update_is_the_weighted_sum(backend: str, name: str) -> None:
    """Three steps; the weights from the Gramian of gradients that autograd gives without us."""
    setup = Plain()
    opt = setup.optimizer_of(METHODS[name]())
    other = METHODS[name]()
    for number in range(3):
        rows = setup.shared_rows()
        gramian = rows @ rows.T
        of_tasks = {task: setup.loss(task).detach() for task in TASKS}
        losses = torch.stack([*of_tasks.values()])
        divisors = {"MGDA-loss": losses, "MGDA-loss+": losses * gramian.diagonal().sqrt()}
        if name in divisors:
            weights = cs.MGDA().weights(gramian / divisors[name] / divisors[name].unsqueeze(1))
        else:
            step = cs.Step(number, tuple(TASKS), weighted_losses=of_tasks)
            weights = other.weights(gramian, step)
        opt.step(setup.loss)
        torch.testing.assert_close(setup.shared_update(), weights @ rows, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_layer_by_layer(backend: str, name: str) -> None:
    """The parameters of each module have weights of their own."""
    setup = Plain()
    rows = setup.shared_rows()
    setup.optimizer_of(METHODS[name](groups="layer")).step(setup.loss)
    update = setup.shared_update()
    layers = [slice(0, 48), slice(48, len(update))]
    gramians = torch.stack([rows[:, layer] @ rows[:, layer].T for layer in layers])
    losses = {task: loss.detach() for task, loss in Plain().losses().items()}
    step = cs.Step(tasks=tuple(TASKS), losses=losses, weighted_losses=losses)
    of_layers = METHODS[name](groups="layer").weights(gramians, step)
    for layer, weights in zip(layers, of_layers, strict=True):
        torch.testing.assert_close(update[layer], weights @ rows[:, layer], rtol=1e-9, atol=1e-12)


def test_graddrop_in_the_loop(backend: str) -> None:
    setup = Plain()
    rows = setup.shared_rows()
    setup.optimizer_of(cs.GradDrop([0.0, 0.5, 1.0], seed=3)).step(setup.loss)
    sizes = [p.numel() for p in setup.trunk.parameters()]
    updates = [torch.empty(n, dtype=torch.float64) for n in sizes]
    grads = [row for pieces in zip(*(r.split(sizes) for r in rows), strict=True) for row in pieces]
    torch.ops.cs_kernels.drop_signs_(updates, grads, [0.0, 0.5, 1.0], 3, 0, 3)
    torch.testing.assert_close(setup.shared_update(), torch.cat(updates))


@pytest.mark.parametrize("name", EVERY)
def test_one_forward_pass_for_all_tasks(name: str) -> None:
    """`backward` gives the gradients of `step`: the trunk's and each head's own."""
    first, second = Plain(), Plain()
    one, other = first.optimizer_of(EVERY[name]()), second.optimizer_of(EVERY[name]())
    for _ in range(3):
        losses = one.backward(first.losses())
        first.optimizer.step()
        expected = other.step(second.loss)
        assert list(losses) == TASKS
        for task in TASKS:
            torch.testing.assert_close(losses[task], expected[task])
            assert not losses[task].requires_grad
        torch.testing.assert_close(first.state(), second.state(), rtol=1e-9, atol=1e-12)


def test_backward_frees_the_graph() -> None:
    setup = Plain()
    losses = setup.losses()
    setup.optimizer_of(cs.PCGrad()).backward(losses)
    with pytest.raises(RuntimeError, match="second time"):
        losses["depth"].backward()


def test_backward_of_some_tasks() -> None:
    """Heads of the others keep no gradient; the weights are those of the tasks that take part."""
    setup = Plain()
    rows = setup.shared_rows()[[0, 2]]
    opt = setup.optimizer_of(cs.MGDA())
    losses = setup.losses()
    opt.backward({task: losses[task] for task in ("edges", "depth")})
    weights = cs.MGDA().weights(rows @ rows.T)
    torch.testing.assert_close(setup.shared_update(), weights @ rows)
    assert setup.heads["normals"].weight.grad is None
    assert setup.heads["edges"].weight.grad is not None


@pytest.mark.parametrize("name", EVERY)
def test_partial_labels(name: str) -> None:
    """A step of two tasks is that of an optimizer of these two tasks."""
    first, second = Plain(), Plain()
    method = cs.GradDrop(0.1, seed=4) if name == "GradDrop" else EVERY[name]()
    some = ["depth", "edges"]
    first.optimizer_of(method).step(first.loss, tasks=some)
    opt = cs.MultiTaskOptimizer(second.trunk, second.optimizer, some, EVERY[name]())
    opt.step(second.loss)
    assert_equal(first.state(), second.state())


@pytest.mark.parametrize("name", METHODS)
def test_loss_scaling_changes_nothing(name: str) -> None:
    """A GradScaler's factor is a power of two: the same step to rounding, Nash-MTL's too."""
    first, second = Plain(), Plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    one = first.optimizer_of(METHODS[name](), scaler=scaler)
    other = second.optimizer_of(METHODS[name]())
    for _ in range(2):
        one.step(first.loss)
        other.step(second.loss)
    torch.testing.assert_close(first.parameters(), second.parameters(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_not_finite_gradients_reach_the_update(name: str) -> None:
    setup = Plain()
    opt = setup.optimizer_of(EVERY[name]())
    losses = setup.losses()
    opt.backward({**losses, "depth": losses["depth"] * torch.nan})
    assert setup.shared_update().isnan().all()


@pytest.mark.parametrize(
    "schedule", [cs.Joint(), cs.Sequential(), cs.Mixed(4, seed=3, draw="step")], ids=repr
)
@pytest.mark.parametrize("name", EVERY)
def test_resumed_run_is_bit_equal(name: str, schedule: cs.Schedule) -> None:
    """Also with task-specific normalization, in the middle of an epoch, with a weighting."""

    def start() -> tuple[Setup, cs.MultiTaskOptimizer]:
        setup = Setup()
        return setup, setup.start(EVERY[name](), schedule, weighting=cs.DynamicWeightAverage())

    def train(setup: Setup, opt: cs.MultiTaskOptimizer, steps: range) -> None:
        for step in steps:
            opt.start_epoch(step // 2)
            opt.step(setup.closure(step % 3))

    setup, opt = start()
    train(setup, opt, range(5))
    state = saved(setup, opt)
    train(setup, opt, range(5, 7))
    resumed, again = start()
    restore(state, resumed, again)
    train(resumed, again, range(5, 7))
    assert_equal(setup.state(), resumed.state())


@pytest.mark.parametrize("name", EVERY)
def test_converges(name: str) -> None:
    """Losses fall: every method is a descent, GradDrop in the mean."""
    setup = Plain()
    opt = setup.optimizer_of(EVERY[name]())
    before = sum(loss.item() for loss in setup.losses().values())
    for _ in range(150):
        opt.step(setup.loss)
    assert sum(loss.item() for loss in setup.losses().values()) < 0.9 * before


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        (lambda loss: {}, ValueError, "tasks must"),
        (lambda loss: {"flow": loss}, ValueError, "tasks must be among .*got 'flow'"),
        (lambda loss: {"depth": loss.expand(2)}, ValueError, "losses must hold a real scalar"),
        (lambda loss: {"depth": loss.detach()}, ValueError, "losses must hold a loss with a graph"),
        (lambda loss: {"depth": 1.0}, TypeError, "losses must hold a tensor, got float"),
    ],
)
def test_bad_losses(
    losses: Callable[[Tensor], dict[str, object]], error: type[Exception], message: str
) -> None:
    setup = Plain()
    opt = setup.optimizer_of(cs.PCGrad())
    setup.loss("depth").backward()
    counters = opt.state_dict()
    with refused(setup.state, error, message):
        opt.backward(losses(setup.loss("depth")))
    assert counters == opt.state_dict()


def test_backward_needs_a_joint_update() -> None:
    setup = Plain()
    with pytest.raises(RuntimeError, match=r"Sequential\(\) is in Phase 1"):
        setup.optimizer_of(cs.PCGrad(), schedule=cs.Sequential()).backward(setup.losses())


def test_a_method_of_ones_own(backend: str) -> None:
    """One function from the Gramian to the weights."""

    class Shortest(cs.GramianMethod):
        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            assert step is not None
            assert step.tasks == tuple(TASKS)
            return (gramian.diagonal() == gramian.diagonal().min()).float()

    setup = Plain()
    rows = setup.shared_rows()
    setup.optimizer_of(Shortest()).step(setup.loss)
    torch.testing.assert_close(setup.shared_update(), rows[rows.norm(dim=1).argmin()])
    assert repr(Shortest()) == "Shortest()"


def test_nash_mtl_of_other_tasks_in_the_loop() -> None:
    """The steps have two tasks each, not the same two."""
    tasks = ["a", "b", "c"]
    model, loss, opt = started_problem(cs.NashMTL(update_every=5), tasks=tasks)
    opt.step(loss, tasks=["a", "b"])
    shared = [*model.trunk.parameters()]
    expected = step_by_hand(cs.NashMTL(), shared, {task: loss(task) for task in "bc"})
    opt.step(loss, tasks=["b", "c"])
    for p, update in zip(shared, expected, strict=True):
        torch.testing.assert_close(p.grad.flatten(), update, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("normalize", ["loss", "loss+"])
def test_mgda_with_a_negative_loss(normalize: str) -> None:
    """Its sign does not flip the gradient: the weights are those of |loss|."""
    model, loss, opt = started_problem(cs.MGDA(normalize))

    def shifted(task: str) -> Tensor:
        return loss(task) - (50.0 if task == "b" else 0.0)

    assert shifted("b") < 0 < shifted("a")
    losses = [shifted(task) for task in AB]
    rows = gradient_rows([*model.trunk.parameters()], losses)
    scaled = rows / torch.stack(losses).detach().abs().unsqueeze(1)
    if normalize == "loss+":
        scaled = scaled / rows.norm(dim=1, keepdim=True)
    weights = cs.MGDA().weights(scaled @ scaled.T)
    assert weights.min() > 0
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
def test_one_object_for_a_step(schedule: cs.Schedule) -> None:
    """Weightings and methods get the same one; its facts are those of the step."""
    seen: dict[str, list[cs.Step]] = {"weigh": [], "weights": [], "observe": []}

    class Watching(cs.Weighting):
        def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
            seen["weigh"].append(step)
            return 2 * loss

        def observe(self, step: cs.Step) -> None:
            seen["observe"].append(step)

    class Mean(cs.GramianMethod):
        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            assert step is not None
            seen["weights"].append(step)
            return torch.full_like(gramian[..., 0], 1 / gramian.shape[-1])

    _, loss, opt = started_problem(Mean(), schedule, Watching())
    for number in range(2):
        for steps in seen.values():
            steps.clear()
        losses = opt.step(loss, tasks=["b", "a"])
        steps = {id(step) for steps in seen.values() for step in steps}
        assert len(steps) == 1
        (step,) = seen["observe"]
        assert (step.number, step.tasks) == (number, ("a", "b"))
        assert step.losses == losses
        assert step.weighted_losses == {task: 2 * value for task, value in losses.items()}
        assert len(seen["weights"]) == (0 if isinstance(schedule, cs.Sequential) else 1)
        assert list(losses) == ["b", "a"]


def test_a_method_without_a_step_is_refused() -> None:
    class Old(cs.GramianMethod):
        def weights(self, gramian: Tensor) -> Tensor:  # type: ignore[override]
            return gramian[0]

    with pytest.raises(TypeError, match=r"weights\(gramian, step\), got Old\.weights"):
        started_problem(Old())


def test_methods_that_break_their_word() -> None:
    class Nothing(cs.Method):
        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            pass

    class Writes(cs.Method):
        def combine(self, gradients: cs.TaskGradients, layout: cs.Layout, step: cs.Step) -> None:
            for i in gradients.reached():
                gradients.parameters[i].grad = sum(g for g in gradients.of([i]) if g is not None)

    class Listed(cs.GramianMethod):
        def __init__(self) -> None:  # Without super().__init__().
            pass

        def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
            return [1.0, 1.0]  # type: ignore[return-value]

    class Detached(cs.Weighting):
        def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
            return loss.detach()

    model, loss, *_ = problem()
    for method, weighting, error, message in (
        (Nothing(), None, RuntimeError, r"method must assign the updates.*Nothing\(\)"),
        (Listed(), None, TypeError, r"weights as a tensor, got \[1.0, 1.0\] by Listed"),
        (cs.PCGrad(), Detached(), ValueError, "weighting must weigh a loss to one with a graph"),
    ):
        opt = optimizer_of(model, method, weighting=weighting)
        with pytest.raises(error, match=message):
            opt.step(loss)
    # Without `assign`, no row stays for the next step.
    opt = optimizer_of(model, Writes(), lr=0.0)
    updates = []
    for _ in range(2):
        opt.step(loss)
        updates.append(flat_grad(model.trunk))
    assert torch.equal(*updates)


def test_a_sum_of_separate_gradients() -> None:
    """It trains as the sum does, and its reports have cosines."""
    states, reports = [], []
    for separate in (False, True):
        setup = Setup()
        opt = setup.start(cs.Sum(separate))
        for number in range(5):
            opt.step(setup.closure(number))
        states.append(setup.state())
        reports.append(opt.report())
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-12)
    assert reports[0].cosines is None
    assert reports[1].cosines.shape == (3, 3)
    assert reports[1].task_weights.tolist() == [1, 1, 1]
    assert reports[1].method == "Sum(separate=True)"


def test_sum_is_as_it_was() -> None:
    many = [f"t{n}" for n in range(65)]
    trunk = nn.Linear(2, 2)
    cs.MultiTaskOptimizer(trunk, sgd_of(trunk), many, cs.Sum())
    with pytest.raises(ValueError, match=r"at most 64 for Sum\(separate=True\), got 65"):
        cs.MultiTaskOptimizer(trunk, sgd_of(trunk), many, cs.Sum(separate=True))
    assert repr(cs.Sum()) == "Sum()"
    assert (cs.Sum.separate_gradients, cs.Sum().has_gramian) == (False, False)
    names = {type(m).__name__ for m in (cs.Sum(), cs.Sum(separate=True))}
    assert names == {"Sum"}
    assert not issubclass(cs.Sum, cs.GramianMethod)
