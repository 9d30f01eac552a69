"""`update_every`: steps that use the task weights of an earlier step."""

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from networks import AB, GRAMIAN_METHODS, TASKS, Setup, assert_equal, with_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cs_kernels as cs

pytestmark = pytest.mark.loop

Losses = dict[str, Tensor]


class Given(cs.GramianMethod):
    """Takes task weights from a list, one entry per step that solves."""

    def __init__(self, *weights: Sequence[float], update_every: int = 3, groups: Any = "all"):
        super().__init__(groups, update_every)
        self.given, self.solved = weights, 0

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        weights = gramian.new_tensor(self.given[self.solved % len(self.given)])
        self.solved += 1
        return weights[: gramian.shape[-1]].expand(gramian.shape[:-1]).clone()


TWO = (0.25, 2.0), (-1.5, 0.0)
THREE = (0.5, 3.0, -2.0), (1.0, 0.0, 4.0)


def optimizer_of(method: cs.Method, trunk: nn.Module, *others: Any, **options: Any) -> Any:
    parameters = {p: None for module in (trunk, *others) for p in module.parameters()}
    sgd = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return cs.MultiTaskOptimizer(trunk, sgd, options.pop("tasks", TASKS), method, **options)


def train(opt: cs.MultiTaskOptimizer, losses: Losses) -> None:
    opt.backward(losses)
    opt.optimizer.step()


