"""The edges of the training loop: right or refused, never silently wrong."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from networks import TASKS, Setup, assert_equal
from torch import Tensor, nn

import cs_kernels as cs

GRAMIAN = [cs.PCGrad(), cs.CAGrad(), cs.MGDA(), cs.AlignedMTL(), cs.NashMTL(), cs.IMTLG()]
GRAMIAN += [cs.UPGrad()]
AB = ["a", "b"]


class Whole(nn.Module):
    """Trunk and heads in one module: the heads are parameters of "trunk" too."""

    def __init__(self, tasks: list[str] = AB) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in tasks})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, task: str) -> Tensor:
        result: Tensor = self.heads[task](self.trunk(x))
        return result


def _problem(
    seed: int = 0, tasks: list[str] = AB
) -> tuple[Whole, Callable[[str], Tensor], Tensor, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Whole(tasks).double()
    x = torch.randn(7, 5).double()
    targets = {task: (1 + 3 * n) * torch.randn(7, 1).double() for n, task in enumerate(tasks)}
    return model, lambda task: (model(x, task) - targets[task]).square().mean(), x, targets


def _sgd(*modules: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr)


def _step_by_hand(
    method: cs.GramianMethod,
    shared: list[nn.Parameter],
    losses: dict[str, Tensor],
) -> list[Tensor]:
    """The update of the shared parameters from torch.autograd.grad."""
    grads = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses.values()]
    rows = torch.stack([torch.cat([g.flatten() for g in of_task]) for of_task in grads])
    step = cs.Step(0, tuple(losses), *[{t: loss.detach() for t, loss in losses.items()}] * 2)
    update = method.weights(rows @ rows.T, step) @ rows
    return list(update.split([p.numel() for p in shared]))


# --- Parameters of one task inside the trunk ----------------------------------------------------


@pytest.mark.parametrize("method", GRAMIAN, ids=repr)
@pytest.mark.parametrize("way", ["step", "backward"])
def test_a_head_in_the_trunk_gets_its_own_gradient(
    backend: str, method: cs.GramianMethod, way: str
) -> None:
    """As it is, without a weight; and the trunk's Gramian is that of the trunk alone."""
    model, loss, *_ = _problem()
    losses = {task: loss(task) for task in AB}
    expected = _step_by_hand(copy.deepcopy(method), [*model.trunk.parameters()], losses)
    heads = {
        task: torch.autograd.grad(losses[task], [*model.heads[task].parameters()]) for task in AB
    }
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, copy.deepcopy(method))
    if way == "step":
        opt.step(loss)
    else:
        opt.backward({task: loss(task) for task in AB})
    for p, update in zip(model.trunk.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.flatten(), update, rtol=1e-9, atol=1e-12)
    for task in AB:
        for p, grad in zip(model.heads[task].parameters(), heads[task], strict=True):
            assert torch.equal(p.grad, grad)
    own = {f"heads.{task}.{name}": task for task in AB for name in ("weight", "bias")}
    assert opt.coverage().own == own
    assert model.unused.weight.grad is None


def test_own_parameters_in_the_report_and_in_a_checkpoint() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.NashMTL())
    opt.trace(loss)
    assert set(opt.coverage().own.values()) == {"a", "b"}
    assert "heads.a.weight" in str(opt.coverage())
    assert "the gradient of 'a': no other task reaches it" in str(opt.coverage())
    opt.step(loss)
    # A resumed run knows before its first pass, also if that is of one task.
    twin = copy.deepcopy(model)
    again = cs.MultiTaskOptimizer(twin, _sgd(twin), AB, cs.NashMTL())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again._reach.owners() == opt._reach.owners() != {}


def test_a_parameter_that_a_second_task_reaches_later_is_shared() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.NashMTL())
    opt.step(loss)
    assert "heads.a.weight" in opt.coverage().own

    def crossed(task: str) -> Tensor:
        return loss(task) + (0.1 * loss("a") if task == "b" else 0)

    opt.step(crossed)
    assert set(opt.coverage().own) == {"heads.b.weight", "heads.b.bias"}


def test_with_one_task_so_far_everything_is_shared() -> None:
    """A batch of one task says nothing about what the others reach."""
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
    opt.step(loss, tasks=["a"])
    assert opt.coverage().own == {}
    opt.step(loss, tasks=["b"])
    assert set(opt.coverage().own) == {f"heads.{t}.{n}" for t in AB for n in ("weight", "bias")}


