"""Phase 2 reads gamma, variance and epsilon from the normalizations in each step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import TASKS, Setup, started
from torch import Tensor, nn

import cs_kernels as cs
from cs_kernels.stage import Passes, Stage

pytestmark = pytest.mark.loop


def _norm(setup: Setup) -> Any:
    return setup.trunk.stem_norm.depth


def _other_storage(setup: Setup) -> None:
    _norm(setup).weight.data = torch.rand(8, dtype=torch.float64)


def _other_buffer(setup: Setup) -> None:
    _norm(setup).running_var = torch.rand(8, dtype=torch.float64)


def _every_second(setup: Setup) -> None:
    _norm(setup).running_var = torch.rand(16, dtype=torch.float64)[::2]


def _another_type(setup: Setup) -> None:
    _norm(setup).running_var = torch.rand(8)


def _half_precision(setup: Setup) -> None:
    for norm in cs.nn.task_norms(setup.trunk):
        for child in norm.children():
            child.weight.data = child.weight.data.half()


def _no_scale(setup: Setup) -> None:
    _norm(setup).weight = None


def _another_epsilon(setup: Setup) -> None:
    _norm(setup).eps = 5


CHANGES = [
    _other_storage,
    _other_buffer,
    _every_second,
    _another_type,
    _half_precision,
    _no_scale,
    _another_epsilon,
]


def _factors(setup: Setup) -> tuple[Tensor, Tensor, list[float]]:
    norms = [setup.trunk.stem_norm.of(task) for task in TASKS]
    variances = [norm.running_var for norm in norms]
    gammas = [torch.ones(8) if norm.weight is None else norm.weight for norm in norms]
    double = (torch.stack([t.detach().double() for t in of]) for of in (gammas, variances))
    return *double, [float(norm.eps) for norm in norms]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_between_steps_counts(change: Callable[[Setup], None]) -> None:
    """No forward pass follows the change, since torch would refuse some changes."""
    setup, opt = started()
    opt.step(setup.closure(0))
    torch.manual_seed(0)
    change(setup)
    weight = setup.trunk.stem.weight
    *factors, eps = _factors(setup)
    strength = cs.functional.connection_strength(weight, *factors, eps=eps)
    expected = cs.functional.task_priority(strength)
    with torch.no_grad():
        for task in TASKS:
            for parameter in opt._engine.trunk.shared:
                parameter.grad = torch.randn_like(parameter)
            opt._engine.ranks.gradients.collect(task)
        step = cs.Step(tasks=tuple(TASKS))
        opt._engine.surgery(Passes(step, step.tasks, Stage.JOINT, separate=True))
    kept = step.surgery
    assert kept.prioritized is not None
    assert kept.priorities is not None
    names = [layer.name for layer in kept.prioritized.layers]
    of_layers = dict(zip(names, kept.priorities.split(kept.prioritized.channels), strict=True))
    assert of_layers["stem"].tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1


class _Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def _parametrized(norm: Any) -> None:
    nn.utils.parametrize.register_parametrization(norm, "weight", _Positive())


def _without_statistics(norm: Any) -> None:
    norm.running_mean = norm.running_var = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_parametrized, "a scale that is not a parameter"), (_without_statistics, "no running var")],
)
def test_a_layer_that_loses_its_factors_gets_the_plain_sum(
    change: Callable[[Any], None], reason: str
) -> None:
    setup, opt = started()
    opt.step(setup.closure(0))
    change(_norm(setup))
    opt.step(setup.closure(1))
    assert "stem" not in opt.priority()
    assert reason in opt.coverage().plain["stem.weight"]
