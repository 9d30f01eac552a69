"""Loss weights from the losses of all tasks: against their definitions, written out in torch."""

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from loops import KINDS, STEPS, Loop, numbers
from networks import (
    BOTH_PHASES,
    TASKS,
    Setup,
    assert_equal,
    gradient_rows,
    problem,
    restore,
    saved,
    sgd_of,
    started,
    started_problem,
)
from rank_networks import Network, assert_near, both_phases
from ranks import Ranks, on_its_device
from recorder import Reads
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import cs_kernels as cs
from cs_kernels.step import Surgery

pytestmark = pytest.mark.loop

PER_EPOCH = 3
MINIMA = {"edges": -0.5}
Numbers = dict[str, Tensor]
Labels = Callable[[int], Sequence[str]]


class Tchebycheff:
    """K mu log sum exp(log(L / n) / mu), after sum log L."""

    mu, warmup = 0.3, 1

    def __init__(self) -> None:
        self.seen: dict[int, list[Numbers]] = {}

    def weighting(self) -> cs.Weighting:
        return cs.SmoothTchebycheff(self.mu, self.warmup)

    def weights(self, losses: Numbers, *, epoch: int, **_: object) -> Numbers:
        nadirs = {t: x for t in losses if (x := self._nadir(t, epoch)) is not None}
        vector = torch.stack([*losses.values()]).requires_grad_()
        of_task = dict(zip(losses, vector.unbind(), strict=True))
        if epoch <= self.warmup or not nadirs:
            loss = vector.log().sum()
        else:
            ratios = torch.stack([x / nadirs.get(t, x.detach()) for t, x in of_task.items()])
            loss = len(losses) * self.mu * torch.logsumexp(ratios.log() / self.mu, 0)
        return dict(zip(losses, torch.autograd.grad(loss, vector)[0].unbind(), strict=True))

    def _nadir(self, task: str, epoch: int) -> Tensor | None:
        """The mean in the first epoch from the warm-up's last on, that has ended."""
        for past in range(self.warmup, epoch):
            found = [losses[task] for losses in self.seen.get(past, []) if task in losses]
            if found:
                return torch.stack(found).mean()
        return None

    def observe(self, losses: Numbers, *, epoch: int, **_: object) -> None:
        self.seen.setdefault(epoch, []).append(losses)


class Famo:
    """Logits in a torch.optim.Adam, with gradients from autograd."""

    def __init__(self, *, reevaluate: bool = True, at_once: bool = False) -> None:
        self.reevaluate, self.at_once = reevaluate, at_once
        self.logits = {t: nn.Parameter(torch.zeros((), dtype=torch.float64)) for t in TASKS}
        self.adam = torch.optim.Adam(self.logits.values(), lr=0.025, weight_decay=0.01)

    def weighting(self) -> cs.Weighting:
        return cs.FAMO(reevaluate=self.reevaluate, minima=MINIMA)

    @staticmethod
    def _gap(task: str, loss: Tensor) -> Tensor:
        return loss - MINIMA.get(task, 0.0) + 1e-8

    def _learn(self, before: Numbers, after: Numbers) -> None:
        both = [task for task in after if task in before]
        if not both:
            return
        self.adam.zero_grad()
        z = torch.softmax(torch.stack([self.logits[t] for t in both]), 0)
        ratios = [self._gap(t, before[t]).log() - self._gap(t, after[t]).log() for t in both]
        (z * torch.stack(ratios)).sum().backward()
        self.adam.step()

    def weights(self, losses: Numbers, *, last: Numbers, whole: bool, **_: object) -> Numbers:
        if whole:  # As the authors' toy loop: before weighting.
            assert self.at_once
            self._learn(last, losses)
        gaps = torch.stack([self._gap(t, x) for t, x in losses.items()]).requires_grad_()
        z = torch.softmax(torch.stack([self.logits[t].detach() for t in losses]), 0)
        loss = (z * gaps.log()).sum() / (z / gaps.detach()).sum()
        return dict(zip(losses, torch.autograd.grad(loss, gaps)[0].unbind(), strict=True))

    def observe(self, losses: Numbers, *, after: Numbers, last: Numbers, **_: object) -> None:
        if self.reevaluate:
            self._learn(losses, after)
        elif not self.at_once:
            self._learn(last, losses)


