"""Weightings against their definitions in torch, and properties that all of them share."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from loops import numbers
from networks import (
    AB,
    BOTH_PHASES,
    TASKS,
    Setup,
    assert_equal,
    optimizer_of,
    problem,
    refused,
    sgd_of,
    started,
    started_problem,
)
from rank_networks import Network, both_phases, on_ranks
from recorder import Reads
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import cs_kernels as cs
from cs_kernels.step import Surgery

pytestmark = pytest.mark.loop

PER_EPOCH = 3
KINDS = {"depth": "regression", "normals": "regression", "edges": "classification"}
MINIMA = {"edges": -0.5}
ONE = torch.tensor(1.0).double()
Numbers = dict[str, Tensor]


def values(**losses: float) -> Numbers:
    return {task: torch.tensor(loss).double() for task, loss in losses.items()}


def step_of(losses: Numbers, number: int = 0, **facts: Any) -> cs.Step:
    """A step whose losses are known before its backward passes."""
    return cs.Step(number, tuple(losses), losses, known=losses, **facts)


def steps_of(labels: str = "all") -> list[cs.Step]:
    """Four epochs; losses before and after each step are random; steps have 0, 1 or 2 Gramians."""
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = []
    for number in range(4 * PER_EPOCH):
        # With some labels, the first step lacks a task, the warm-up's last epoch another one.
        some = TASKS[:2] if not number else TASKS[1:] if number // PER_EPOCH == 1 else TASKS[::2]
        tasks = TASKS if labels == "all" or number % 3 == 2 else some
        losses, after = (dict(zip(TASKS, (draw(3) + 0.2).unbind(), strict=True)) for _ in range(2))
        losses, after = ({task: of[task] for task in tasks} for of in (losses, after))
        gramian = torch.diag_embed(draw(*[(2, len(tasks)), (len(tasks),)][number % 2]))
        surgery = Surgery(tuple(tasks), gramian=None if number % 4 == 3 else gramian)
        steps.append(step_of(losses, number, losses_after=after, surgery=surgery))
    return steps


def known_losses(known: str, step: cs.Step, task: str) -> Numbers:
    """The losses that are known before a task's backward pass: all, its own, or none."""
    return {"all": step.losses, "own": {task: step.losses[task]}, "none": {}}[known]


