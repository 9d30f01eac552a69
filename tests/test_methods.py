"""Every method in the training loop: against its formula on gradients from torch.autograd.grad."""

import copy
from collections.abc import Callable

import pytest
import torch
from networks import AB, BOTH_PHASES, TASKS, Setup, assert_equal, problem, sgd_of, step_by_hand
from torch import Tensor, nn

import cs_kernels as cs

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
}
EVERY = {**METHODS, "GradDrop": lambda: cs.GradDrop(0.1, seed=4), "Sum": cs.Sum}


class Plain:
    """A trunk without normalization, heads and data: one forward pass serves all tasks."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)).to(dtype)
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in TASKS}).to(dtype)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        self.x = torch.randn(7, 5, dtype=dtype)
        self.targets = torch.randn(3, 7, 1, dtype=dtype) * torch.tensor([1, 5, 0.2]).view(3, 1, 1)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *self.heads.parameters()]

    def loss(self, task: str, features: Tensor | None = None) -> Tensor:
        y = self.heads[task](self.trunk(self.x) if features is None else features)
        return (y - self.targets[TASKS.index(task)]).square().mean()

    def losses(self) -> dict[str, Tensor]:
        features = self.trunk(self.x)
        return {task: self.loss(task, features) for task in TASKS}

    def shared_rows(self) -> Tensor:
        return torch.stack(
            [
                torch.cat(
                    [g.flatten() for g in torch.autograd.grad(loss, [*self.trunk.parameters()])]
                )
                for loss in (self.loss(task) for task in TASKS)
            ]
        )

    def optimizer_of(self, method: cs.Method, **options: object) -> cs.MultiTaskOptimizer:
        return cs.MultiTaskOptimizer(self.trunk, self.optimizer, TASKS, method, **options)

    def shared_update(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.trunk.parameters()])

    def state(self) -> list[Tensor]:
        tensors = [p.detach() for p in self.parameters()]
        tensors += [p.grad for p in self.parameters() if p.grad is not None]
        return [t.clone() for t in tensors]


@pytest.mark.parametrize("name", METHODS)
def test_update_is_the_weighted_sum(backend: str, name: str) -> None:
    """Three steps; the weights from the Gramian of gradients that autograd gives without us."""
    setup = Plain()
    opt = setup.optimizer_of(METHODS[name]())
    other = METHODS[name]()
    for number in range(3):
        rows = setup.shared_rows()
        gramian = rows @ rows.T
        losses = torch.stack([setup.loss(task).detach() for task in TASKS])
        divisors = {
            "MGDA-loss": losses,
            "MGDA-loss+": losses * gramian.diagonal().sqrt(),
        }
        if name in divisors:
            scaled = gramian / divisors[name] / divisors[name].unsqueeze(1)
            weights = cs.MGDA().weights(scaled)
        else:
            weights = other.weights(gramian, cs.Step(number, tuple(TASKS)))
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
    other = METHODS[name](groups="layer")
    step = cs.Step(tasks=tuple(TASKS))
    if name in ("MGDA-loss", "MGDA-loss+"):
        twin = Plain()
        losses = {task: twin.loss(task).detach() for task in TASKS}
        step = cs.Step(tasks=tuple(TASKS), losses=losses, weighted_losses=losses)
    for layer, weights in zip(layers, other.weights(gramians, step), strict=True):
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
        for a, b in zip(first.state(), second.state(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


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
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_not_finite_gradients_reach_the_update(name: str) -> None:
    setup = Plain()
    opt = setup.optimizer_of(EVERY[name]())
    opt.backward(
        {
            task: loss * (torch.nan if task == "depth" else 1)
            for task, loss in setup.losses().items()
        }
    )
    assert setup.shared_update().isnan().all()


@pytest.mark.parametrize(
    "schedule", [cs.Joint(), cs.Sequential(), cs.Mixed(4, seed=3, draw="step")], ids=repr
)
@pytest.mark.parametrize("name", EVERY)
def test_resumed_run_is_bit_equal(name: str, schedule: cs.Schedule) -> None:
    """Also with task-specific normalization, in the middle of an epoch, with a weighting."""

    def start() -> tuple[Setup, cs.MultiTaskOptimizer]:
        setup = Setup()
        opt = cs.MultiTaskOptimizer(
            setup.trunk,
            setup.optimizer,
            TASKS,
            EVERY[name](),
            schedule,
            cs.DynamicWeightAverage(),
        )
        return setup, opt

    setup, opt = start()
    for step in range(7):
        opt.start_epoch(step // 2)
        if step == 5:
            saved = copy.deepcopy(
                (setup.trunk.state_dict(), setup.heads.state_dict(), setup.optimizer.state_dict())
            )
            state = copy.deepcopy(opt.state_dict())
        opt.step(setup.closure(step % 3))
    resumed, again = start()
    resumed.trunk.load_state_dict(saved[0])
    resumed.heads.load_state_dict(saved[1])
    resumed.optimizer.load_state_dict(saved[2])
    again.load_state_dict(state)
    for step in range(5, 7):
        again.start_epoch(step // 2)
        again.step(resumed.closure(step % 3))
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
        (lambda s: {}, ValueError, "tasks must"),
        (lambda s: {"flow": s["depth"]}, ValueError, "tasks must be among .*got 'flow'"),
        (lambda s: {"depth": s["depth"].expand(2)}, ValueError, "losses must hold a real scalar"),
        (
            lambda s: {"depth": s["depth"].detach()},
            ValueError,
            "losses must hold a loss with a graph",
        ),
        (lambda s: {"depth": 1.0}, TypeError, "losses must hold a tensor, got float"),
    ],
)
def test_bad_losses(
    losses: Callable[[dict[str, Tensor]], dict[str, Tensor]], error: type[Exception], message: str
) -> None:
    setup = Plain()
    opt = setup.optimizer_of(cs.PCGrad())
    setup.loss("depth").backward()
    before, counters = setup.state(), opt.state_dict()
    with pytest.raises(error, match=message):
        opt.backward(losses(setup.losses()))
    assert_equal(before, setup.state())
    assert counters == opt.state_dict()


def test_backward_needs_a_joint_update() -> None:
    setup = Plain()
    with pytest.raises(RuntimeError, match=r"Sequential\(\) is in Phase 1"):
        setup.optimizer_of(cs.PCGrad(), schedule=cs.Sequential()).backward(setup.losses())
    other = Setup()
    opt = cs.MultiTaskOptimizer(other.trunk, other.optimizer, TASKS)
    with pytest.raises(ValueError, match=r"no task-specific normalization.*use step\(closure\)"):
        opt.backward(setup.losses())


def test_leaks_are_as_many_as_tasks() -> None:
    with pytest.raises(ValueError, match="leak must have 3 entries, one a task, got 2"):
        Plain().optimizer_of(cs.GradDrop([0.0, 1.0]))


def test_losses_are_needed() -> None:
    with pytest.raises(ValueError, match="step must have the losses for normalize='loss'"):
        cs.MGDA("loss").weights(torch.eye(2))


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
    model, loss, *_ = problem(tasks=tasks)
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), tasks, cs.NashMTL(update_every=5))
    opt.step(loss, tasks=["a", "b"])
    shared = [*model.trunk.parameters()]
    expected = step_by_hand(cs.NashMTL(), shared, {task: loss(task) for task in "bc"})
    opt.step(loss, tasks=["b", "c"])
    for p, update in zip(shared, expected, strict=True):
        torch.testing.assert_close(p.grad.flatten(), update, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("normalize", ["loss", "loss+"])
def test_mgda_with_a_negative_loss(normalize: str) -> None:
    """Its sign does not flip the gradient: the weights are those of |loss|."""
    model, loss, *_ = problem()

    def shifted(task: str) -> Tensor:
        return loss(task) - (50.0 if task == "b" else 0.0)

    assert shifted("b") < 0 < shifted("a")
    shared = [*model.trunk.parameters()]
    losses = {task: shifted(task) for task in AB}
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(v, shared, retain_graph=True)])
            for v in losses.values()
        ]
    )
    scaled = rows / torch.stack([v.detach().abs() for v in losses.values()]).unsqueeze(1)
    if normalize == "loss+":
        scaled = scaled / rows.norm(dim=1, keepdim=True)
    weights = cs.MGDA().weights(scaled @ scaled.T)
    assert weights.min() > 0
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, cs.MGDA(normalize))
    opt.step(shifted)
    update = torch.cat([p.grad.flatten() for p in shared])
    torch.testing.assert_close(update, weights @ rows, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", [cs.MGDA("loss"), cs.Sum(), cs.PCGrad()], ids=repr)
def test_losses_of_one_element_are_scalars(method: cs.Method) -> None:
    for way in ("step", "backward"):
        model, loss, *_ = problem()
        opt = cs.MultiTaskOptimizer(
            model, sgd_of(model), AB, method, weighting=cs.DynamicWeightAverage()
        )
        opt.start_epoch(0)

        def shaped(task: str, loss: Callable[[str], Tensor] = loss) -> Tensor:
            return loss(task).reshape((1,) if task == "a" else ())

        losses = (
            opt.step([shaped, shaped])
            if way == "step"
            else opt.backward({task: shaped(task) for task in AB})
        )
        assert all(value.shape == () for value in losses.values())


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

    model, loss, *_ = problem()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, Mean(), schedule, Watching())
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

    model, *_ = problem()
    with pytest.raises(TypeError, match=r"weights\(gramian, step\), got Old\.weights"):
        cs.MultiTaskOptimizer(model, sgd_of(model), AB, Old())


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
        opt = cs.MultiTaskOptimizer(model, sgd_of(model), AB, method, weighting=weighting)
        with pytest.raises(error, match=message):
            opt.step(loss)
    # Without `assign`, no row stays for the next step.
    opt = cs.MultiTaskOptimizer(model, sgd_of(model, lr=0.0), AB, Writes())
    updates = []
    for _ in range(2):
        opt.step(loss)
        updates.append(torch.cat([p.grad.flatten() for p in model.trunk.parameters()]))
    assert torch.equal(*updates)