class GradNorm:
    """|G_i - target_i| by autograd through the weights, torch.optim.Adam, the sum restored."""

    def __init__(self) -> None:
        self.of_task = {t: nn.Parameter(torch.ones((), dtype=torch.float64)) for t in TASKS}
        self.adam = torch.optim.Adam(self.of_task.values(), lr=0.025)
        self.first = Numbers()

    def weights(self, losses: Numbers, **_: object) -> Numbers:
        return {task: self.of_task[task].detach().clone() for task in losses}

    def observe(self, losses: Numbers, *, norms: Tensor | None, **_: object) -> None:
        self.first = {**losses, **self.first}
        if norms is None:
            return
        weights = [self.of_task[task] for task in losses]
        norms = torch.stack(weights) * norms
        rates = torch.stack([loss / self.first[task] for task, loss in losses.items()])
        targets = norms.detach().mean() * (rates / rates.mean()) ** 1.5
        self.adam.zero_grad()
        (norms - targets).abs().sum().backward(inputs=weights)
        before = torch.stack(weights).detach().sum()
        self.adam.step()
        with torch.no_grad():
            scale = before / sum(weights)
            for weight in weights:
                weight.mul_(scale)


Rule = Tchebycheff | Famo | GradNorm


def _some(number: int) -> list[str]:
    """Partial labels: the first step lacks a task, the warm-up's last epoch another one."""
    if number == 0:
        return TASKS[:2]
    if number // PER_EPOCH == 1:
        return TASKS[1:]
    return [TASKS, TASKS[:1], [TASKS[2], TASKS[0]]][number % 3]


def _all(number: int) -> list[str]:
    return TASKS


PARTIAL_LABELS = pytest.mark.parametrize("labels", [_all, _some], ids=["all", "some"])


def trained_by_hand(
    rule: Rule, way: str, labels: Labels = _all
) -> tuple[list[Tensor], list[Numbers]]:
    """The parameters after twelve steps in four epochs, and the weights of each step."""
    model, loss, *_ = problem(tasks=TASKS)
    sgd, last, history = sgd_of(model, lr=0.01), Numbers(), []
    for number in range(12):
        epoch = number // PER_EPOCH
        tasks = [task for task in TASKS if task in labels(number)]
        losses = {task: loss(task).detach() for task in tasks}
        # The norms of the gradients of unweighted losses.
        norms = gradient_rows([*model.trunk.parameters()], map(loss, tasks)).norm(dim=1)
        whole = way == "backward"
        found = rule.weights(losses, epoch=epoch, last=last, whole=True) if whole else Numbers()
        for task in labels(number):
            own = losses[task] = loss(task).detach()
            if not whole:
                known = {task: own} if way != "micro-batches" else {}
                all_losses = {t: {**last, **known}.get(t, own) for t in tasks}
                found[task] = rule.weights(all_losses, epoch=epoch, last=last, whole=False)[task]
            (found[task] * loss(task)).backward()
            if way == "sequential" or task == labels(number)[-1]:
                sgd.step()
                sgd.zero_grad()
        after = {task: loss(task).detach() for task in tasks}
        joint_norms = norms if way != "sequential" else None
        rule.observe(losses, epoch=epoch, after=after, last=last, norms=joint_norms)
        last |= losses
        history.append(found)
    return list(model.parameters()), history


def trained(
    weighting: cs.Weighting,
    way: str,
    labels: Labels = _all,
    method: cs.Method | None = None,
    order: Sequence[str] = TASKS,
    parts: int = 1,
) -> tuple[list[Tensor], list[Numbers]]:
    """The same by the package; the first step has one micro-batch."""
    model, loss, *_ = problem(tasks=TASKS)
    sgd, history = sgd_of(model, lr=0.01), []
    schedule = cs.Sequential() if way == "sequential" else cs.Joint()
    given = model, sgd, order, method or cs.Sum(), schedule
    opt = cs.MultiTaskOptimizer(*given, weighting=weighting)
    for number in range(12):
        opt.start_epoch(number // PER_EPOCH)
        if way == "backward":
            opt.backward({task: loss(task) for task in labels(number)})
            sgd.step()
        else:
            n = parts if number else 1
            opt.step([lambda task, n=n: loss(task) / n] * n, tasks=labels(number))
        report = opt.report()
        history.append({t: report.weighted_losses[t] / report.losses[t] for t in report.tasks})
    return list(model.parameters()), history


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


RULES: dict[str, Callable[[str], Rule]] = {
    "SmoothTchebycheff": lambda way: Tchebycheff(),
    "FAMO": lambda way: Famo(reevaluate=False, at_once=way == "backward"),
    "FAMO-again": lambda way: Famo(),
}


WAYS = ["backward", "joint", "sequential"]


@PARTIAL_LABELS
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in RULES for way in WAYS[name == "FAMO-again" :]]
)
def test_definitions(name: str, way: str, labels: Labels) -> None:
    rule = RULES[name](way)
    expected = trained_by_hand(rule, way, labels)
    assert_close(trained(rule.weighting(), way, labels), expected)
    spread = [max(w.values()) / min(w.values()) for w in expected[1] if len(w) > 1]
    assert max(spread) > 1.5