def weights_of(
    weighting: cs.Weighting, steps: Iterable[cs.Step], known: str = "all"
) -> list[Numbers]:
    """The weights in each step, requested in the order of a training loop."""
    history = []
    for step in steps:
        weighting.start_epoch(step.number // PER_EPOCH)
        weights = {}
        for task, loss in step.losses.items():
            step.known = known_losses(known, step, task)
            weights[task] = weighting.weigh(task, loss, step) / loss
        weighting.observe(step)
        history.append(weights)
    return history


class Tchebycheff:
    """The loss is K mu log sum exp(log(L / n) / mu), and sum log L in the warm-up."""

    mu, warmup = 0.3, 1

    def __init__(self, known: str) -> None:
        self.seen: dict[int, list[Numbers]] = {}

    def weights(self, losses: Numbers, epoch: int) -> Numbers:
        vector = torch.stack([*losses.values()]).requires_grad_()
        nadirs = [self._nadir(task, epoch) for task in losses]
        if epoch <= self.warmup or all(nadir is None for nadir in nadirs):
            loss = vector.log().sum()
        else:
            pairs = zip(vector, nadirs, strict=True)
            ratios = torch.stack([x / (x.detach() if n is None else n) for x, n in pairs])
            loss = len(losses) * self.mu * torch.logsumexp(ratios.log() / self.mu, 0)
        return dict(zip(losses, torch.autograd.grad(loss, vector)[0].unbind(), strict=True))

    def _nadir(self, task: str, epoch: int) -> Tensor | None:
        """The mean loss in the first complete epoch with losses, from the last warm-up epoch on."""
        for past in range(self.warmup, epoch):
            if losses := [x[task] for x in self.seen.get(past, []) if task in x]:
                return torch.stack(losses).mean()
        return None

    def observe(self, step: cs.Step) -> None:
        self.seen.setdefault(step.number // PER_EPOCH, []).append(step.losses)


class Famo:
    """torch.optim.Adam on logits, with autograd's gradients; z / D is the gradient of z log D."""

    def __init__(self, known: str, reevaluates: bool = False) -> None:
        self.reevaluates, self.at_once = reevaluates, known == "all" and not reevaluates
        self.last = Numbers()
        self.logits = {t: nn.Parameter(torch.zeros(()).double()) for t in TASKS}
        self.adam = torch.optim.Adam(self.logits.values(), lr=0.025, weight_decay=0.01)

    @staticmethod
    def _gap(task: str, loss: Tensor) -> Tensor:
        return loss - MINIMA.get(task, 0.0) + 1e-8

    def _learn(self, before: Numbers, after: Numbers) -> None:
        if both := [task for task in after if task in before]:
            self.adam.zero_grad()
            z = torch.softmax(torch.stack([self.logits[t] for t in both]), 0)
            ratios = [self._gap(t, before[t]).log() - self._gap(t, after[t]).log() for t in both]
            (z * torch.stack(ratios)).sum().backward()
            self.adam.step()

    def weights(self, losses: Numbers, epoch: int) -> Numbers:
        if self.at_once:  # Like the authors' toy loop, learns before weighting.
            self._learn(self.last, losses)
        gaps = torch.stack([self._gap(t, x) for t, x in losses.items()]).requires_grad_()
        z = torch.softmax(torch.stack([self.logits[t].detach() for t in losses]), 0)
        loss = (z * gaps.log()).sum() / (z / gaps.detach()).sum()
        return dict(zip(losses, torch.autograd.grad(loss, gaps)[0].unbind(), strict=True))

    def observe(self, step: cs.Step) -> None:
        if self.reevaluates:
            self._learn(step.losses, step.losses_after)
        elif not self.at_once:
            self._learn(self.last, step.losses)
        self.last |= step.losses


class GradNorm:
    """Weights minimize |G_i - target_i| by autograd and torch.optim.Adam, and keep their sum."""

    def __init__(self, known: str) -> None:
        self.by_task = {t: nn.Parameter(torch.ones(()).double()) for t in TASKS}
        self.adam = torch.optim.Adam(self.by_task.values(), lr=0.025)
        self.first = Numbers()

    def weights(self, losses: Numbers, epoch: int) -> Numbers:
        return {task: self.by_task[task].detach().clone() for task in losses}

    def observe(self, step: cs.Step) -> None:
        self.first = {**step.losses, **self.first}
        if step.surgery.gramian is None:
            return
        weights = [self.by_task[task] for task in step.losses]
        squares = step.surgery.gramian.reshape(-1, *[len(weights)] * 2).sum(0).diagonal()
        joined = torch.stack(weights)
        norms = squares.sqrt() * (joined / joined.detach())
        rates = torch.stack([loss / self.first[task] for task, loss in step.losses.items()])
        targets = norms.detach().mean() * (rates / rates.mean()) ** 1.5
        self.adam.zero_grad()
        (norms - targets).abs().sum().backward(inputs=weights)
        before = joined.detach().sum()
        self.adam.step()
        with torch.no_grad():
            scale = before / sum(weights)
            for weight in weights:
                weight.mul_(scale)


RULES: dict[str, tuple[Callable[[str], Any], Callable[[], cs.Weighting]]] = {
    "SmoothTchebycheff": (Tchebycheff, partial(cs.SmoothTchebycheff, 0.3, 1)),
    "FAMO": (Famo, partial(cs.FAMO, reevaluate=False, minima=MINIMA)),
    "FAMO-again": (partial(Famo, reevaluates=True), partial(cs.FAMO, minima=MINIMA)),
    "GradNorm": (GradNorm, cs.GradNorm),
}


@pytest.mark.parametrize("labels", ["all", "some"])
@pytest.mark.parametrize("known", ["all", "own", "none"])
@pytest.mark.parametrize("name", RULES)
def test_definitions(name: str, known: str, labels: str) -> None:
    rule, weighting = RULES[name][0](known), RULES[name][1]()
    last, expected = Numbers(), []
    for step in steps_of(labels):
        weights, epoch = {}, step.number // PER_EPOCH
        for task, own in step.losses.items():
            losses = {t: last.get(t, own) for t in step.losses} | known_losses(known, step, task)
            if task not in weights:
                found = rule.weights(losses, epoch)
                weights |= found if known == "all" else {task: found[task]}
        rule.observe(step)
        last |= step.losses
        expected.append(weights)
    history = weights_of(weighting, steps_of(labels), known)
    torch.testing.assert_close(history, expected, rtol=1e-12, atol=1e-12)
    assert max(max(w.values()) / min(w.values()) for w in history) > 1.05


WEIGHTINGS: dict[str, Callable[[], cs.Weighting]] = {
    "RandomWeights": partial(cs.RandomWeights, 3),
    "DynamicWeightAverage": cs.DynamicWeightAverage,
    "SmoothTchebycheff": partial(cs.SmoothTchebycheff, 0.3, 1),
    "FAMO": partial(cs.FAMO, reevaluate=False),
    "FAMO-again": cs.FAMO,
    "GradNorm": cs.GradNorm,
}
EVERY = pytest.mark.parametrize("name", WEIGHTINGS)
STATEFUL = pytest.mark.parametrize("name", [*WEIGHTINGS][2:])


def converted(steps: list[cs.Step], change: Callable[[Tensor], Tensor]) -> list[cs.Step]:
    """Changes the losses of the steps."""
    for step in steps:
        step.losses = {task: change(loss) for task, loss in step.losses.items()}
        step.losses_after = {task: change(loss) for task, loss in step.losses_after.items()}
    return steps


@EVERY
@pytest.mark.parametrize("labels", ["all", "some"])
def test_the_order_of_the_tasks(name: str, labels: str) -> None:
    steps = steps_of(labels)
    for step in steps:
        step.tasks, step.losses = step.tasks[::-1], dict(reversed(step.losses.items()))
        if step.surgery.gramian is not None:
            rows, gramian = step.surgery.rows[::-1], step.surgery.gramian.flip(-1, -2)
            step.surgery = Surgery(rows, gramian=gramian)
    results = [weights_of(WEIGHTINGS[name](), given) for given in (steps, steps_of(labels))]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@EVERY
@pytest.mark.parametrize("first", [4, 5, 7])
def test_a_resumed_run(name: str, first: int) -> None:
    """A resumed run has the same bits, even from the middle of the epoch that sets the nadirs."""
    weighting, resumed = WEIGHTINGS[name](), WEIGHTINGS[name]()
    weights_of(weighting, steps_of()[:first], "own")
    weights_of(resumed, steps_of("some"))
    state = weighting.state_dict()
    before = copy.deepcopy(state)
    resumed.load_state_dict(state)
    results = [weights_of(w, steps_of()[first:], "own") for w in (weighting, resumed)]
    assert_equal(*results)
    assert numbers(weighting) == numbers(resumed)
    assert numbers(state) == numbers(before)  # Later steps have not changed the saved state.


@STATEFUL
def test_nothing_is_read_on_the_host(name: str) -> None:
    """Tensors that a CUDA graph reads are updated in place."""
    weighting = WEIGHTINGS[name]()
    weights_of(weighting, steps_of()[:2])
    with Reads() as reads:
        state = weighting.captured_state()
        weights_of(weighting, steps_of()[2:])
    assert reads.names == []
    tensors = [x for x in tree_leaves(weighting.state_dict()) if isinstance(x, Tensor)]
    assert_equal(state, tensors)


@EVERY
def test_a_state_from_another_device(name: str) -> None:
    """Tensors move to the losses' device; a state on `meta` has no values to compare."""
    weighting = WEIGHTINGS[name]()
    weights_of(weighting, steps_of()[:4])
    weighting.load_state_dict(
        tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, weighting.state_dict())
    )
    (step,) = converted(steps_of()[4:5], lambda loss: loss.to("meta"))
    step.surgery = Surgery()
    weights = weights_of(weighting, [step])[0]
    assert {weight.device.type for weight in weights.values()} == {"meta"}
    if name != "DynamicWeightAverage":  # It reads the means of a finished epoch.
        weighting.start_epoch(2)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Products round only once; the state is in float64."""
    weighting = WEIGHTINGS[name]()
    for step in converted(steps_of(), lambda loss: loss.to(dtype)):
        step.known = step.losses
        weighting.start_epoch(step.number // PER_EPOCH)
        for task, loss in step.losses.items():
            weighted = weighting.weigh(task, loss, step)
            wide = weighting.weigh(task, loss.double(), step)
            assert weighted.dtype is dtype
            rtol = 0.501 * torch.finfo(dtype).eps
            torch.testing.assert_close(weighted.double(), wide, rtol=rtol, atol=0)
        weighting.observe(step)
    if name != "RandomWeights":
        assert all(x.dtype is torch.float64 for x in weighting.captured_state())


@EVERY
@pytest.mark.parametrize("known", ["all", "own"])
@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_a_non_finite_loss(name: str, known: str, wrong: float) -> None:
    """Such a loss spoils neither other tasks' weights nor the state, even in the first step."""
    weighting = WEIGHTINGS[name]()
    steps = steps_of()
    for step in (steps[0], steps[4]):
        step.losses["normals"] = step.losses_after["normals"] = ONE * wrong
    history = weights_of(weighting, steps[:5], known)
    # Nadirs are infinite until they are known.
    state = {name: part for name, part in weighting.state_dict().items() if name != "nadirs"}
    assert all(x.isfinite().all() for x in tree_leaves(state) if isinstance(x, Tensor))
    history += weights_of(weighting, steps[5:], known)
    for step, weights in zip(steps, history, strict=True):
        assert all(w.isfinite() for t, w in weights.items() if step.losses[t].isfinite())


@BOTH_PHASES
@pytest.mark.parametrize("kind", [cs.RandomWeights, cs.GradNorm, cs.UncertaintyWeights])
def test_micro_batches_and_a_scaler_change_nothing(
    kind: type[cs.Weighting], schedule: cs.Schedule
) -> None:
    """Draws and Gramians belong to the whole batch, and log sigma is added once."""
    states = []
    for way in ("plain", "parts", "scaled", *["backward"] * isinstance(schedule, cs.Joint)):
        weighting = kind(*([KINDS] if kind is cs.UncertaintyWeights else []))
        model, loss, *_ = problem(tasks=TASKS)
        sgd = sgd_of(model, nn.ParameterList(weighting.parameters()).double(), lr=0.01)
        options = {"scaler": torch.amp.GradScaler("cpu") if way == "scaled" else None}
        given = model, sgd, TASKS, cs.Sum(separate=True), schedule
        opt = cs.MultiTaskOptimizer(*given, weighting=weighting, **options)
        parts = 1 if way in ("plain", "scaled") else 3
        for _ in range(4):
            if way == "backward":
                for n in range(parts):
                    opt.backward({t: loss(t) / parts for t in TASKS}, update=n + 1 == parts)
                sgd.step()
            else:
                opt.step([lambda task, f=loss, n=parts: f(task) / n] * parts)
        states.append((model.state_dict(), weighting.state_dict()))
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-12, atol=1e-13)