# --- Micro-batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*GRAMIAN, cs.GradDrop(0.1), cs.Sum()], ids=repr)
def test_micro_batches_of_backward_add_up(backend: str, method: cs.Method) -> None:
    """Samples do not interact here, so three thirds equal the whole; surgery happens once."""
    whole, thirds = _problem(), _problem()
    for (model, _, x, targets), parts in ((whole, 1), (thirds, 3)):
        opt = cs.MultiTaskOptimizer(model, _sgd(model.trunk, model.heads, model.unused), AB, method)
        x, targets = x[:6], {task: target[:6] for task, target in targets.items()}
        for n, rows in enumerate(torch.arange(6).chunk(parts)):
            features = model.trunk(x[rows])
            losses = {
                task: (model.heads[task](features) - targets[task][rows]).square().mean() / parts
                for task in AB
            }
            opt.backward(losses, update=n + 1 == parts)
            if n + 1 < parts:
                waiting = sum(p.grad is not None for p in model.trunk.parameters())
                assert waiting == (4 if isinstance(method, cs.Sum) else 1)  # A mark.
        assert opt.state_dict()["steps"] == 1
    for a, b in zip(whole[0].parameters(), thirds[0].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_micro_batches_of_different_tasks() -> None:
    model, loss, *_ = _problem()
    twin, other, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
    opt.backward({"b": loss("b")}, update=False)
    opt.backward({"a": loss("a")})
    cs.MultiTaskOptimizer(twin, _sgd(twin), AB, cs.PCGrad()).backward({t: other(t) for t in AB})
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_an_update_that_would_be_lost_is_refused() -> None:
    """A loop that takes a second backward for accumulation."""
    model, loss, *_ = _problem()
    sgd = _sgd(model)
    opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())

    def losses() -> dict[str, Tensor]:
        return {task: loss(task) for task in AB}

    opt.backward(losses())
    kept = [p.grad.clone() for p in model.trunk.parameters()]
    for call in (lambda: opt.backward(losses()), lambda: opt.step(loss)):
        with pytest.raises(RuntimeError, match=r"still in \.grad.*update=False"):
            call()
        assert_equal(kept, [p.grad for p in model.trunk.parameters()])
    sgd.step()
    opt.backward(losses())
    sgd.zero_grad(set_to_none=False)
    opt.backward(losses())
    sgd.zero_grad()
    opt.backward({task: value * torch.inf for task, value in losses().items()})
    opt.backward(losses())  # A scaler skips the step of an overflow.
    sgd.step()
    opt.backward(losses(), update=False)
    with pytest.raises(RuntimeError, match=r"step would forget.*update=False"):
        opt.step(loss)
    opt.backward(losses())


def test_an_optimizer_that_writes_behind_versions() -> None:
    """Old ones update `.data`."""

    class Old(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.data.add_(p.grad, alpha=-0.1)

    model, loss, *_ = _problem()
    old = Old(model.parameters(), lr=0.1)
    opt = cs.MultiTaskOptimizer(model, old, AB, cs.PCGrad())
    for _ in range(2):
        opt.backward({task: loss(task) for task in AB})
        old.step()


def test_a_failed_micro_batch_ends_the_update() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    broken = loss("a")
    torch.autograd.grad(broken, [*model.trunk.parameters()])  # Frees its graph.
    with pytest.raises(RuntimeError, match="second time"):
        opt.backward({"a": broken}, update=False)
    assert all(p.grad is None for p in model.parameters())
    # Nothing of it is left.
    twin, other, *_ = _problem()
    opt.backward({task: loss(task) for task in AB})
    cs.MultiTaskOptimizer(twin, _sgd(twin), AB, cs.PCGrad()).backward({t: other(t) for t in AB})
    for a, b in zip(model.trunk.parameters(), twin.trunk.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# --- What a loss depends on ---------------------------------------------------------------------

BOTH = pytest.mark.parametrize("schedule", [cs.Joint(), cs.Sequential()], ids=repr)
METHODS = pytest.mark.parametrize(
    "method", [cs.Sum(), cs.ConnectionStrength(), cs.PCGrad(), cs.GradDrop()], ids=repr
)


@BOTH
@METHODS
def test_a_forgotten_head(method: cs.Method, schedule: cs.Schedule) -> None:
    setup = Setup()
    del setup.optimizer.param_groups[0]["params"][-2:]  # The last head's.
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method, schedule)
    before = setup.state()
    with pytest.raises(ValueError, match=r"optimizer must hold.*'edges'.*Conv2d\.(weight|bias)"):
        opt.step(setup.closure(0))
    if not isinstance(schedule, cs.Sequential):
        assert_equal(before, setup.state())
    with pytest.raises(ValueError, match=r"optimizer must hold"):
        opt.trace(setup.closure(0))


@METHODS
def test_a_parameter_that_is_unfrozen_later(method: cs.Method) -> None:
    """Of the trunk or of a head; held from then on, it trains."""
    for find in (
        lambda setup: setup.trunk.bare.weight,
        lambda setup: setup.heads["normals"].weight,
    ):
        setup = Setup()
        late = find(setup)
        late.requires_grad_(False)
        params = setup.optimizer.param_groups[0]["params"]
        params[:] = [p for p in params if p is not late]
        opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)
        for batch in range(2):
            opt.step(setup.closure(batch))
        late.requires_grad_(True)
        before = setup.state(grads=False)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"optimizer must hold.*'(depth|normals)'"):
                opt.step(setup.closure(2))
            assert_equal(before, setup.state(grads=False))
        setup.optimizer.add_param_group({"params": [late]})
        value = late.detach().clone()
        opt.step(setup.closure(2))
        assert not torch.equal(value, late)