@pytest.mark.parametrize("name", RULES)
def test_micro_batches_weigh_by_the_last_step(name: str) -> None:
    """In four parts as in two; the first step has no last one."""
    rule = RULES[name]("micro-batches")
    expected = trained_by_hand(rule, "micro-batches")
    for parts in (2, 4):
        assert_close(trained(rule.weighting(), "micro-batches", parts=parts), expected)
    whole, _ = trained(rule.weighting(), "joint")
    assert any((a - b).abs().max() > 1e-6 for a, b in zip(whole, expected[0], strict=True))


class Ones(cs.GramianMethod):
    """The sum of the gradients, with one Gramian or one a layer."""

    def weights(self, gramian: Tensor, step: cs.Step | None = None) -> Tensor:
        return torch.ones_like(gramian[..., 0])


@PARTIAL_LABELS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", [cs.Sum(separate=True), Ones(), Ones("layer")], ids=repr)
def test_gradnorm_by_hand(way: str, labels: Labels, method: cs.Method) -> None:
    expected = trained_by_hand(GradNorm(), way, labels)
    weighting = cs.GradNorm()
    parameters, history = trained(weighting, way, labels, method)
    torch.testing.assert_close(parameters, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(history, expected[1], rtol=1e-12, atol=0)
    assert (max(history[-1].values()) > 1.05) == (way != "sequential")
    total = sum(float(state[0]) for state in weighting.state_dict()["weights"].values())
    assert total == pytest.approx(len(TASKS), rel=1e-12)


WEIGHTINGS: dict[str, Callable[[], cs.Weighting]] = {
    "RandomWeights": partial(cs.RandomWeights, 3),
    "SmoothTchebycheff": partial(cs.SmoothTchebycheff, 0.3, 1),
    "FAMO": partial(cs.FAMO, reevaluate=False),
    "FAMO-again": cs.FAMO,
    "GradNorm": cs.GradNorm,
}
EVERY = pytest.mark.parametrize("name", WEIGHTINGS)
BY_NAME = {**WEIGHTINGS, "UncertaintyWeights": partial(cs.UncertaintyWeights, KINDS)}


def start(
    weighting: cs.Weighting, method: cs.Method | None = None
) -> tuple[nn.Module, Callable[[str], Tensor], cs.MultiTaskOptimizer]:
    return started_problem(method or cs.Sum(), weighting=weighting, tasks=TASKS, lr=0.01)


@EVERY
@PARTIAL_LABELS
def test_the_order_of_the_tasks(name: str, labels: Labels) -> None:
    """With a Gramian method, whose update does not depend on it either."""
    results = [
        trained(WEIGHTINGS[name](), "joint", labels, cs.Sum(separate=True), order)
        for order in (TASKS, TASKS[::-1])
    ]
    assert_close(*results)


def _loop(name: str, schedule: cs.Schedule, **options: Any) -> Loop:
    method = cs.Sum(separate=True)
    return Loop(method, schedule, BY_NAME[name](), captured=False, **options)


@EVERY
@BOTH_PHASES
def test_a_resumed_run(name: str, schedule: cs.Schedule) -> None:
    """Bit by bit, from the middle of the epoch of the nadirs."""
    first = _loop(name, schedule).train(0, 6)
    states = saved(first.setup, first.opt)
    straight = first.train(6, STEPS)
    resumed = _loop(name, schedule)
    restore(copy.deepcopy(states), resumed.setup, resumed.opt)
    resumed.train(6, STEPS)
    assert_equal(resumed.setup.state(), straight.setup.state())
    assert numbers(resumed.opt) == numbers(straight.opt)


def values(**losses: float) -> Numbers:
    return {task: torch.tensor(loss).double() for task, loss in losses.items()}


LOSSES = values(depth=1.0, normals=2.0, edges=3.0)


def step_of(losses: Numbers, number: int = 0, **facts: Any) -> cs.Step:
    """A step that knows its losses from the beginning."""
    return cs.Step(number, tuple(losses), losses, known=losses, **facts)


@EVERY
def test_a_state_from_another_device(name: str) -> None:
    """Tensors move to the losses; a state on `meta` has no values to compare."""
    weighting = WEIGHTINGS[name]()
    weighting.start_epoch(0)
    weighting.observe(step_of(LOSSES, losses_after=LOSSES))
    there = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, weighting.state_dict())
    moved = {task: loss.to("meta") for task, loss in LOSSES.items()}
    step = cs.Step(losses=moved, tasks=tuple(TASKS))
    weighting.load_state_dict(there)
    assert weighting.weigh("depth", moved["depth"], step).device.type == "meta"
    weighting.observe(step)
    weighting.start_epoch(1)
    assert name == "RandomWeights" or weighting.captured_state()