def test_representations() -> None:
    """Ranks and captured steps compare weightings by their representations."""
    for make in WEIGHTINGS.values():
        kind = type(make())
        shown = repr(cs.FAMO(minima={"a": 1.0}) if kind is cs.FAMO else make())
        assert shown.startswith(kind.__name__)
        assert all(f"{name}=" in shown for name in inspect.signature(kind).parameters)


@BOTH_PHASES
def test_uncertainty_weights(schedule: cs.Schedule) -> None:
    """L / (2 s^2) + log s or L / s^2 + log s; each log s starts at 0 and follows its own loss."""
    weighting, setup = cs.UncertaintyWeights(KINDS), Setup()
    setup.optimizer = torch.optim.SGD([*setup.parameters(), *weighting.parameters()], lr=0.1)
    losses = setup.start(schedule=schedule, weighting=weighting).step(setup.closure(0))
    for task, log_sigma in weighting.log_sigma.items():
        factor = 1 if KINDS[task] == "regression" else 2
        expected = -0.1 * (1 - factor * losses[task])
        torch.testing.assert_close(log_sigma.detach().double(), expected.double())
        # s^2 = L or 2 L is the minimum.
        log_sigma.data.fill_(0.5 * math.log(3 * factor))
        log_sigma.grad = None
        (weighting.weigh(task, 3 * ONE, cs.Step()) + weighting.regularizer(task)).backward()
        assert abs(log_sigma.grad.item()) < 1e-6