def test_unheld_parameters_are_seen_by_backward() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model.trunk, _sgd(model.trunk), AB, cs.PCGrad())
    with pytest.raises(ValueError, match=r"optimizer must hold.*'a' depends on.*(\(1, 6\)|\(1,\))"):
        opt.backward({task: loss(task) for task in AB})
    assert all(p.grad is None for p in model.parameters())


def test_a_parameter_that_is_unfrozen_later_in_backward() -> None:
    """Nobody has seen the module that it is in: it shows in a later graph."""
    model, loss, *_ = _problem()
    head = model.heads["b"].requires_grad_(False)
    sgd = _sgd(model.trunk, model.heads["a"])
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, cs.PCGrad())

    def steps(number: int) -> None:
        for _ in range(number):
            opt.backward({task: loss(task) for task in AB})
            sgd.step()

    steps(1)
    head.requires_grad_(True)
    with pytest.raises(ValueError, match=r"optimizer must hold.*'b'"):
        steps(40)


@BOTH
@METHODS
def test_a_loss_from_another_copy(method: cs.Method, schedule: cs.Schedule) -> None:
    """Of one task or of all; in the first step or later."""
    for warm in (False, True):
        setup, other = Setup(), Setup()
        params = setup.optimizer.param_groups[0]["params"]
        params += [*other.trunk.parameters(), *other.heads.parameters()]
        opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method, schedule)
        if warm and isinstance(method, cs.Sum):
            continue  # It cannot tell tasks apart then.
        if warm:
            opt.step(setup.closure(0))

        def loss(task: str, setup: Setup = setup, other: Setup = other) -> Tensor:
            if task != "edges":
                return setup.closure(1)(task)
            with cs.nn.active_task(other.trunk, task):
                return other.closure(1)(task)

        with pytest.raises(ValueError, match=r"depends on a parameter of trunk.*'edges'"):
            opt.step(loss)


def test_a_loss_from_another_copy_in_backward() -> None:
    model, loss, *_ = _problem()
    twin, other, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model, twin), AB, cs.PCGrad())
    with pytest.raises(ValueError, match=r"depends on a parameter of trunk.*'b'"):
        opt.backward({"a": loss("a"), "b": other("b")})