def gradients(losses: Losses, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Each task's row, from plain autograd."""
    rows = {}
    for task, loss in losses.items():
        for parameter in parameters:
            parameter.grad = None
        loss.backward(retain_graph=True)
        rows[task] = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return rows


def assert_update(opt: Any, rows: Mapping[str, Any], own: Iterable[Tensor]) -> None:
    """Asserts that `.grad` is the weighted sum for shared parameters, else the plain sum."""
    report, own = opt.report(), set(own)
    assert report.rows == tuple(rows)
    weights = report.task_weights.view(-1, len(rows)).tolist()
    shared = {p: name for name, p in opt.trunk.named_parameters() if p not in own}
    for n, parameter in enumerate(opt.optimizer.param_groups[0]["params"]):
        factors = [1.0] * len(rows)
        if parameter in shared and any(row[n] is not None for row in rows.values()):
            module = shared[parameter].rpartition(".")[0]
            factors = weights[report.layers.index(module) if len(weights) > 1 else 0]
        pairs = zip((row[n] for row in rows.values()), factors, strict=True)
        terms = [grad * factor for grad, factor in pairs if grad is not None]
        if terms:
            tolerance = {"rtol": 0.05, "atol": 0.05} if parameter.dtype.itemsize == 2 else {}
            expected = sum(terms[1:], terms[0])
            torch.testing.assert_close(parameter.grad, expected, equal_nan=True, **tolerance)
        else:
            assert parameter.grad is None


def follow(
    opt: cs.MultiTaskOptimizer,
    since: Sequence[int],
    losses: Callable[[int], Losses],
    make: Callable[[int], object],
    own: Callable[[int], Iterable[Tensor]] = lambda number: (),
) -> list[int]:
    """Compares every update with plain autograd's; returns the trunk's backward passes by step.

    Step n uses the solution of step `since[n]`; `own(n)` returns the trunk's parameters that only
    one task has reached.
    """
    parameters = opt.optimizer.param_groups[0]["params"]
    norms, passes = cs.nn.task_norms(opt.trunk), Counter[int]()
    # A normalization, if there is one: `step_together` refuses hooks on other shared parameters.
    watched = {*(norms[0] if norms else opt.trunk).parameters()}
    for number, solved in enumerate(since):
        rows = gradients(losses(number), parameters)
        columns = zip(parameters, *rows.values(), strict=True)
        first = next(p for p, *g in columns if p in watched and any(x is not None for x in g))
        note = first.register_post_accumulate_grad_hook(lambda _, n=number: passes.update([n]))
        make(number)
        note.remove()
        assert opt.report().weights_from == solved
        assert (opt.report().gramian is None) == (solved != number)
        assert_update(opt, rows, own(number))
    return [passes[number] for number in range(len(since))]


class Step(NamedTuple):
    calls: Sequence[Sequence[str]] = (TASKS,)
    """The tasks of each micro-batch."""
    factors: Mapping[str, float] = {}
    """Factors of the losses, by task."""
    features: bool = False
    """Whether gradients are combined at the trunk's output."""
    change: Callable[[Any], object] = lambda opt: None
    """Changes the optimizer or the trunk before the step."""


class Network:
    """A trunk, a head per task, and the losses of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4)
        self.trunk = nn.Sequential(*layers).double()
        self.trunk.depth = 4
        self.heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS}).double()
        self.x = torch.randn(8, 7, 5).double()

    def start(self, method: cs.Method, *others: Any, **options: Any) -> cs.MultiTaskOptimizer:
        return optimizer_of(method, self.trunk, self.heads, *others, **options)

    def features(self, number: int) -> Tensor:
        return self.trunk[: self.trunk.depth](self.x[number % 8])

    def losses(self, number: int, z: Tensor | None = None) -> Losses:
        z = self.features(number) if z is None else z
        return {t: (self.heads[t](z) - n).square().mean() for n, t in enumerate(TASKS)}

    def micro_batches(self, number: int, step: Step) -> list[tuple[Tensor, Losses]]:
        """The features and the losses of each micro-batch."""
        batches = [self.features(number + n) for n in range(len(step.calls))]
        return [
            (z, {t: self.losses(0, z)[t] * step.factors.get(t, 1) for t in tasks})
            for z, tasks in zip(batches, step.calls, strict=True)
        ]

    def losses_of(self, number: int, step: Step) -> Losses:
        total: Losses = {}
        for _, losses in self.micro_batches(number, step):
            total |= {t: total[t] + x if t in total else x for t, x in losses.items()}
        return {task: total[task] for task in TASKS if task in total}

    def make(self, opt: cs.MultiTaskOptimizer, number: int, step: Step) -> None:
        for n, (z, losses) in enumerate(self.micro_batches(number, step), 1):
            features = z if step.features else None
            opt.backward(losses, update=n == len(step.calls), features=features)
        if all(p.grad is None or p.grad.isfinite().all() for p in self.trunk.parameters()):
            opt.optimizer.step()


def _changed(owner: Callable[[Any], Any], name: str, value: Any) -> Step:
    return Step(change=lambda opt: setattr(owner(opt), name, value))


STEPS = {
    ".": Step(),
    "f": Step(features=True),
    "0": Step(factors={"edges": 0.0}),
    "n": Step(factors={"normals": math.nan}),
    "i": Step(factors={"edges": math.inf}),
    "s": Step([TASKS[1:]]),
    "m": Step([TASKS, TASKS[1:], TASKS[:1]]),
    "b": Step([TASKS[:2], TASKS[:2]]),
    "c": Step([TASKS[:2], TASKS]),
    "d": Step([TASKS, TASKS]),
    **{n: _changed(lambda opt: opt.method, "update_every", int(n)) for n in "129"},
    **{n: _changed(lambda opt: opt.trunk, "depth", int(n)) for n in "34"},
    "M": _changed(lambda opt: opt, "method", cs.MGDA(update_every=3)),
    "F": Step(change=lambda opt: opt.trunk[0].requires_grad_(False)),
    "U": Step(change=lambda opt: opt.trunk[0].requires_grad_(True)),
}

METHODS = {type(method).__name__: type(method) for method in GRAMIAN_METHODS}
STORIES: dict[str, tuple[cs.GramianMethod, str, str]] = {
    **{name: (method(update_every=3), ".......", "0003336") for name, method in METHODS.items()},
    "every 1": (cs.PCGrad(), "..", "01"),
    "another `update_every`": (cs.UPGrad(), "99199222", "00233557"),
    "another method": (cs.UPGrad("all", 3), "..M.", "0022"),
    "features": (Given(*THREE), "ffff", "0003"),
    "features by layer": (Given(*THREE, groups="layer"), "ffff", "0003"),
    "features in turn": (cs.UPGrad("all", 9), "ff..ff", "002244"),
    # MGDA gives all weight to a task with a zero gradient, so such a solution is not kept.
    "zero": (cs.MGDA(update_every=3), "0..00.", "011145"),
    "zero by layer": (cs.MGDA(groups="layer", update_every=3), "0..00.", "011145"),
    "a NaN solution": (Given((math.nan, 1.0, 1.0), (1.0, 1.0, 1.0)), "....", "0111"),
    "NaN in the first solution": (cs.UPGrad("all", 3), "n.....", "011144"),
    "infinity between solutions": (cs.UPGrad("all", 3), ".in.", "0003"),
    "infinity in the next solution": (cs.UPGrad("all", 3), "...i..", "000344"),
    "other tasks": (Given(*THREE, update_every=9), "..ss..", "002244"),
    "micro-batches": (Given(*THREE), "mmmm", "0003"),
    # The first call does not know the tasks of the second.
    "micro-batches of other tasks": (cs.UPGrad("all", 9), "bbcdc", "01224"),
    "a layer left out": (cs.UPGrad("layer", 9), "44334", "00224"),
    "a frozen layer": (cs.UPGrad("layer", 9), "..FU", "0023"),
}


@pytest.mark.parametrize("story", STORIES)
def test_steps_that_solve(story: str) -> None:
    """With `groups="all"`, steps between two solutions make one pass per micro-batch."""
    method, letters, since = STORIES[story]
    network, steps, since = Network(), [STEPS[x] for x in letters], [*map(int, since)]
    opt = network.start(copy.deepcopy(method))

    def losses(number: int) -> Losses:
        steps[number].change(opt)
        return network.losses_of(number, steps[number])

    make = lambda number: network.make(opt, number, steps[number])  # noqa: E731
    passes = follow(opt, since, losses, make)
    for number, (step, solved) in enumerate(zip(steps, since, strict=True)):
        separate = solved == number or opt.method.groups == "layer"
        needed = sum(map(len, step.calls)) if separate else len(step.calls)
        assert passes[number] == (1 if step.features else needed)
    assert ("update_every" in repr(opt.method)) == (opt.method.update_every > 1)


def _hidden(module: nn.Module, x: Tensor) -> Tensor:
    """Runs a module whose parameters are not in the graph, as reversible networks do."""

    def backward(grad: Tensor) -> Tensor | None:
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            module(y).backward(grad)
        return y.grad

    return with_gradient(module, backward)(x)


double = with_gradient(lambda x: 2 * x, lambda grad: 2 * grad)
reentrant = partial(checkpoint, use_reentrant=True)


def _nonlinear(m: Any, z: Tensor, task: str) -> Tensor:
    """A task's hooks and functions may be nonlinear, so they must get only its gradient."""
    z = z * 1.0
    if task == "a":
        z.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    else:
        z = with_gradient(lambda y: y * 1.0, lambda grad: grad / grad.norm())(z)
    return m.heads[task](z)


class Case(NamedTuple):
    """The functions between a `Decoder`'s input and its losses, and the expected steps."""

    trunk: Callable[..., Tensor] = lambda m, z: m.trunk["two"](z)
    head: Callable[..., Tensor] = lambda m, z, task: m.heads[task](z)
    losses: Callable[..., Losses] = lambda m, losses: losses
    prepare: Callable[..., object] = lambda m: None
    one_pass: bool = True
    """Whether a single backward pass is correct in a step that does not solve."""
    since: str = "00033"
    shared_from: int = 9
    """The step from which the adapter of "a" counts as shared."""


def _behind_adapters(m: Any, z: Tensor, task: str) -> Tensor:
    return m.heads[task](m.trunk["two"](torch.tanh(m.between[task](z))))


def _output(m: Any, z: Tensor, task: str) -> Tensor:
    return z


OWN = Case(prepare=lambda m: m.own_adapters())
MANY = Case(one_pass=False)
CASES = {
    "heads": Case(),
    "no heads": Case(head=_output),
    "frozen heads": Case(prepare=lambda m: m.heads.requires_grad_(False)),
    "one head": Case(head=lambda m, z, task: m.heads["a"](z)),
    # Both tasks have the loss of "a", so the gradient of its head counts twice.
    "one loss": MANY._replace(losses=lambda m, x: dict.fromkeys(AB, x["a"])),
    "one loss, no head": Case(head=_output, losses=lambda m, x: dict.fromkeys(AB, x["a"])),
    "a loss in another": Case(head=_output, losses=lambda m, x: {"a": x["a"], "b": x["a"].exp()}),
    "a parameter": MANY._replace(
        losses=lambda m, losses: {"a": m.scale, "b": 2 * m.scale},
        prepare=lambda m: m.add_scale(torch.tensor(2.0)),
    ),
    "learned": Case(losses=lambda m, x: {t: x[t] * (-w).exp() + w for t, w in m.learned.items()}),
    "layer behind adapters": Case(head=_behind_adapters),
    "own adapters": OWN._replace(head=_behind_adapters),
    # A step solves if parameters were unfrozen, or if the step before reached new parameters.
    "adapters unfrozen": OWN._replace(
        trunk=lambda m, z: (m.between.requires_grad_(m.number > 0), m.trunk["two"](z))[1],
        head=_behind_adapters,
        since="01114",
    ),
    "adapters used later": OWN._replace(
        head=lambda m, z, t: m.heads[t](m.between[t](z) if m.number else z), since="00222"
    ),
    "adapter shared later": OWN._replace(
        head=lambda m, z, t: m.heads[t](m.between[t](z) + (m.between["a"](z) if m.number else 0)),
        shared_from=3,
    ),
    "checkpointed": Case(lambda m, z: checkpoint(m.trunk["two"], z, use_reentrant=False)),
    "a function": Case(lambda m, z: m.trunk["two"](double(z))),
    "a function of a head": MANY._replace(
        head=lambda m, z, t: m.heads[t](z * double(m.between[t].bias))
    ),
    "complex": Case(
        lambda m, z: m.trunk["two"]((z * m.scale).abs()),
        prepare=lambda m: m.add_scale(torch.randn(6, dtype=torch.complex128)),
    ),
    "bfloat16": Case(prepare=lambda m: m.bfloat16()),
    "float16": Case(prepare=lambda m: m.half()),
    "nonlinear heads": MANY._replace(head=_nonlinear),
    "hidden layer": Case(lambda m, z: _hidden(m.trunk["two"], z)),
    "hidden layer per task": MANY._replace(
        trunk=lambda m, z: z, head=lambda m, z, t: m.heads[t](_hidden(m.trunk["two"], z))
    ),
    "hidden heads": MANY._replace(head=lambda m, z, t: _hidden(m.heads[t], z)),
    "shared neck": MANY._replace(trunk=lambda m, z: m.trunk["two"](m.between["both"](z).tanh())),
    "input with a gradient": MANY._replace(prepare=lambda m: m.x.requires_grad_()),
    "reentrant": MANY._replace(trunk=lambda m, z: reentrant(m.trunk["two"], z)),
    "reentrant heads": MANY._replace(head=lambda m, z, t: reentrant(m.heads[t], z)),
    # The penalty shows a head's parameters; the checkpoint hides their other use.
    "reentrant heads with a penalty": MANY._replace(
        head=lambda m, z, t: reentrant(m.heads[t], z),
        losses=lambda m, x: {t: x[t] + m.heads[t].weight.square().sum() for t in x},
    ),
}


class Decoder(nn.Module):
    """A trunk and two heads; a parameter of the trunk is never reached."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case, self.number = case, 0
        self.trunk = nn.ModuleDict({"one": nn.Linear(5, 6), "two": nn.Linear(6, 6)})
        self.trunk.register_parameter("unused", nn.Parameter(torch.ones(2)))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 2) for task in AB})
        self.between = nn.ModuleDict({task: nn.Linear(6, 6) for task in [*AB, "both"]})
        self.learned = nn.ParameterDict({task: torch.zeros(()) for task in AB})
        self.register_buffer("x", torch.randn(8, 7, 5))
        case.prepare(self.double())

    def add_scale(self, scale: Tensor) -> None:
        self.scale = nn.Parameter(scale)
        self.trunk.register_parameter("scale", self.scale)

    def own_adapters(self) -> None:
        self.trunk["between"] = self.between

    def losses(self, number: int) -> Losses:
        self.number = number
        z = self.case.trunk(self, torch.tanh(self.trunk["one"](self.x[number])))
        outputs = {task: self.case.head(self, z, task) for task in AB}
        losses = {t: (y - n).square().mean() for n, (t, y) in enumerate(outputs.items())}
        return self.case.losses(self, losses)

    def start(self, method: cs.Method) -> cs.MultiTaskOptimizer:
        """Outside the trunk, the torch optimizer holds only parameters that a loss reaches."""
        rows = gradients(self.losses(0), [*self.parameters()])
        columns = zip(self.parameters(), *rows.values(), strict=True)
        used = nn.ParameterList(p for p, *grads in columns if grads != [None, None])
        return optimizer_of(method, self.trunk, used, tasks=AB)

    def make(self, opt: cs.MultiTaskOptimizer, way: str, number: int) -> None:
        if way == "step":
            opt.step(lambda task: self.losses(number)[task])
            return
        losses = self.losses(number)
        with torch.set_grad_enabled(number % 2 == 0):
            opt.backward(losses)
        opt.optimizer.step()


@pytest.mark.filterwarnings("ignore:reentrant checkpointing prevents")
@pytest.mark.parametrize("way", ["step", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_other_parameters_are_not_weighted(case: str, way: str) -> None:
    """`backward` makes one pass where that gives the right gradients, else one per task."""
    model, since = Decoder(CASES[case]), [*map(int, CASES[case].since)]
    opt = model.start(Given(*TWO))

    def own(number: int) -> set[Tensor]:
        tasks = AB if number < CASES[case].shared_from else ["b"]
        parameters = {p for task in tasks for p in model.between[task].parameters()}
        return parameters & set(model.trunk.parameters())

    passes = follow(opt, since, model.losses, lambda n: model.make(opt, way, n), own)
    one_pass = CASES[case].one_pass and way == "backward"
    assert passes == [1 if one_pass and n != solved else 2 for n, solved in enumerate(since)]


def test_a_pass_for_each_task_frees_the_graph() -> None:
    model = Decoder(CASES["shared neck"])
    opt = model.start(Given(*TWO))
    for number in range(2):
        losses = model.losses(number)
        opt.backward(losses)
        with pytest.raises(RuntimeError, match="a second time"):
            losses["a"].backward()
        opt.optimizer.step()


@pytest.mark.parametrize(
    ("method", "way", "micro_batches"),
    [
        (Given(*THREE), "step", 1),
        (Given(*THREE), "step", 3),
        (cs.CAGrad(groups="layer", update_every=3), "step", 1),
        (cs.CAGrad(groups="layer", update_every=3), "together", 1),
    ],
)
def test_task_specific_normalization(method: Any, way: str, micro_batches: int) -> None:
    """Normalizations' gradients are not weighted; `step_together` and `step` make equal updates."""
    setup = Setup()
    opt = setup.start(copy.deepcopy(method))
    norms = {p for norm in cs.nn.task_norms(setup.trunk) for p in norm.parameters()}

    def losses(number: int) -> Losses:
        total = {}
        for task in TASKS:
            with cs.nn.active_task(setup.trunk, task):
                of_task = [setup.closure(number + n)(task) for n in range(micro_batches)]
            total[task] = sum(of_task[1:], of_task[0])
        return total

    def make(number: int) -> None:
        if way == "step":
            opt.step([setup.closure(number + n) for n in range(micro_batches)])
            return
        x, targets = setup.batches[number]
        opt.step_together(
            lambda run: {
                task: (setup.heads[task](z) - targets[TASKS.index(task)]).square().mean()
                for task, z in run(x).items()
            }
        )

    follow(opt, [0, 0, 0, 3], losses, make, lambda number: norms)


def test_the_previous_update_is_freed() -> None:
    """No buffer outlives `.grad`, with and without kept weights."""
    for every in (1, 3):
        network = Network()
        opt = network.start(cs.PCGrad(update_every=every))
        for number in range(2):
            before = [weakref.ref(p.grad) for p in network.trunk.parameters() if p.grad is not None]
            train(opt, network.losses(number))
        assert {grad() for grad in before} == {None}


def test_a_method_object_of_two_loops() -> None:
    """Each loop has its own task weights."""
    method = cs.CAGrad(update_every=4)
    networks = [Network(), Network()]
    opts = [network.start(method) for network in networks]
    weights: list[Tensor] = []
    for number in range(2):
        for n, (network, opt) in enumerate(zip(networks, opts, strict=True)):
            losses = network.losses(number).items()
            train(opt, {t: x * (1 + n) ** TASKS.index(t) for t, x in losses})
            weights.append(opt.report().task_weights)
    assert_equal(weights[:2], weights[2:])
    assert not torch.equal(*weights[:2])


def test_cached_weights_are_copies() -> None:
    network, buffer = Network(), torch.ones(3).double()
    opt = network.start(cs.UPGrad(update_every=3))
    opt.method.weights = lambda gramian, step: buffer  # type: ignore[method-assign]
    train(opt, network.losses(0))
    for number in (1, 2):
        buffer.fill_(7.0)
        train(opt, network.losses(number))
        assert opt.report().task_weights.tolist() == [1.0] * 3
        assert opt.report().weights_from == 0
        state = opt.state_dict()
        opt.load_state_dict(state)
        buffer = state["kept"][0]["weights"]


def test_a_state_of_other_groups_is_not_used() -> None:
    for groups, others in (("all", "layer"), ("layer", "all")):
        first, second = Network(), Network()
        opt, resumed = first.start(cs.UPGrad(groups, 9)), second.start(cs.UPGrad(others, 9))
        train(opt, first.losses(0))
        resumed.load_state_dict(opt.state_dict())
        resumed.backward(second.losses(1))
        assert resumed.report().weights_from == 1


@pytest.mark.parametrize("how", ["scaler", "backward"])
def test_factors_of_losses(how: str) -> None:
    """A factor scales the update, but changes neither task weights nor the trained network."""
    states = []
    for factor in (1.0, 64.0):
        scaler, network = torch.amp.GradScaler("cpu", init_scale=factor), Network()
        run = lambda loss, f=factor, **options: (f * loss).backward(**options)  # noqa: E731
        options = {"scaler": scaler} if how == "scaler" else {"backward": run}
        opt = network.start(cs.CAGrad(update_every=2), **options)
        for number in range(5):
            opt.backward(network.losses(number))
            if how == "scaler":
                scaler.step(opt.optimizer)
                scaler.update()
            else:
                for p in opt.optimizer.param_groups[0]["params"]:
                    p.grad /= factor
                opt.optimizer.step()
        states.append([network.trunk.state_dict(), opt.report().task_weights])
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    "weighting",
    [
        cs.FixedWeights({"depth": 2.0, "normals": 0.5, "edges": 3.0}),
        cs.UncertaintyWeights(dict.fromkeys(TASKS, "regression")),
        cs.SmoothTchebycheff(0.5, 1),
        cs.FAMO(reevaluate=False),
    ],
    ids=repr,
)
def test_weighted_losses(weighting: cs.Weighting) -> None:
    """Kept task weights apply to weighted losses, whose loss weights continue to change."""
    network, weighting = Network(), copy.deepcopy(weighting)
    learned = weighting.parameters()
    opt = network.start(Given(*THREE), nn.ParameterList(learned), weighting=weighting)
    opt.start_epoch(0)

    def losses(number: int) -> Losses:
        before = copy.deepcopy(weighting, {id(p): p for p in learned})
        step, total = cs.Step(number, tuple(TASKS)), {}
        step.known = {task: loss.detach() for task, loss in network.losses(number).items()}
        for task, loss in network.losses(number).items():
            extra = before.regularizer(task)
            total[task] = before.weigh(task, loss, step) + (0 if extra is None else extra)
        return total

    follow(opt, [0, 0, 0, 3, 3], losses, lambda n: train(opt, network.losses(n)))


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: cs.PCGrad(seed=3, update_every=3), lambda o: o.report().task_weights),
        (lambda: cs.GradVac(0.5, update_every=3), lambda o: o.report().task_weights),
        (lambda: cs.GradVac(beta=0.5, update_every=3), lambda o: o.method.state_dict()["targets"]),
        (
            lambda: cs.PCGrad(update_every=3),
            lambda o: torch.stack([w[0] for w in o.weighting.state_dict()["weights"].values()]),
        ),
    ],
    ids=["PCGrad's order", "GradVac's order", "GradVac's targets", "GradNorm's weights"],
)
def test_states_move_in_steps_that_solve(
    make: Callable[[], Any], state: Callable[..., Tensor]
) -> None:
    network, states = Network(), []
    opt = network.start(make(), weighting=cs.GradNorm())
    for number in range(7):
        train(opt, network.losses(number))
        states.append(state(opt).clone())
    changes = [not torch.equal(a, b) for a, b in pairwise(states)]
    assert changes == [False, False, True, False, False, True]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("method", "letter"),
    [
        (cs.PCGrad(seed=2, update_every=3), "."),
        (cs.GradVac(beta=0.3, update_every=3), "."),
        (cs.NashMTL(update_every=3, groups="layer"), "."),
        (cs.CAGrad(update_every=2), "f"),
    ],
    ids=repr,
)
def test_a_resumed_run_is_bit_equal(method: cs.Method, letter: str, stop: int) -> None:
    """A run that stops between two solutions resumes without an additional solution."""

    def trained(first: int, last: int, states: Sequence[Any] = ()) -> tuple[Any, ...]:
        network = Network()
        opt = network.start(copy.deepcopy(method), schedule=cs.Joint())
        parts = network.trunk, network.heads, opt.optimizer, opt
        for part, state in zip(parts, states, strict=bool(states)):
            part.load_state_dict(state)
        for number in range(first, last):
            network.make(opt, number, STEPS[letter])
        return parts

    states = copy.deepcopy([part.state_dict() for part in trained(0, stop)])
    resumed, whole = trained(stop, 6, states), trained(0, 6)
    assert_equal(*([part.state_dict() for part in of[:2]] for of in (resumed, whole)))
    reports = [of[3].report() for of in (resumed, whole)]
    assert_equal(*(report.task_weights for report in reports))
    assert reports[0].weights_from == reports[1].weights_from
    kept = copy.deepcopy(resumed[3]).state_dict()["kept"][0]
    assert kept["number"] == reports[1].weights_from