def test_uncertainty_weights_of_a_loss_in_bfloat16() -> None:
    """The learned weights stay in float32, and the loss in bfloat16."""
    weighting = cs.UncertaintyWeights({"a": "regression"})
    x = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    (weighting.weigh("a", x * 2, cs.Step()) + weighting.regularizer("a")).backward()
    assert x.grad.dtype is torch.bfloat16
    assert weighting.log_sigma["a"].grad.item() == -1.0


def test_dynamic_weight_average() -> None:
    """Weights are K exp(r / T) / sum exp(r / T); r = (1/2, 1) after means (4, 2) and (2, 2)."""
    weighting = cs.DynamicWeightAverage(temperature=0.5)
    equal, shares = {"a": 1.0, "b": 1.0}, {"a": math.exp(1.0), "b": math.exp(2.0)}
    fitted = {task: 2 * share / sum(shares.values()) for task, share in shares.items()}
    for epoch, expected, observed in (
        (0, equal, [values(a=3.0, b=1.0), values(a=5.0, b=3.0)]),
        (1, equal, [values(a=2.0, b=2.0), values(b=math.inf), values(a=math.nan)]),
        *((epoch, fitted, []) for epoch in (2, 2, 3)),  # Epochs without losses change nothing.
        (4, fitted, [values(a=8.0, b=8.0)]),
        (5, equal, []),  # r = (4, 4).
    ):
        weighting.start_epoch(epoch)
        weights = {t: weighting.weigh(t, ONE, cs.Step()).item() for t in "ab"}
        assert weights == pytest.approx(expected)
        for losses in observed:
            weighting.observe(step_of(losses))