def test_a_task_whose_part_is_frozen_later() -> None:
    """It reaches nothing then, and that is as it should be."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor, task: str) -> Tensor:
            result: Tensor = (self.left if task == "a" else self.right)(x)
            return result

    trunk, x = Branches(), torch.randn(5, 3)
    heads = nn.ModuleDict({task: nn.Linear(4, 1) for task in AB})
    opt = cs.MultiTaskOptimizer(trunk, _sgd(trunk, heads), AB, cs.PCGrad())

    def loss(task: str) -> Tensor:
        return heads[task](trunk(x, task)).square().mean()

    opt.step(loss)
    trunk.left.requires_grad_(False)
    before = trunk.left.weight.clone()
    opt.step(loss)
    assert torch.equal(before, trunk.left.weight)
    assert heads["a"].weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
@METHODS
def test_checkpointed_trunks_are_not_refused(method: cs.Method, reentrant: bool) -> None:
    """Reentrant checkpointing hides the parameters from the graph of the loss."""
    states = []
    for checkpointed in (False, True):
        setup = Setup()
        setup.trunk.eval()
        opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)
        x = setup.batches[0][0].requires_grad_()

        def loss(
            task: str, setup: Setup = setup, x: Tensor = x, checkpointed: bool = checkpointed
        ) -> Tensor:
            y = (
                torch.utils.checkpoint.checkpoint(setup.trunk, x, use_reentrant=reentrant)
                if checkpointed
                else setup.trunk(x)
            )
            return setup.heads[task](y).square().mean()

        opt.trace(loss)
        for _ in range(2):
            opt.step(loss)
        states.append(setup.state())
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b)


@METHODS
def test_backward_on_a_converted_trunk_names_step(method: cs.Method) -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)
    with cs.nn.active_task(setup.trunk, "depth"):
        losses = {task: setup.closure(0)(task) for task in TASKS}
    before = setup.state()
    with pytest.raises(ValueError, match=r"use step\(closure\)"):
        opt.backward(losses)
    assert_equal(before, setup.state())


# --- Weightings and losses ----------------------------------------------------------------------


@BOTH
def test_log_sigma_is_added_once(schedule: cs.Schedule) -> None:
    """However many micro-batches a step has."""
    sigmas = []
    for parts in (1, 4):
        setup = Setup()
        setup.trunk.eval()
        weighting = cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression"))
        sgd = torch.optim.SGD([*setup.parameters(), *weighting.parameters()], lr=0.1)
        opt = cs.MultiTaskOptimizer(
            setup.trunk, sgd, TASKS, cs.Sum(), schedule=schedule, weighting=weighting
        )
        opt.step([lambda t, s=setup, n=parts: s.closure(0)(t) / n] * parts)
        grads = [s.grad for s in weighting.parameters() if s.grad is not None]
        sigmas.append(torch.stack(grads))
    torch.testing.assert_close(*sigmas)


def test_log_sigma_is_added_once_in_backward() -> None:
    grads = []
    for parts in (1, 3):
        model, loss, *_ = _problem()
        weighting = cs.UncertaintyWeights(dict.fromkeys(AB, "regression"))
        sgd = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=0.1)
        opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad(), weighting=weighting)
        for n in range(parts):
            opt.backward({t: loss(t) / parts for t in AB}, update=n + 1 == parts)
        grads.append(torch.stack([s.grad for s in weighting.parameters()]))
    torch.testing.assert_close(*grads)


def test_nash_mtl_of_other_tasks_in_the_loop() -> None:
    """Two tasks each time, not the same two."""
    tasks = ["a", "b", "c"]
    model, loss, *_ = _problem(tasks=tasks)
    opt = cs.MultiTaskOptimizer(model, _sgd(model), tasks, cs.NashMTL(update_every=5))
    opt.step(loss, tasks=["a", "b"])
    shared = [*model.trunk.parameters()]
    expected = _step_by_hand(cs.NashMTL(), shared, {task: loss(task) for task in "bc"})
    opt.step(loss, tasks=["b", "c"])
    for p, update in zip(shared, expected, strict=True):
        torch.testing.assert_close(p.grad.flatten(), update, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("normalize", ["loss", "loss+"])
def test_mgda_with_a_negative_loss(normalize: str) -> None:
    """Its sign does not turn the gradient round: the weights are those of |loss|."""
    model, loss, *_ = _problem()

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
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.MGDA(normalize))
    opt.step(shifted)
    update = torch.cat([p.grad.flatten() for p in shared])
    torch.testing.assert_close(update, weights @ rows, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", [cs.MGDA("loss"), cs.Sum(), cs.PCGrad()], ids=repr)
def test_losses_of_one_element_are_scalars(method: cs.Method) -> None:
    for way in ("step", "backward"):
        model, loss, *_ = _problem()
        opt = cs.MultiTaskOptimizer(
            model, _sgd(model), AB, method, weighting=cs.DynamicWeightAverage()
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


# --- What is kept, restored and freed -----------------------------------------------------------


class HeadWithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 1, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # Another tensor, not the same one changed.
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("warm", [False, True])
@BOTH
def test_statistics_of_heads_are_restored(schedule: cs.Schedule, warm: bool) -> None:
    setup = Setup()
    setup.heads = nn.ModuleDict({task: HeadWithStatistics() for task in TASKS}).double()
    adam = torch.optim.Adam([*setup.trunk.parameters(), *setup.heads.parameters()])
    opt = cs.MultiTaskOptimizer(setup.trunk, adam, TASKS, schedule=schedule)
    if warm:
        opt.step(setup.closure(0))
    failing = TASKS[0] if isinstance(schedule, cs.Sequential) else TASKS[-1]
    before = copy.deepcopy([setup.trunk.state_dict(), setup.heads.state_dict()])

    def fails(task: str) -> Tensor:
        loss = setup.closure(1)(task)
        if task == failing:
            raise KeyError(task)
        return loss

    with pytest.raises(KeyError):
        opt.step(fails)
    for ours, expected in zip([setup.trunk, setup.heads], before, strict=True):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    opt.trace(setup.closure(1))
    for name, tensor in setup.heads.state_dict().items():
        assert torch.equal(tensor, before[1][name]), name


def test_an_expanded_buffer() -> None:
    setup = Setup()
    setup.trunk.register_buffer("table", torch.ones(1, 3).expand(8, 3))
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    opt.trace(setup.closure(0))
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: setup.closure(0)(task) / (1 // 0))
    opt.step(setup.closure(0))


def test_snapshots_do_not_pile_up() -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    for tasks in (TASKS, TASKS[::-1], TASKS[:2], TASKS[1:], TASKS[:1], TASKS[2:], TASKS[1::-1]):
        opt.step(setup.closure(0), tasks=tasks)
    assert len(opt._statistics._snapshots) == len(TASKS) + 1


@pytest.mark.parametrize(
    ("method", "schedule"), [(cs.Sum(), cs.Joint()), (cs.PCGrad(), cs.Sequential())], ids=str
)
def test_no_gradient_is_held_during_a_forward_pass(
    method: cs.Method, schedule: cs.Schedule
) -> None:
    """Neither the last task's of Phase 1 nor the last step's of the plain sum."""
    setup = Setup()
    weight = setup.trunk.stem.weight
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method, schedule)
    last: list[weakref.ref[Tensor]] = []
    seen = []

    def loss(task: str) -> Tensor:
        gc.collect()
        seen.append([ref() for ref in last])
        value = setup.closure(0)(task)
        last.clear()
        value.register_hook(lambda _: None)
        return value

    def note(*_: object) -> None:
        last.append(weakref.ref(weight.grad))

    setup.optimizer.register_step_pre_hook(note)
    for _ in range(2):
        opt.step(loss)
    assert any(refs for refs in seen)
    assert all(ref is None for refs in seen for ref in refs)


@pytest.mark.parametrize("detached", [False, True])
def test_a_gradient_in_somebodys_bucket_is_copied(detached: bool) -> None:
    """Views of one buffer that every backward pass writes again, as DistributedDataParallel's."""
    model, loss, *_ = _problem()
    twin, other, *_ = _problem()
    shared = [*model.trunk.parameters()]
    bucket = torch.zeros(sum(p.numel() for p in shared), dtype=torch.float64)
    views = bucket.split([p.numel() for p in shared])
    for p, view in zip(shared, views, strict=True):
        place = view.view_as(p)

        def into_bucket(p: nn.Parameter, place: Tensor = place) -> None:
            p.grad = place.copy_(p.grad).detach() if detached else place.copy_(p.grad)

        p.register_post_accumulate_grad_hook(into_bucket)
    cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad()).step(loss)
    cs.MultiTaskOptimizer(twin, _sgd(twin), AB, cs.PCGrad()).step(other)
    for a, b in zip(model.trunk.parameters(), twin.trunk.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


# --- A step and its facts -----------------------------------------------------------------------


@BOTH
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

    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, Mean(), schedule, Watching())
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

    model, *_ = _problem()
    with pytest.raises(TypeError, match=r"weights\(gramian, step\), got Old\.weights"):
        cs.MultiTaskOptimizer(model, _sgd(model), AB, Old())