@EVERY
@BOTH_PHASES
def test_nothing_is_read_on_the_host(name: str, schedule: cs.Schedule) -> None:
    """Neither in steps nor between epochs."""
    loop = _loop(name, schedule).train(0, 2)
    with Reads() as reads:
        loop.train(2, 10)
    assert reads.names == []


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """The product has one rounding; the state is kept in float64."""
    weighting = WEIGHTINGS[name]()
    weighting.start_epoch(0)
    for number in range(3):
        losses = {task: (loss + number / 3).to(dtype) for task, loss in LOSSES.items()}
        step = step_of(losses, number, losses_after=losses)
        for task in TASKS:
            weighted = weighting.weigh(task, losses[task], step)
            wide = weighting.weigh(task, losses[task].double(), step)
            assert weighted.dtype is dtype
            rtol = 0.501 * torch.finfo(dtype).eps
            torch.testing.assert_close(weighted.double(), wide, rtol=rtol, atol=0)
        weighting.observe(step)
    if name != "RandomWeights":
        assert all(x.dtype is torch.float64 for x in weighting.captured_state())


def _is_finite(weighting: cs.Weighting) -> bool:
    """All that later weights depend on; nadirs are infinite until they are known."""
    parts = {name: part for name, part in weighting.state_dict().items() if name != "nadirs"}
    return all(bool(x.isfinite().all()) for x in tree_leaves(parts) if isinstance(x, Tensor))