def test_random_weights_are_a_softmax_of_normal_numbers() -> None:
    """Weights sum to one; differences of their logarithms have a variance of 2."""
    weighting, count = cs.RandomWeights(seed=5), 2000
    steps = [cs.Step(number, tuple(TASKS)) for number in range(count)]
    drawn = torch.stack([torch.stack([weighting.weigh(t, ONE, s) for t in TASKS]) for s in steps])
    torch.testing.assert_close(drawn.sum(1), torch.ones(count).double())
    assert len(set(map(tuple, drawn.tolist()))) == count
    for i, j in ((0, 1), (0, 2), (1, 2)):
        difference = (drawn[:, i].log() - drawn[:, j].log()) / 2**0.5
        assert abs(difference.mean()) < 4 / count**0.5
        assert abs(difference.var() - 1) < 4 * (2 / count) ** 0.5
        assert abs((difference.abs() < 0.6745).double().mean() - 0.5) < 2 / count**0.5
        assert abs((difference[1:] * difference[:-1]).mean()) < 4 / count**0.5


def test_random_weights_depend_on_seed_step_and_names() -> None:
    weightings = [cs.RandomWeights(0), cs.RandomWeights(1)]

    def ratio(tasks: str, seed: int = 0, number: int = 7) -> float:
        """The ratio of the weights of the first two tasks by name."""
        step = cs.Step(number, tuple(tasks.split()))
        first, second, *_ = (weightings[seed].weigh(t, ONE, step) for t in sorted(step.tasks))
        return (first / second).item()

    assert ratio("b c a") == pytest.approx(ratio("a b"))
    for other in (ratio("a b", seed=1), ratio("a b", number=8), ratio("a ba"), ratio("b ba")):
        assert other != pytest.approx(ratio("a b"))


def test_weights_of_small_and_negative_losses() -> None:
    """The weight for 1e-6 overflows float16, the product does not; the weight for 0 is finite.

    A loss below its minimum, by default 0, has no logarithm: its weight is NaN.
    """
    weighting = cs.SmoothTchebycheff()
    weighting.start_epoch(0)
    small, zero = torch.tensor(1e-6, dtype=torch.float16), torch.zeros((), requires_grad=True)
    assert weighting.weigh("a", small, step_of({"a": small})) == 1
    weighted = weighting.weigh("a", zero, step_of({"a": zero.detach()}))
    assert torch.autograd.grad(weighted, zero)[0].item() == pytest.approx(1e20)
    for weighting in (cs.SmoothTchebycheff(warmup=0), cs.FAMO(), cs.FAMO(minima={"depth": -1.0})):
        for step in steps_of():
            step.losses["depth"] = ONE * (-2 if step.number < 11 else -0.5)
            finite = step.number == 11 and hasattr(weighting, "minima") and weighting.minima
            weight = weights_of(weighting, [step])[0]["depth"]
            assert weight.isfinite() if finite else weight.isnan()


@pytest.mark.parametrize("wrong", [0.0, -10.0])
def test_nadirs_of_tchebycheff(wrong: float) -> None:
    """The nadir n is the first positive mean from the warm-up's last epoch on; until then, n = L.

    A return to the warm-up discards the nadir.
    """
    weighting = cs.SmoothTchebycheff(warmup=1)
    for epoch, losses, expected in (
        (0, values(a=9.0, b=9.0), [1.0, 1.0]),  # The losses of epoch 0 do not count.
        (1, values(a=3.0, b=4.0), [1.0, 1.0]),
        (0, values(a=3.0, b=4.0), [1.0, 1.0]),
        (1, {}, []),
        (2, values(a=wrong, b=4.0), None),
        (3, values(a=3.0, b=4.0), [1.0, 1.0]),  # log(L / n) is 0 for both.
        (3, values(a=3.0, b=4.0), [1.0, 1.0]),
        (4, values(a=6.0, b=4.0), [4 / 3, 2 / 3]),  # Twice its nadir of 3.
        (5, values(a=6.0, b=4.0), [4 / 3, 2 / 3]),
        (1, values(a=6.0, b=4.0), [1.0, 1.0]),
    ):
        weighting.start_epoch(epoch)
        step = step_of(losses)
        weighted = [float(weighting.weigh(t, loss, step)) for t, loss in losses.items()]
        assert expected is None or weighted == pytest.approx(expected)
        weighting.observe(step)


