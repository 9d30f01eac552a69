"""Loss weights: their formulas, and what a resumed run needs."""

import math
import re

import pytest
import torch
from networks import AB, BOTH_PHASES, Setup, problem, started
from torch import nn

import cs_kernels as cs

pytestmark = pytest.mark.loop

KINDS = {"depth": "regression", "normals": "regression", "edges": "classification"}

STEP, ONE = cs.Step(), torch.tensor(1.0)


def _step(**losses: float) -> cs.Step:
    return cs.Step(losses={task: torch.tensor(loss) for task, loss in losses.items()})


def test_uncertainty_weights_by_hand() -> None:
    """L / (2 s^2) + log s and L / s^2 + log s; s^2 = L and 2 L are their minima."""
    weighting = cs.UncertaintyWeights(KINDS)
    assert weighting.weigh("depth", torch.tensor(3.0), STEP).item() == 1.5
    assert weighting.weigh("edges", torch.tensor(3.0), STEP).item() == 3.0
    for task, square in (("depth", 3.0), ("edges", 6.0)):
        log_sigma = weighting.log_sigma[task]
        with torch.no_grad():
            log_sigma.fill_(0.5 * math.log(square))
        (weighting.weigh(task, torch.tensor(3.0), STEP) + weighting.regularizer(task)).backward()
        assert abs(log_sigma.grad.item()) < 1e-6


@BOTH_PHASES
def test_uncertainty_weights_are_learned(schedule: cs.Schedule) -> None:
    """Each task's weight follows its own loss."""
    weighting, setup = cs.UncertaintyWeights(KINDS), Setup()
    setup.optimizer = torch.optim.SGD([*setup.parameters(), *weighting.parameters()], lr=0.1)
    losses = setup.start(schedule=schedule, weighting=weighting).step(setup.closure(0))
    for task, log_sigma in weighting.log_sigma.items():
        factor = 1 if KINDS[task] == "regression" else 2
        expected = -0.1 * (1 - factor * losses[task])
        torch.testing.assert_close(log_sigma.detach().double(), expected.double())


def test_uncertainty_weights_belong_into_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"optimizer must hold the parameters\(\) of weighting"):
        started(weighting=cs.UncertaintyWeights(KINDS))


def test_dynamic_weight_average_by_hand() -> None:
    """R = (1/2, 1) after means (4, 2) and (2, 2); K exp(r / T) / sum exp(r / T)."""
    weighting = cs.DynamicWeightAverage(temperature=0.5)
    for epoch, pairs in enumerate([[(3.0, 1.0), (5.0, 3.0)], [(2.0, 2.0)]]):
        weighting.start_epoch(epoch)
        assert weighting.weigh("a", ONE, STEP).item() == 1
        for a, b in pairs:
            weighting.observe(_step(a=a, b=b))
    weighting.observe(_step(b=math.inf))
    weighting.observe(_step(a=math.nan))
    weighting.start_epoch(2)
    shares = math.exp(1.0), math.exp(2.0)
    expected = [2 * share / sum(shares) for share in shares]
    for task, weight in zip("ab", expected, strict=True):
        assert weighting.weigh(task, ONE, STEP).item() == pytest.approx(weight)
    weighting.start_epoch(2)
    assert weighting.weigh("a", ONE, STEP).item() == pytest.approx(expected[0])
    weighting.start_epoch(3)  # An epoch without losses changes nothing.
    assert weighting.weigh("a", ONE, STEP).item() == pytest.approx(expected[0])


@pytest.mark.parametrize("weighting", [cs.DynamicWeightAverage(), cs.SmoothTchebycheff()], ids=repr)
def test_the_epoch_must_have_begun(weighting: cs.Weighting) -> None:
    setup, opt = started(weighting=weighting)
    message = re.escape(f"{weighting!r} depends on the epoch: call start_epoch(epoch) first")
    with pytest.raises(RuntimeError, match=message):
        opt.step(setup.closure(0))


def test_a_network_in_bfloat16() -> None:
    """The learned weights stay in float32; the loss goes its own way."""
    weighting = cs.UncertaintyWeights({"a": "regression"})
    x = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    (weighting.weigh("a", x * 2, STEP) + weighting.regularizer("a")).backward()
    assert x.grad.dtype is torch.bfloat16
    assert weighting.log_sigma["a"].grad.item() == -1.0


def test_log_sigma_is_added_once_in_backward() -> None:
    grads = []
    for parts in (1, 3):
        model, loss, *_ = problem()
        weighting = cs.UncertaintyWeights(dict.fromkeys(AB, "regression"))
        sgd = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=0.1)
        opt = cs.MultiTaskOptimizer(model, sgd, AB, cs.PCGrad(), weighting=weighting)
        for n in range(parts):
            opt.backward({t: loss(t) / parts for t in AB}, update=n + 1 == parts)
        grads.append(torch.stack([s.grad for s in weighting.parameters()]))
    torch.testing.assert_close(*grads)