def test_a_resumed_run_learns_nothing_in_steps_with_kept_weights() -> None:
    """A resumed run checks graphs again, in a step where a task may reach more than before."""
    states = []
    for at in (None, 1):
        torch.manual_seed(0)
        trunk = nn.ModuleDict({"one": nn.Linear(3, 4), "own": nn.Linear(3, 4)})
        opt, x = optimizer_of(cs.UPGrad(update_every=3), trunk, tasks=AB), torch.randn(8, 3)
        for number in range(3):
            if number == at:
                state = copy.deepcopy(opt.state_dict())
                opt = optimizer_of(cs.UPGrad(update_every=3), trunk, tasks=AB)
                opt.load_state_dict(state)
            of_one, of_both = trunk["one"](x), trunk["one"](x) + trunk["own"](x)
            of_a = of_both if number else of_one
            train(opt, {"a": of_a.square().mean(), "b": (of_both - 1).square().mean()})
        states.append(opt.state_dict()["reach"])
    assert states[0] == states[1]


@pytest.mark.parametrize("groups", ["all", "layer"])
def test_reports_and_conflicts(groups: Any) -> None:
    network, counts, cosines = Network(), [], torch.empty(0)
    opt = network.start(cs.PCGrad(groups=groups, update_every=3))
    opt.count_conflicts()
    for number in range(7):
        train(opt, network.losses(number))
        report, conflicts = opt.report(), opt.conflicts()
        counts.append(int(conflicts.steps.max()))
        solved = number % 3 == 0
        cosines = conflicts.cosines if solved else cosines
        assert_equal(conflicts.cosines, cosines)
        names = {name.split("/")[0] for name in report.scalars()}
        assert {"task_weight", "loss", "phase", "surgery_ms"} <= names
        assert ({"cosine", "update_norm", "gradient_norm"} <= names) == solved
        assert (report.cosines is not None) == solved
        assert "task weight" in str(report)
    assert counts == [1, 1, 1, 2, 2, 2, 3]
    for method in (cs.Sum(), cs.GradDrop()):
        opt = (network := Network()).start(method)
        train(opt, network.losses(0))
        assert opt.report().weights_from is None