def test_famo_skips_non_finite_losses() -> None:
    """Logits learn as if a task with a non-finite loss were absent."""
    results = []
    for bad in (True, False):
        weighting = cs.FAMO()
        for step in steps_of():
            if step.number % 3 == 1:
                step.losses_after["edges"] = ONE * torch.inf
                if not bad:
                    step.tasks = tuple(TASKS[:2])
                    del step.losses["edges"]
            weighting.observe(step)
        results.append(numbers(weighting)[0]["logits"])
    assert results[0] == results[1]
    assert results[0]["edges"][3] == 8 != results[0]["depth"][3] == 12


def learned(
    weighting: cs.GradNorm, losses: dict[str, float], squares: Sequence[float]
) -> list[float]:
    """The weights after a step whose gradients are orthogonal and have these squared norms."""
    gramian = torch.diag(torch.tensor(squares, dtype=torch.float64))
    weighting.observe(step_of(values(**losses), surgery=Surgery(tuple(losses), gramian=gramian)))
    return [float(state[0]) for state in weighting.state_dict()["weights"].values()]


def test_gradnorm_weights_stay_positive() -> None:
    """A gradient is far above its target norm; Adam alone would make its weight negative."""
    weighting = cs.GradNorm(alpha=3.0, lr=0.5)
    weights, least = [1.0, 1.0], []
    for number in range(30):
        losses = {"a": 1.0 if number == 0 else 1e-3, "b": 1.0}
        weights = learned(weighting, losses, [weight**2 for weight in weights])
        least.append(min(weights))
        assert sum(weights) == pytest.approx(2)
    assert 0 < min(least) < 5e-3


def test_gradnorm_learns_from_positive_losses() -> None:
    """Weights stay until each task has had a positive loss, and in steps with a negative loss."""
    for first in (0.0, -1.0):
        weighting = cs.GradNorm()
        assert learned(weighting, {"a": first, "b": 2.0}, [4.0, 1.0]) == [1.0, 1.0]
        weights = learned(weighting, {"a": 3.0, "b": 2.0}, [4.0, 1.0])
        assert weights[0] < 1 < weights[1]
        assert weighting.state_dict()["first"] == {"a": 3.0, "b": 2.0}
    weighting, states = cs.GradNorm(alpha=2.0), []  # The square of a negative ratio is positive.
    for loss in (1.0, 0.9, -0.5, 0.8):
        learned(weighting, {"a": loss, "b": 2.0, "c": 1.0}, [1.0, 4.0, 9.0])
        states.append(numbers(weighting)[0]["weights"])
    assert states[1] == states[2] != states[3] != states[0] != states[1]


class Noting(cs.Weighting):
    """Records which tasks' losses are known."""

    def __init__(self) -> None:
        self.known: list[set[str]] = []

    def weigh(self, task: str, loss: Tensor, step: cs.Step) -> Tensor:
        assert not any(x.requires_grad for x in step.known.values())
        assert step.known.get(task, loss) == loss
        self.known.append(set(step.known))
        return loss


def test_known_losses() -> None:
    """A pass per task knows one loss, a pass for all tasks knows all, micro-batches none."""
    model, loss, opt = started_problem(cs.Sum(), weighting=Noting())
    for call, expected in (
        (lambda: opt.step(loss), [{"a"}, {"b"}]),
        (lambda: opt.step([loss, loss]), [set()] * 4),
        (lambda: opt.backward({t: loss(t) for t in AB}, update=False), [set()] * 2),
        (lambda: opt.backward({t: loss(t) for t in AB}), [set()] * 2),
        (opt.optimizer.step, []),
        (lambda: opt.backward({t: loss(t) for t in AB}), [set(AB)] * 2),
    ):
        opt.weighting.known.clear()
        call()
        assert opt.weighting.known == expected
    opt = cs.MultiTaskOptimizer(model.trunk, sgd_of(model), AB, cs.Sum(), weighting=Noting())
    x = problem()[2]
    opt.step_together(lambda run: {t: model.heads[t](z).mean() for t, z in run(x).items()})
    assert opt.weighting.known == [set(AB)] * 2


