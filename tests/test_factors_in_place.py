"""Phase 2 reads gamma, running variance and epsilon where a trunk's normalizations keep them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layers import EMULATION
from networks import Setup, assert_equal
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cs_kernels as cs
from cs_kernels import gradients
from cs_kernels.ops import backends

pytestmark = pytest.mark.kernel


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
    _norm(setup).eps = 0.5


def _whole_epsilon(setup: Setup) -> None:
    _norm(setup).eps = 1


def _frozen_layer(setup: Setup) -> None:
    setup.trunk.block.second.weight.requires_grad_(False)


def _nothing(setup: Setup) -> None:
    del setup


CHANGES = {
    _nothing: True,
    _other_storage: True,
    _other_buffer: True,
    _another_epsilon: True,
    _frozen_layer: True,
    _every_second: False,
    _another_type: False,
    _half_precision: False,
    _no_scale: False,
    _whole_epsilon: False,
}
"""Changes between two steps, and whether the factors can still be read in place."""

BACKENDS = ["cpu", "cuda"] if EMULATION else ["cpu"]


def _update_after(
    change: Callable[[Setup], None], monkeypatch: pytest.MonkeyPatch, direct: Callable[..., Any]
) -> list[Tensor]:
    """The updates after a step, a change and other gradients; the priorities and products."""
    monkeypatch.setattr(gradients, "direct", direct)
    setup = Setup(optimizer=torch.optim.SGD)
    opt = setup.start()
    opt.step(setup.closure(0))
    torch.manual_seed(0)
    change(setup)
    # Without a forward pass, which would refuse some of the changes.
    with torch.no_grad():
        for task in setup.tasks:
            for parameter in opt._engine.trunk.shared:
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            opt._engine.ranks.gradients.collect(task)
        step = cs.Step(tasks=tuple(setup.tasks))
        opt._engine.surgery(step)
    kept = step.surgery
    assert kept.priorities is not None
    assert kept.products is not None
    updates = [p.grad for p in opt._engine.trunk.shared if p.grad is not None]
    return [*updates, kept.priorities, kept.products]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_update_is_the_operators(
    backend: str, change: Callable[[Setup], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[bool] = []

    def watched(name: str, device: torch.device) -> Callable[..., Tensor | None]:
        function = backends.direct(name, device)
        assert function is not None

        def call(*arguments: Any) -> Tensor | None:
            priorities: Tensor | None = function(*arguments)
            done.append(priorities is not None)
            return priorities

        return call

    with cs.use_backend(backend):
        found = _update_after(change, monkeypatch, watched)
        expected = _update_after(change, monkeypatch, lambda name, device: None)
    # On the CPU, half precision is converted by torch.
    assert done == [True, CHANGES[change] or (backend, change) == ("cuda", _half_precision)]
    assert_equal(found, expected)


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
    setup = Setup()
    opt = setup.start()
    opt.step(setup.closure(0))
    change(_norm(setup))
    opt.step(setup.closure(1))
    assert "stem" not in opt.priority()
    assert reason in opt.coverage().plain["stem.weight"]


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator() -> None:
    setup = Setup()
    opt = setup.start()
    with _Seen() as seen:
        opt.step(setup.closure(0))
    assert "cs_kernels::phase2_update_" in seen.names