def test_steps_of_both_phases_count() -> None:
    network = Network()
    opt = network.start(cs.MGDA(update_every=3), schedule=cs.Mixed(2, 5, "step"))
    opt.start_epoch(1)
    solved: list[int] = []
    for number in range(12):
        phase = opt.phase
        opt.step(lambda task, n=number: network.losses(n)[task])
        if phase == 2 and (not solved or number - solved[-1] >= 3):
            solved.append(number)
        assert opt.report().phase == phase
        assert opt.report().weights_from == (solved[-1] if phase == 2 else None)
    assert len(solved) > 1


def test_a_step_that_fails_keeps_no_weights() -> None:
    network = Network()
    opt = network.start(cs.CAGrad(update_every=3))
    hook = opt.optimizer.register_step_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda task: network.losses(0)[task])
    hook.remove()
    make = lambda n: opt.step(lambda task: network.losses(n)[task])  # noqa: E731
    follow(opt, [0, 0, 0], network.losses, make)


@pytest.mark.parametrize("method", [cs.PCGrad, cs.GradVac, cs.UPGrad, cs.NashMTL])
def test_refused(method: Callable[..., cs.Method]) -> None:
    for value in (0, -3, 1.5, None):
        with pytest.raises((ValueError, TypeError), match="update_every must be"):
            method(update_every=value)
    setup = Setup()
    opt = setup.start(method(update_every=2))
    with pytest.raises(ValueError, match="update_every must be 1 in a captured step, got 2 from"):
        opt.capture(setup.closure(0))