# --- Errors early -------------------------------------------------------------------------------

T65 = [f"t{i}" for i in range(65)]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda m: (m, _sgd(m), T65, cs.PCGrad()), ValueError, "at most 64 .*PCGrad.*got 65"),
        (lambda m: (m, _sgd(m), T65, cs.GradDrop()), ValueError, "at most 64 .*GradDrop.*got 65"),
        (
            lambda m: (m, torch.optim.LBFGS(m.parameters()), AB, cs.PCGrad()),
            ValueError,
            "without a closure, got LBFGS",
        ),
        (lambda m: (m, _sgd(m), AB, cs.PCGrad), TypeError, "method must.*got the class PCGrad"),
        (lambda m: (m, _sgd(m), AB, "pcgrad"), TypeError, "method must.*got str 'pcgrad'"),
        (lambda m: (m, _sgd(m), AB, cs.Sum(), cs.Joint), TypeError, "schedule.*the class Joint"),
        (lambda m: (m, _sgd(m), AB, cs.Sum(), "joint"), TypeError, "schedule.*str 'joint'"),
        (
            lambda m: (m, _sgd(m), AB, cs.Sum(), cs.Joint(), {"a": 1.0}),
            TypeError,
            "weighting must.*got dict",
        ),
        (
            lambda m: (m, _sgd(m), AB, cs.Sum(), cs.Joint(), cs.EqualWeights),
            TypeError,
            "weighting must.*the class EqualWeights",
        ),
        (lambda m: ([m], _sgd(m), AB, cs.Sum()), TypeError, "trunk must be a.*got list"),
        (lambda m: (m, "adam", AB, cs.Sum()), TypeError, "optimizer must be a torch optimizer"),
        (lambda m: (m, [], AB, cs.Sum()), ValueError, "optimizer must be.*got none"),
        (lambda m: (m, [_sgd(m), _sgd(m)], AB, cs.Sum()), ValueError, "each parameter once, got"),
        (lambda m: (m, _sgd(m), {"a", "b"}, cs.Sum()), TypeError, "tasks must be a sequence"),
        (lambda m: (m, _sgd(m), 3, cs.Sum()), TypeError, "tasks must be a sequence.*got 3"),
    ],
)
def test_bad_arguments(
    build: Callable[[nn.Module], tuple[object, ...]], error: type[Exception], message: str
) -> None:
    model, *_ = _problem()
    with pytest.raises(error, match=message):
        cs.MultiTaskOptimizer(*build(model))


def test_a_trunk_on_two_devices() -> None:
    model, *_ = _problem()
    model.unused.to("meta")
    sgd = _sgd(model)
    with pytest.raises(ValueError, match=r"on one device.*trunk.0.weight on cpu.*on meta"):
        cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())
    cs.MultiTaskOptimizer(model, sgd, AB, cs.Sum())


def test_the_call_that_was_meant() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
    losses = {task: loss(task) for task in AB}
    for given in (losses, [*losses.values()], losses["a"]):
        with pytest.raises(TypeError, match=r"got (dict|Tensor): .*call backward\(\{task: loss"):
            opt.step(given)
    with pytest.raises(TypeError, match=r"mapping \{task: loss\}, got list"):
        opt.backward([*losses.values()])
    with pytest.raises(TypeError, match=r"got function: with a closure, call step\(closure\)"):
        opt.backward(loss)
    with pytest.raises(TypeError, match=r"closure must be a function.*got str 'a'"):
        opt.step("a")


def test_tasks_of_anything_that_has_an_order() -> None:
    model, loss, *_ = _problem()
    for tasks in (dict.fromkeys(AB), dict.fromkeys(AB).keys(), iter(AB), tuple(AB)):
        opt = cs.MultiTaskOptimizer(model, _sgd(model), tasks, cs.PCGrad())
        assert opt.tasks == ("a", "b")
        opt.step(loss, tasks=dict.fromkeys(["b"]).keys())


# --- Checkpoints --------------------------------------------------------------------------------