@EVERY
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite(name: str, wrong: float) -> None:
    """Its own step is spoilt, which a scaler would skip; neither the state nor later weights."""
    weighting = WEIGHTINGS[name]()
    model, loss, opt = start(weighting, cs.Sum(separate=True))
    kept = copy.deepcopy(model.state_dict())
    for number in range(8):
        opt.start_epoch(number // PER_EPOCH)
        factor = wrong if number in (0, 4) else 1.0
        opt.step(lambda task, x=factor: loss(task) * (x if task == "normals" else 1.0))
        weighted = opt.report().weighted_losses
        if number in (0, 4):
            assert not weighted["normals"].isfinite()
            assert number == 0 or _is_finite(weighting)
            model.load_state_dict(kept)
        else:
            assert all(x.isfinite() for x in weighted.values())
            kept = copy.deepcopy(model.state_dict())
    assert _is_finite(weighting)


def test_a_loss_that_is_nan_leaves_the_weights_of_other_tasks() -> None:
    """Its last loss takes its place."""
    weighting = cs.FAMO(reevaluate=False)
    weighting.observe(step_of(LOSSES))
    step = step_of({**LOSSES, **values(edges=torch.nan)}, 1)
    assert weighting.weigh("depth", LOSSES["depth"], step).isfinite()


def test_a_task_without_a_finite_loss_learns_nothing() -> None:
    """FAMO's other logits learn as if it had taken no part."""
    found = []
    for bad in (True, False):
        weighting = cs.FAMO()
        for number in range(10):
            losses = {t: x * 0.9**number for t, x in LOSSES.items()}
            after = {t: x * (0.8 + 0.1 * n) for n, (t, x) in enumerate(losses.items())}
            if number % 3 == 1:
                after["edges"] = after["edges"] * torch.inf
                if not bad:
                    del losses["edges"]
            weighting.observe(step_of(losses, number, losses_after=after))
        found.append(numbers(weighting)[0]["logits"])
    assert found[0] == found[1]
    assert found[0]["edges"][3] == 7 != found[0]["depth"][3] == 10


def test_a_step_that_fails_teaches_nothing() -> None:
    """FAMO weighs by logits that have learned from the step, and keeps them when it succeeds."""
    found = []
    for fails in (False, True):
        model, loss, opt = start(cs.FAMO(reevaluate=False))
        for number in range(6):
            if fails and number == 3:
                losses = {task: loss(task) for task in TASKS}
                losses["edges"].register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    opt.backward(losses)
            opt.backward({task: loss(task) for task in TASKS})
            opt.optimizer.step()
        found.append((list(model.parameters()), opt.weighting.state_dict()))
    assert_equal(*found)


def test_negative_losses_are_loud() -> None:
    """They have no logarithm: the weight is NaN, at any time."""
    for weighting in (cs.SmoothTchebycheff(warmup=0), cs.FAMO(), cs.FAMO(minima={"depth": -1.0})):
        for epoch in range(3):
            weighting.start_epoch(epoch)
            step = step_of({**LOSSES, **values(depth=-2.0)}, epoch)
            assert weighting.weigh("depth", step.losses["depth"], step).isnan()
            weighting.observe(step)
    step = step_of({**LOSSES, **values(depth=-0.5)}, 3)
    assert weighting.weigh("depth", step.losses["depth"], step).isfinite()


def test_weights_of_small_losses() -> None:
    """The weight of 1e-6 has no float16, its product has; that of zero is finite."""
    weighting = cs.SmoothTchebycheff()
    weighting.start_epoch(0)
    small, zero = torch.tensor(1e-6, dtype=torch.float16), torch.zeros((), requires_grad=True)
    assert weighting.weigh("a", small, step_of({"a": small})) == 1
    weighted = weighting.weigh("a", zero, step_of({"a": zero.detach()}))
    assert torch.autograd.grad(weighted, zero)[0].item() == pytest.approx(1e20)


def test_tchebycheff_begins_anew() -> None:
    """Going back into the warm-up forgets the nadirs; an epoch without losses has none."""
    weighting = cs.SmoothTchebycheff(mu=0.5, warmup=1)
    step, other = step_of(values(a=2.0, b=3.0)), step_of(values(a=8.0, b=1.0))

    def weight(epoch: int) -> float:
        weighting.start_epoch(epoch)
        weighting.start_epoch(epoch)
        return weighting.weigh("a", torch.tensor(1.0, dtype=torch.float64), other).item()

    assert weight(0) == 1 / 8
    weighting.observe(step)
    assert weight(1) == 1 / 8
    assert weight(2) == 1 / 8  # The losses of epoch 0 do not count, and epoch 1 had none.
    weighting.observe(step)
    share = 16 / (16 + 1 / 9)
    for epoch in (3, 4):
        assert weight(epoch) == pytest.approx(2 * share / 8)
    assert weight(1) == 1 / 8


@pytest.mark.parametrize("wrong", [0.0, -10.0])
def test_tchebycheff_without_a_positive_nadir(wrong: float) -> None:
    """The task counts with L = n until an epoch gives a positive one."""
    weighting = cs.SmoothTchebycheff(warmup=0)

    def epoch(number: int, **losses: float) -> list[float]:
        weighting.start_epoch(number)
        step = step_of(values(**losses))
        found = [float(weighting.weigh(t, loss, step)) for t, loss in step.losses.items()]
        weighting.observe(step)
        return found

    epoch(0, a=wrong, b=4.0)
    # log(L / n) is 0 for both: each has half of K = 2.
    assert epoch(1, a=3.0, b=4.0) == pytest.approx([1.0, 1.0])
    assert epoch(2, a=3.0, b=4.0) == pytest.approx([1.0, 1.0])
    assert epoch(3, a=6.0, b=4.0) == pytest.approx([4 / 3, 2 / 3])  # Twice its nadir of 3.


# --- what a step tells of its losses ---


class Noting(cs.Weighting):
    """Notes what is known."""

    def __init__(self) -> None:
        self.known: list[set[str]] = []

    def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
        assert not any(x.requires_grad for x in step.known.values())
        assert step.known.get(task, loss) == loss
        self.known.append(set(step.known))
        return loss


def test_known_losses() -> None:
    noting = Noting()
    _, loss, opt = start(noting, cs.PCGrad())

    def known(call: Callable[[object], object], given: object) -> list[set[str]]:
        noting.known.clear()
        call(given)
        return noting.known

    def losses() -> Numbers:
        return {task: loss(task) for task in TASKS}

    assert known(opt.step, loss) == [{task} for task in TASKS]
    assert known(opt.step, [loss, loss]) == [set()] * 6
    assert known(partial(opt.backward, update=False), losses()) == [set()] * 3
    assert known(opt.backward, losses()) == [set()] * 3
    opt.optimizer.step()
    assert known(opt.backward, losses()) == [set(TASKS)] * 3


@BOTH_PHASES
def test_losses_are_computed_again(schedule: cs.Schedule) -> None:
    """On the batch of the step, in the order of the call; nothing else of the step is another one.

    Random numbers, as of dropout, are those of the passes.
    """
    order, states, after = TASKS[::-1], [], []
    for reevaluate in (True, False):
        setup = Setup()
        opt = setup.start(cs.PCGrad(), schedule, weighting=cs.FAMO(reevaluate=reevaluate))

        def loss(task: str, batch: int, setup: Setup = setup) -> Tensor:
            return nn.functional.dropout(setup.closure(batch)(task).expand(9), 0.5).mean()

        closures = [partial(loss, batch=batch) for batch in (0, 1)]
        torch.manual_seed(5)
        opt.step(closures, order)
        states.append([*setup.state(), torch.get_rng_state()])
        after.append(opt._engine.monitor.done.step.losses_after)
        again = {}
        with torch.no_grad():
            for task in order:
                with cs.nn.active_task(setup.trunk, task):
                    again[task] = closures[0](task) + closures[1](task)
    assert_equal(*states)
    assert_equal(after[0], again)
    assert after[1] == {}


def test_a_closure_that_fails_after_the_step() -> None:
    """The step has been made and counts; buffers are as after it, and the next step works."""
    setup, opt = started(cs.PCGrad(), weighting=cs.FAMO())
    calls = []

    def closure(task: str) -> Tensor:
        calls.append((task, torch.is_grad_enabled()))
        if len(calls) == 5:
            raise ArithmeticError
        return setup.closure(0)(task)

    with pytest.raises(ArithmeticError) as caught:
        opt.step(closure)
    if sys.version_info >= (3, 11):
        assert "without gradients; with reevaluate=False" in caught.value.__notes__[0]
    other, reference = started(cs.PCGrad(), weighting=cs.FAMO())
    reference.step(other.closure(0))
    assert_equal(setup.state(), other.state())
    assert opt.state_dict()["steps"] == 1
    assert all(logit[3] == 0 for logit in numbers(opt.weighting)[0]["logits"].values())
    assert calls == [*((task, True) for task in TASKS), *((task, False) for task in TASKS[:2])]
    opt.step(closure)


def test_modules_that_first_run_in_a_later_step() -> None:
    """Their statistics are of the training passes alone, as without FAMO."""
    counts = []
    for weighting in (cs.FAMO(), cs.EqualWeights()):
        setup = Setup()
        extra = nn.BatchNorm2d(6).double()
        sgd = sgd_of(setup.trunk, setup.heads, extra)
        opt = cs.MultiTaskOptimizer(setup.trunk, sgd, TASKS, cs.PCGrad(), weighting=weighting)
        for number in range(5):
            x = torch.randn(4, 6, 2, 2, generator=torch.Generator().manual_seed(number)).double()

            def closure(task: str, number: int = number, x: Tensor = x) -> Tensor:
                late = number >= 2 and task == TASKS[0]
                return setup.closure(number)(task) + (extra(x).square().mean() if late else 0)

            opt.step(closure)
        assert extra.num_batches_tracked == 3
        counts.append(extra.running_mean.clone())
    assert torch.equal(*counts)


def test_autocast_around_a_step() -> None:
    """Its cache does not keep the weights of the losses after the step."""
    model = problem(tasks=TASKS)[0].float()
    opt = cs.MultiTaskOptimizer(model, sgd_of(model), TASKS, cs.PCGrad(), weighting=cs.FAMO())
    x = torch.ones(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        opt.step(lambda task: model(x, task).float().square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all((model(x, task) == 0).all() for task in TASKS)


def test_losses_cannot_be_computed_again() -> None:
    _, loss, opt = start(cs.FAMO(), cs.PCGrad())
    losses = {task: loss(task) for task in TASKS}
    before = numbers(opt)
    for call, given, where in (
        (opt.backward, losses, "after backward"),
        (opt.capture, loss, "in a captured step"),
    ):
        message = rf"not compute losses again {where}.*FAMO\(.*use FAMO\(reevaluate=False"
        with pytest.raises(ValueError, match=message):
            call(given)
        assert numbers(opt) == before
    losses["depth"].backward()  # The graph is whole.


def _refused_on_ranks(rank: int, size: int) -> str:
    with pytest.raises(ValueError, match="must not compute losses again on 2 ranks") as raised:
        Network("replicated", rank, size).start(cs.PCGrad(), weighting=cs.FAMO())
    return str(raised.value)


@pytest.mark.ranks
def test_losses_cannot_be_computed_again_on_ranks(pools: Callable[[int], Ranks]) -> None:
    first, second = pools(2).run(_refused_on_ranks, 2)
    assert first == second


@BOTH_PHASES
@pytest.mark.parametrize("name", ["RandomWeights", "GradNorm", "UncertaintyWeights"])
def test_micro_batches_and_a_scaler_change_nothing(name: str, schedule: cs.Schedule) -> None:
    """Draws and Gramians are those of the whole batch, and log sigma is added once."""
    states = []
    for parts, scaler in ((1, None), (4, None), (1, torch.amp.GradScaler("cpu"))):
        loop = _loop(name, schedule, scaler=scaler)
        loop.setup.trunk.eval()
        for parameter in loop.opt.weighting.parameters():
            parameter.data = parameter.data.double()
        closures = [lambda task, n=parts, f=loop._loss: f(task) / n] * parts
        loop.step = partial(loop.opt.step, closures)
        loop.train(0, 6)
        states.append((loop.setup.state(grads=False), loop.opt.weighting.state_dict()))
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-12, atol=1e-13)


# --- random weights ---


def test_random_weights_are_a_softmax_of_normal_numbers() -> None:
    """They sum to one; their logarithms' differences have the variance 2."""
    weighting, one = cs.RandomWeights(seed=5), torch.tensor(1.0, dtype=torch.float64)
    steps = [cs.Step(number, tuple(TASKS)) for number in range(4000)]
    drawn = torch.stack([torch.stack([weighting.weigh(t, one, s) for t in TASKS]) for s in steps])
    assert_close(drawn.sum(1), torch.ones(4000, dtype=torch.float64))
    logs = drawn.log()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        difference = (logs[:, i] - logs[:, j]) / 2**0.5
        assert abs(difference.mean()) < 4 / 4000**0.5
        assert abs(difference.var() - 1) < 4 * (2 / 4000) ** 0.5
        assert abs((difference.abs() < 0.6745).double().mean() - 0.5) < 2 / 4000**0.5
    of_steps = (logs[1:, 0] - logs[1:, 1]) * (logs[:-1, 0] - logs[:-1, 1])
    assert abs(of_steps.mean()) < 4 * 2 / 4000**0.5
    assert len(set(map(tuple, drawn.tolist()))) == 4000


def test_random_weights_depend_on_seed_step_and_names() -> None:
    one, weightings = torch.tensor(1.0), [cs.RandomWeights(0), cs.RandomWeights(1)]

    def ratio(tasks: str, seed: int = 0, number: int = 7) -> float:
        """The ratio of the weights of the two tasks that are the first by their names."""
        weighting, step = weightings[seed], cs.Step(number, tuple(tasks.split()))
        first, second = (weighting.weigh(task, one, step) for task in sorted(step.tasks)[:2])
        return (first / second).item()

    assert ratio("b c a") == pytest.approx(ratio("a b"))
    for other in (ratio("a b", seed=1), ratio("a b", number=8), ratio("a ba"), ratio("b ba")):
        assert other != pytest.approx(ratio("a b"))


def test_random_weights_are_not_captured() -> None:
    _, opt = started(weighting=cs.RandomWeights(4))
    with pytest.raises(ValueError, match=r"in a captured step, got RandomWeights\(seed=4\)"):
        opt.capture(lambda task: torch.ones(()))


# --- GradNorm ---


def learned(
    weighting: cs.GradNorm, losses: dict[str, float], squares: Sequence[float]
) -> list[float]:
    """The weights after a step whose gradients are orthogonal and have these squared norms."""
    gramian = torch.diag(torch.tensor(squares, dtype=torch.float64))
    weighting.observe(step_of(values(**losses), surgery=Surgery(tuple(losses), gramian=gramian)))
    return [float(state[0]) for state in weighting.state_dict()["weights"].values()]


def test_gradnorm_weights_stay_positive() -> None:
    """A task whose gradient should be far smaller than it is: Adam would go below zero."""
    weighting = cs.GradNorm(alpha=3.0, lr=0.5)
    weights, least = [1.0, 1.0], []
    for number in range(30):
        losses = {"a": 1.0 if number == 0 else 1e-3, "b": 1.0}
        weights = learned(weighting, losses, [weight**2 for weight in weights])
        least.append(min(weights))
        assert sum(weights) == pytest.approx(2)
    assert 0 < min(least) < 5e-3


def test_gradnorm_learns_nothing_from_a_loss_that_has_changed_its_sign() -> None:
    weighting, states = cs.GradNorm(alpha=2.0), []  # The square of a negative ratio is positive.
    for loss in (1.0, 0.9, -0.5, 0.8):
        learned(weighting, {"a": loss, "b": 2.0, "c": 1.0}, [1.0, 4.0, 9.0])
        states.append(numbers(weighting)[0]["weights"])
    assert states[1] == states[2] != states[3] != states[0] != states[1]


@pytest.mark.parametrize("first", [0.0, -1.0])
def test_gradnorm_begins_with_a_positive_loss(first: float) -> None:
    """A first loss of 0, say without labels: the weights learn from the next step on."""
    weighting = cs.GradNorm()
    assert learned(weighting, {"a": first, "b": 2.0}, [4.0, 1.0]) == [1.0, 1.0]
    weights = learned(weighting, {"a": 3.0, "b": 2.0}, [4.0, 1.0])
    assert weights[0] < 1 < weights[1]
    assert weighting.state_dict()["first"] == {"a": 3.0, "b": 2.0}


# --- many ranks ---


def _on_ranks(rank: int, size: int, kind: str, name: str) -> list[Any]:
    """Alone, two micro-batches; all have losses before the first step."""
    network = Network(kind, rank, size)
    weighting = WEIGHTINGS[name]()
    schedule = both_phases() if name != "GradNorm" else None
    opt = network.start(cs.Sum(separate=True), schedule, weighting=weighting)
    opt.start_epoch(0)
    weighting.observe(step_of(values(depth=2.0, normals=5.0, edges=1.0)))
    found = []
    halves = [slice(0, 6), slice(6, 12)] if kind == "alone" else [slice(None)]
    for step in range(8):
        opt.start_epoch(1 + step // 4)
        loss = partial(network.loss, step)
        found.append(opt.step([lambda t, s=s, f=loss: f(t, s) / len(halves) for s in halves]))
    return [network.state(), found, weighting.state_dict()]


@pytest.mark.ranks
@pytest.mark.each
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@pytest.mark.parametrize("name", [name for name in WEIGHTINGS if name != "FAMO-again"])
def test_ranks_weigh_as_one_process(pools: Callable[[int], Ranks], kind: str, name: str) -> None:
    first, *others = pools(2).run(_on_ranks, 2, kind, name)
    for other in others:
        assert_equal(other, first)
    expected = on_its_device(0, _on_ranks, 2, "alone", name)
    assert_near(first[:2], expected[:2])
    torch.testing.assert_close(first[2], expected[2], rtol=1e-4, atol=1e-5)


# --- options ---

NEEDS_A_GRAMIAN = r"a Gramian method for GradNorm\(.*Sum\(separate=T"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cs.RandomWeights(-1), ValueError, r"seed must lie in \[0, 2\^63\), got -1"),
        (lambda: cs.RandomWeights(1.5), TypeError, "seed must be an integer, got 1.5"),
        (lambda: cs.SmoothTchebycheff(mu=0), ValueError, "mu must be positive and finite, got 0"),
        (lambda: cs.SmoothTchebycheff(warmup=-1), ValueError, "warmup must be at least 0, got -1"),
        (lambda: cs.FAMO(lr=float("nan")), ValueError, "lr must be positive and finite, got nan"),
        (lambda: cs.FAMO(decay=-1), ValueError, "decay must be finite and at least 0, got -1"),
        (lambda: cs.FAMO(minima=[0.0]), TypeError, r"minima must be a mapping.*\[0.0\]"),
        (lambda: cs.FAMO(minima={"a": "x"}), ValueError, "minima must be finite, got 'x' for 'a'"),
        (
            lambda: started(weighting=cs.FAMO(minima={"a": 0.5})),
            ValueError,
            r"minima must be of tasks among \['depth', 'normals', 'edges'\], got 'a'",
        ),
        (lambda: cs.GradNorm(alpha=-0.5), ValueError, "alpha must be finite and at least 0"),
        (lambda: cs.GradNorm(lr=0), ValueError, "lr must be positive and finite, got 0"),
        *(
            (partial(started, method, weighting=cs.GradNorm()), ValueError, NEEDS_A_GRAMIAN)
            for method in (cs.Sum(), cs.GradDrop(), cs.ConnectionStrength())
        ),
    ],
)
def test_options(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_representations() -> None:
    """They are compared between ranks, and with those of captured steps."""
    for kind in (cs.RandomWeights, cs.SmoothTchebycheff, cs.FAMO, cs.GradNorm):
        parameters = inspect.signature(kind).parameters
        shown = repr(kind(**({"minima": {"a": 1.0}} if kind is cs.FAMO else {})))
        assert shown.startswith(kind.__name__)
        assert all(f"{name}=" in shown for name in parameters)


def test_first_micro_batches_of_backward_weigh_each_task_by_its_own_loss() -> None:
    """No other loss is known; in the warm-up, a loss times its weight is 1."""
    _, loss, opt = started_problem(cs.Sum(), weighting=cs.SmoothTchebycheff(0.3, 1))
    opt.start_epoch(0)
    for update in (False, True):
        opt.backward({task: loss(task) for task in ("a", "b")}, update=update)
    weighted = opt.report().weighted_losses
    assert [float(x) for x in weighted.values()] == pytest.approx([2.0, 2.0])