def test_first_micro_batches_of_backward_weigh_each_task_by_its_own_loss() -> None:
    """The first step has no last losses; a loss times its weight is 1, in each of 2 calls."""
    _, loss, opt = started_problem(cs.Sum(), weighting=cs.SmoothTchebycheff(0.3, 1))
    opt.start_epoch(0)
    for update in (False, True):
        opt.backward({task: loss(task) for task in AB}, update=update)
    weighted = opt.report().weighted_losses
    assert [float(x) for x in weighted.values()] == pytest.approx([2.0, 2.0])


@BOTH_PHASES
def test_losses_are_computed_again(schedule: cs.Schedule) -> None:
    """FAMO computes the losses after a step on the step's batch, in the order of the call.

    This changes nothing else. Random numbers, such as dropout's, repeat those of the passes.
    Statistics of modules that first run in a later step come only from training passes.
    """
    order, states, after, again = TASKS[::-1], [], {}, {}
    for reevaluate in (True, False):
        setup, late = Setup(), nn.BatchNorm2d(1).double()
        setup.optimizer = sgd_of(setup.trunk, setup.heads, late, lr=0.0)
        weighting = cs.FAMO(reevaluate=reevaluate)
        opt = setup.start(cs.PCGrad(), schedule, weighting=weighting)

        def loss(task: str, part: int, setup: Setup = setup, late: nn.Module = late) -> Tensor:
            y = setup.heads[task](setup.trunk(setup.batches[part][0]))
            y = late(y) if part > 1 and task == TASKS[0] else y
            return nn.functional.dropout(y, 0.5).sub(part).square().mean()

        torch.manual_seed(5)
        for parts in ((0, 1), (2, 3)):
            opt.step(closures := [partial(loss, part=part) for part in parts], order)
            if not late.num_batches_tracked:
                states.append(setup.state())
        assert late.num_batches_tracked == 2
        states[-1] += [*setup.state(grads=False), late.running_mean.clone(), torch.get_rng_state()]
        after[reevaluate] = opt._engine.monitor.done.step.losses_after
        for task in order if reevaluate else ():
            with torch.no_grad(), cs.nn.active_task(setup.trunk, task):
                again[task] = closures[0](task) + closures[1](task)
    assert_equal(*states)
    assert_equal(after, {True: again, False: {}})


def test_a_closure_that_fails_after_the_step() -> None:
    """The step still counts, buffers keep its changes, and the next step works."""
    (setup, opt), (other, reference) = (started(cs.PCGrad(), weighting=cs.FAMO()) for _ in "ab")
    calls = []

    def closure(task: str) -> Tensor:
        calls.append((task, torch.is_grad_enabled()))
        if len(calls) == 5:
            raise ArithmeticError
        return setup.closure(0)(task)

    with pytest.raises(ArithmeticError) as caught:
        opt.step(closure)
    assert "without gradients; with reevaluate=False" in caught.value.__notes__[0]
    reference.step(other.closure(0))
    assert_equal(setup.state(), other.state())
    assert opt.state_dict()["steps"] == 1
    assert all(logit[3] == 0 for logit in numbers(opt.weighting)[0]["logits"].values())
    assert calls == [*((task, True) for task in TASKS), *((task, False) for task in TASKS[:2])]
    opt.step(closure)


def test_a_step_that_fails_teaches_nothing() -> None:
    """FAMO's logits learn before the step, and are kept only if it succeeds."""
    results = []
    for fails in (False, True):
        model, loss, opt = started_problem(weighting=cs.FAMO(reevaluate=False), method=cs.Sum())
        for number in range(6):
            if fails and number == 3:
                losses = {task: loss(task) for task in AB}
                losses["b"].register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    opt.backward(losses)
            opt.backward({task: loss(task) for task in AB})
            opt.optimizer.step()
        results.append((list(model.parameters()), opt.weighting.state_dict()))
    assert_equal(*results)