def test_checkpoints_that_do_not_fit_are_refused_whole() -> None:
    model, loss, *_ = _problem()

    def optimizer(method: cs.Method, weighting: cs.Weighting) -> cs.MultiTaskOptimizer:
        return cs.MultiTaskOptimizer(model, _sgd(model), AB, method, weighting=weighting)

    opt = optimizer(cs.NashMTL(3), cs.DynamicWeightAverage())
    opt.start_epoch(2)
    opt.step(loss)
    good = copy.deepcopy(opt.state_dict())
    fresh = optimizer(cs.NashMTL(3), cs.DynamicWeightAverage())
    untouched = copy.deepcopy(fresh.state_dict())
    half = {**good, "method": {"name": "NashMTL", "state": {"number": 4}}}
    half_weighting = copy.deepcopy(good)
    del half_weighting["weighting"]["state"]["means"]
    other_trunk = {**good, "reach": {"nowhere.weight": {"reached": [], "tried": []}}}
    for bad, message in (
        ({k: v for k, v in good.items() if k != "method"}, r"state must have.*'method'"),
        ({**good, "method": {"name": "PCGrad", "state": {}}}, r"of method NashMTL, got PCGrad"),
        (
            {**good, "weighting": {"name": "EqualWeights", "state": {}}},
            r"of weighting DynamicWeightAverage, got EqualWeights",
        ),
        ({**good, "tasks": ["b", "a"]}, r"of tasks \['a', 'b'\], got \['b', 'a'\]"),
        (half, r"a whole state_dict, got one with KeyError\('tasks'\)"),
        (half_weighting, r"a whole state_dict, got one with KeyError\('means'\)"),
        ({**good, "steps": None}, "a whole state_dict"),
        (other_trunk, "shared parameters of trunk, got 'nowhere.weight'"),
        ([], "state must have"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.load_state_dict(bad)
        assert fresh.state_dict() == untouched
    fresh.load_state_dict(good)
    assert fresh.state_dict()["steps"] == 1
    for method in (cs.GradDrop(), cs.PCGrad()):
        other = cs.PCGrad() if isinstance(method, cs.GradDrop) else cs.GradDrop()
        state = optimizer(method, cs.EqualWeights()).state_dict()
        with pytest.raises(ValueError, match="state must be of method"):
            optimizer(other, cs.EqualWeights()).load_state_dict(state)


def test_tensors_of_a_checkpoint_move_to_where_they_are_needed() -> None:
    """A stand-in for a checkpoint that was mapped to another device than training is on."""
    weighting = cs.DynamicWeightAverage()
    weighting.start_epoch(0)
    weighting.observe(cs.Step(losses={"a": torch.tensor(1.0)}))
    resumed = cs.DynamicWeightAverage()
    resumed.load_state_dict(weighting.state_dict())
    resumed.observe(cs.Step(losses={"a": torch.tensor(2.0, device="meta")}))
    assert resumed.state_dict()["totals"]["a"].device.type == "meta"


# --- More of the same, as new users have found it -----------------------------------------------


@pytest.mark.parametrize("way", ["step", "backward"])
def test_own_parameters_of_the_plain_sum(way: str) -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.Sum())
    if way == "step":
        opt.step(loss)
    else:
        opt.backward({task: loss(task) for task in AB})
    assert set(opt.coverage().own) == {f"heads.{t}.{n}" for t in AB for n in ("weight", "bias")}


@BOTH
@pytest.mark.parametrize("some", [False, True])
def test_a_trunk_that_is_unfrozen_later_is_shared(schedule: cs.Schedule, some: bool) -> None:
    """A task with passes while a parameter was frozen has not said whether it reaches it."""
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)
    setup.trunk.requires_grad_(False)
    setup.trunk.stem.bias.requires_grad_(some)
    setup.trunk.stem_norm.requires_grad_(True)
    opt.step(setup.closure(0))
    state = opt.state_dict()
    setup.trunk.requires_grad_(True)
    again = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)
    again.load_state_dict(state)
    for one in (opt, again):
        one.step(setup.closure(1), tasks=TASKS[:1])
        assert one.coverage().own == {}
        one.step(setup.closure(1))
        assert one.coverage().own == {}
        assert "stem.weight" in one.coverage().prioritized


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("method", [cs.PCGrad(), cs.GradDrop(), cs.Sum()], ids=repr)
def test_zero_grad_forgets_what_has_added_up(method: cs.Method, set_to_none: bool) -> None:
    """The trunk's gradients too, which wait outside `.grad`."""
    model, loss, *_ = _problem()
    twin, other, *_ = _problem()
    sgd = [_sgd(model.trunk, model.unused), _sgd(model.heads)]
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, method)
    opt.backward({task: loss(task) for task in AB}, update=False)
    for one in sgd:
        one.zero_grad(set_to_none=set_to_none)
    opt.backward({task: loss(task) for task in AB})
    straight = cs.MultiTaskOptimizer(twin.trunk, _sgd(twin), AB, method)
    straight.backward({task: other(task) for task in AB})
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad)