@pytest.mark.parametrize("how", ["thawed", "frozen", "switched in the closure"])
@pytest.mark.parametrize("cut", range(1, 7))
def test_a_resumed_run_with_other_parameters_that_train(how: str, cut: int) -> None:
    """A resumed run solves in the same steps: the state lists what trained at the last solution."""
    results = []
    for at in (None, cut):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        heads = nn.ModuleDict({task: nn.Linear(4, 2) for task in TASKS})
        x = torch.randn(8, 7, 5)
        opt = optimizer_of(cs.UPGrad(update_every=3), trunk, heads)
        solved = []
        for number in range(8):
            if number == at:
                state = copy.deepcopy(opt.state_dict())
                trunk.requires_grad_(True)
                opt = optimizer_of(cs.UPGrad(update_every=3), trunk, heads)
                opt.load_state_dict(state)

            def loss(task: str, number: int = number) -> Tensor:
                if how.startswith("switched"):
                    trunk[0].requires_grad_(task == TASKS[0])
                return (heads[task](trunk(x[number])) - 1).square().mean()

            if not how.startswith("switched"):
                trunk[0].requires_grad_((number < 2) == (how == "frozen"))
            opt.step(loss)
            solved.append(opt.report().weights_from)
        results.append(solved)
    assert results[0] == results[1]