def test_autocast_around_a_step() -> None:
    """Autocast's cache keeps no weights from the losses that are computed after the step."""
    model = problem()[0].float()
    opt, x = optimizer_of(model, cs.PCGrad(), weighting=cs.FAMO()), torch.ones(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        opt.step(lambda task: model(x, task).float().square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert all((model(x, task) == 0).all() for task in AB)


def test_losses_cannot_be_computed_again() -> None:
    _, loss, opt = started_problem(cs.PCGrad(), weighting=cs.FAMO())
    losses = {task: loss(task) for task in AB}
    for call, given, where in (
        (opt.backward, losses, "after backward"),
        (opt.capture, loss, "in a captured step"),
    ):
        message = rf"not compute losses again {where}.*FAMO\(.*use FAMO\(reevaluate=False"
        with refused(opt.weighting.state_dict, ValueError, message):
            call(given)
    losses["a"].backward()  # The refused call has not freed the graph.


@pytest.mark.ranks
@on_ranks(2)
def test_losses_cannot_be_computed_again_on_ranks(rank: int) -> None:
    with pytest.raises(ValueError, match="must not compute losses again on 2 ranks"):
        Network("replicated", rank, 2).start(cs.PCGrad(), weighting=cs.FAMO())


@pytest.mark.ranks
@pytest.mark.each
@pytest.mark.parametrize("kind", ["replicated", "fully_shard"])
@pytest.mark.parametrize("name", ["RandomWeights", "SmoothTchebycheff", "FAMO", "GradNorm"])
@on_ranks(2, alone={"kind": "alone"}, rtol=1e-4)
def test_ranks_weigh_as_one_process(rank: int, kind: str, name: str) -> list[Any]:
    """A single process has two micro-batches; all tasks have losses before the first step."""
    network, weighting = Network(kind, rank, 2), WEIGHTINGS[name]()
    schedule = both_phases() if name != "GradNorm" else None
    opt, losses = network.start(cs.Sum(separate=True), schedule, weighting=weighting), []
    opt.start_epoch(0)
    weighting.observe(step_of(values(depth=2.0, normals=5.0, edges=1.0)))
    halves = [slice(0, 6), slice(6, 12)] if kind == "alone" else [slice(None)]
    for step in range(8):
        opt.start_epoch(1 + step // 4)
        loss = partial(network.loss, step)
        losses.append(opt.step([lambda t, s=s, f=loss: f(t, s) / len(halves) for s in halves]))
    return [network.state(), losses, weighting.state_dict()]


def step_with(weighting: cs.Weighting) -> None:
    setup, opt = started(weighting=weighting)
    opt.step(setup.closure(0))


ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: cs.RandomWeights(-1), r"seed must lie in \[0, 2\^63\), got -1"),
    (lambda: cs.RandomWeights(1.5), "seed must be an integer, got 1.5"),
    (lambda: cs.SmoothTchebycheff(mu=0), "mu must be positive and finite, got 0"),
    (lambda: cs.SmoothTchebycheff(warmup=-1), "warmup must be at least 0, got -1"),
    (lambda: cs.FAMO(lr=float("nan")), "lr must be positive and finite, got nan"),
    (lambda: cs.FAMO(decay=-1), "decay must be finite and at least 0, got -1"),
    (lambda: cs.FAMO(minima=[0.0]), r"minima must be a mapping from task to minimum.*\[0.0\]"),
    (lambda: cs.FAMO(minima={"a": "x"}), "minima must be finite, got 'x' for 'a'"),
    (
        lambda: started(weighting=cs.FAMO(minima={"a": 0.5})),
        r"minima must have no tasks other than \['depth', 'normals', 'edges'\], got 'a'",
    ),
    (lambda: cs.GradNorm(alpha=-0.5), "alpha must be finite and at least 0"),
    (lambda: cs.GradNorm(lr=0), "lr must be positive and finite, got 0"),
    *(
        (
            partial(started, method, weighting=cs.GradNorm()),
            r"a Gramian method for GradNorm\(.*Sum\(separate=T",
        )
        for method in (cs.Sum(), cs.GradDrop(), cs.ConnectionStrength())
    ),
    *(
        (partial(step_with, kind()), rf"{kind.__name__}\(.*epoch: call start_epoch\(epoch\) first")
        for kind in (cs.DynamicWeightAverage, cs.SmoothTchebycheff)
    ),
    (
        lambda: started(weighting=cs.UncertaintyWeights(KINDS)),
        r"optimizer must hold the parameters\(\) of weighting",
    ),
    (
        lambda: started(weighting=cs.RandomWeights(4))[1].capture(lambda task: ONE),
        r"in a captured step, got RandomWeights\(seed=4\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()