def test_an_optimizer_step_before_the_update_is_refused() -> None:
    model, loss, *_ = _problem()
    sgd = _sgd(model)
    opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"update=False\) wait for their update"):
        sgd.step()
    assert_equal(before, [p.detach() for p in model.parameters()])
    opt.backward({task: loss(task) for task in AB})
    sgd.step()


class Changing(cs.Schedule):
    now = 2

    def phase(self, epoch: int | None, step: int) -> int:
        return self.now


def test_an_update_that_phase_1_interrupts() -> None:
    """The phase is that in which it began; an unfinished one can be forgotten."""
    model, loss, *_ = _problem()
    sgd, schedule = _sgd(model), Changing()
    opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad(), schedule)
    for finish in (True, False):
        schedule.now = 2
        opt.backward({task: loss(task) for task in AB}, update=False)
        schedule.now = 1
        with pytest.raises(RuntimeError, match="step would forget"):
            opt.step(loss)
        if finish:
            opt.backward({task: loss(task) for task in AB})
            sgd.step()
        else:
            sgd.zero_grad()
        opt.step(loss)
    schedule.now = 3
    with pytest.raises(ValueError, match="schedule must give phase 1 or 2, got 3"):
        opt.step(loss)


def test_a_refused_checkpoint_leaves_micro_batches_alone() -> None:
    updates = []
    for interrupted in (False, True):
        model, loss, *_ = _problem()
        opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
        opt.backward({task: loss(task) for task in AB}, update=False)
        if interrupted:
            with pytest.raises(ValueError, match="whole state_dict"):
                opt.load_state_dict({**opt.state_dict(), "steps": None})
        opt.backward({task: loss(task) for task in AB})
        updates.append(torch.cat([p.grad.flatten() for p in model.trunk.parameters()]))
    assert torch.equal(*updates)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor, task: str) -> Tensor:
        x = self.stem(x)
        return x if task == "a" else self.normed(x)


@BOTH
def test_a_first_task_without_a_prioritized_layer(schedule: cs.Schedule) -> None:
    """The others have one."""
    tasks = ["a", "b", "c"]
    trunk = cs.nn.convert_task_batchnorm(Branches(), tasks)
    x = torch.randn(8, 3)
    opt = cs.MultiTaskOptimizer(trunk, _sgd(trunk), tasks, schedule=schedule)
    opt.step(lambda task: trunk(x, task).square().mean())
    assert opt.coverage().prioritized == {"normed.0.weight": "normed.1"}


@METHODS
def test_another_task_may_not_stay_active(method: cs.Method) -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method)

    def sets(task: str) -> Tensor:
        cs.nn.set_task(setup.trunk, "depth")
        return setup.closure(0)(task)

    before = setup.state()
    with pytest.raises(ValueError, match=r"closure must leave 'normals' active.*active_task"):
        opt.step(sets)
    assert_equal(before, setup.state())


def test_nash_mtl_of_other_layers() -> None:
    """As many, but others: they have weights of their own."""
    method = cs.NashMTL(update_every=4, max_norm=0, groups="layer")
    gramians = torch.diag_embed(torch.tensor([[[1.0, 4.0]], [[9.0, 25.0]]]).double())
    method.weights(gramians[0], cs.Step(0, ("a", "b"), layers=("first",)))
    second = method.weights(gramians[1], cs.Step(1, ("a", "b"), layers=("second",)))
    torch.testing.assert_close(second, torch.tensor([[1 / 3, 1 / 5]]).double())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer() -> None:
    setup = Setup()
    setup.trunk.register_buffer("graph", torch.eye(3).to_sparse_csr())
    setup.trunk.register_buffer("other_graph", torch.eye(3).to_sparse_coo())
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: setup.closure(0)(task) / (1 // 0))
    opt.step(setup.closure(0))


@BOTH
def test_an_optimizer_step_that_fails(schedule: cs.Schedule) -> None:
    """Out of memory for its first state, say."""
    setup = Setup()

    def fails(*_: object) -> None:
        raise MemoryError

    hook = setup.optimizer.register_step_pre_hook(fails)
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, schedule=schedule)
    before = setup.state()
    with pytest.raises(MemoryError):
        opt.step(setup.closure(0))
    assert_equal(before, setup.state())
    assert opt.state_dict()["steps"] == 0
    hook.remove()
    opt.step(setup.closure(0))


def test_nothing_is_left_of_an_optimizer_that_is_gone() -> None:
    """No hook, neither in the torch optimizer nor in layers that have not run."""
    model, loss, *_ = _problem()
    sgd = _sgd(model)
    hooks = len(sgd._optimizer_step_post_hooks), len(sgd._optimizer_step_pre_hooks)
    for _ in range(3):
        opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad())
        opt.step(loss)
        assert model.unused._forward_pre_hooks
        del opt
        gc.collect()
        assert not model.unused._forward_pre_hooks
    assert hooks == (len(sgd._optimizer_step_post_hooks), len(sgd._optimizer_step_pre_hooks))


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

    model, loss, *_ = _problem()
    for method, weighting, error, message in (
        (Nothing(), None, RuntimeError, r"method must assign the updates.*Nothing\(\)"),
        (Listed(), None, TypeError, r"weights as a tensor, got \[1.0, 1.0\] by Listed"),
        (cs.PCGrad(), Detached(), ValueError, "weighting must weigh a loss to one with a graph"),
    ):
        opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, method, weighting=weighting)
        with pytest.raises(error, match=message):
            opt.step(loss)
    # Without `assign` the rows are not left for the next step.
    opt = cs.MultiTaskOptimizer(model, _sgd(model, lr=0.0), AB, Writes())
    updates = []
    for _ in range(2):
        opt.step(loss)
        updates.append(torch.cat([p.grad.flatten() for p in model.trunk.parameters()]))
    assert torch.equal(*updates)


def _with(model: nn.Module, **options: object) -> cs.MultiTaskOptimizer:
    return cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.Sum(), **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: _with(m, scaler=True), TypeError, "scaler must be.*got True"),
        (lambda m: _with(m, backward="x"), TypeError, "backward must be a function.*got 'x'"),
        (lambda m: _with(m, layers=["trunk.0"]), TypeError, r"layers must be a mapping.*trunk\.0"),
        (lambda m: _with(m).start_epoch(1.5), TypeError, "epoch must be an integer, got 1.5"),
        (lambda m: _with(m).start_epoch(None), TypeError, "epoch must be an integer, got None"),
        (lambda m: _with(m).trace(None), TypeError, "closure must be a function"),
        (lambda m: cs.PCGrad(seed=1.5), TypeError, "seed must be an integer, got 1.5"),
        (lambda m: cs.GradDrop(seed="1"), TypeError, "seed must be an integer, got '1'"),
        (lambda m: cs.Mixed(3.5), TypeError, "epochs must be an integer, got 3.5"),
        (lambda m: cs.Mixed(3, seed="x"), TypeError, "seed must be an integer, got 'x'"),
        (lambda m: cs.Switch(1.5), TypeError, "epoch must be an integer, got 1.5"),
        (lambda m: cs.CAGrad("x"), ValueError, "c must be finite and at least 0, got x"),
        (lambda m: cs.FixedWeights({"a": "x"}), ValueError, "weights must be finite, got x"),
        (lambda m: cs.FixedWeights([1, 2]), TypeError, r"weights must be a mapping.*\[1, 2\]"),
        (lambda m: cs.UncertaintyWeights(["a"]), TypeError, r"tasks must be a mapping.*\['a'\]"),
        (lambda m: cs.DynamicWeightAverage("2"), ValueError, "temperature must be.*got 2"),
        (lambda m: cs.nn.convert_task_batchnorm(None, AB), TypeError, "module must be.*got None"),
        (lambda m: cs.nn.extract_task(None, "a"), TypeError, "module must be.*got None"),
    ],
)
def test_messages_name_the_argument(
    call: Callable[[nn.Module], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(_problem()[0])


@pytest.mark.parametrize("method", [cs.PCGrad(), cs.Sum()], ids=repr)
def test_heads_accumulate_on_a_frozen_trunk(method: cs.Method) -> None:
    grads = []
    for parts in (1, 3):
        model, loss, *_ = _problem()
        opt = cs.MultiTaskOptimizer(model.trunk, _sgd(model.trunk, model.heads), AB, method)
        opt.backward({task: loss(task) for task in AB}, update=False)
        opt.optimizer.zero_grad()
        model.trunk.requires_grad_(False)
        for n in range(parts):
            opt.backward({task: loss(task) / parts for task in AB}, update=n + 1 == parts)
        grads.append(torch.cat([p.grad.flatten() for p in model.heads.parameters()]))
    torch.testing.assert_close(*grads)


def test_gradients_that_wait_must_stay_as_they_are() -> None:
    model, loss, *_ = _problem()
    opt = cs.MultiTaskOptimizer(model, _sgd(model), AB, cs.PCGrad())
    opt.backward({task: loss(task) for task in AB}, update=False)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="clip or unscale after the update"):
        opt.backward({task: loss(task) for task in AB})
    opt.optimizer.zero_grad()
    opt.backward({task: loss(task) for task in AB})


@BOTH
@METHODS
def test_parameters_that_were_replaced(method: cs.Method, schedule: cs.Schedule) -> None:
    """A checkpoint loaded by `assign`: the optimizer holds those that were there before."""
    if isinstance(method, cs.Sum) and isinstance(schedule, cs.Joint):
        return  # As from a copy of the trunk, but of all tasks: below.
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, method, schedule)
    opt.step(setup.closure(0))
    setup.trunk.load_state_dict(copy.deepcopy(setup.trunk.state_dict()), assign=True)
    with pytest.raises(ValueError, match="depends on a parameter of trunk"):
        opt.step(setup.closure(0))


def test_parameters_that_were_replaced_under_the_plain_sum() -> None:
    setup = Setup()
    opt = cs.MultiTaskOptimizer(setup.trunk, setup.optimizer, TASKS, cs.Sum())
    opt.step(setup.closure(0))
    setup.trunk.load_state_dict(copy.deepcopy(setup.trunk.state_dict()), assign=True)
    with pytest.raises(ValueError, match="depends on a parameter of trunk"):
        opt.step(setup.closure(0))
