"""Properties of the conflict projection, for shapes and values that hypothesis draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import assert_equal
from torch import Tensor

import cs_kernels as cs

pytestmark = pytest.mark.kernel


Problem = tuple[Tensor, Tensor]


@st.composite
def _problems(draw: st.DrawFn) -> Problem:
    """Gradients [K, O, fan-in] in float64 and a priority."""
    tasks = draw(st.integers(1, 10))
    channels = draw(st.integers(1, 40))
    fan_in = draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    grads = torch.randn(tasks, channels, fan_in, generator=generator, dtype=torch.float64)
    # A direction that all tasks share makes conflicts rarer.
    grads += draw(st.floats(-1, 1)) * torch.randn(fan_in, generator=generator, dtype=torch.float64)
    return grads, torch.randint(tasks, (channels,), generator=generator)


_project = cs.functional.project_conflicts


@given(problem=_problems())
def test_backends_agree_and_change_no_input(backend: str, problem: Problem) -> None:
    before = [tensor.clone() for tensor in problem]
    with cs.use_backend("reference"):
        expected = _project(*problem)
        assert_equal([*problem], before)
    torch.testing.assert_close(_project(*problem), expected, rtol=1e-9, atol=1e-9)
    assert_equal([*problem], before)


@given(problem=_problems())
def test_no_conflict_is_left_with_the_reference(backend: str, problem: Problem) -> None:
    """Each group's update keeps at least the reference's own progress: <update, G_i> >= d_ii."""
    grads, priority = problem
    update = _project(grads, priority)
    for i in range(len(grads)):
        group = priority == i
        progress = (update[group] * grads[i, group]).sum()
        own = (grads[:, group] * grads[i, group]).sum((1, 2))
        expected = own[i] + own.clamp(min=0)[torch.arange(len(grads)) != i].sum()
        torch.testing.assert_close(progress, expected, rtol=1e-9, atol=1e-9)
        assert progress >= own[i] - 1e-9 * (1 + own[i])


@given(problem=_problems(), exponent=st.integers(-40, 40))
def test_scale_equivariant(backend: str, problem: Problem, exponent: int) -> None:
    grads, priority = problem
    update = _project(grads, priority)
    assert torch.equal(_project(grads * 2.0**exponent, priority), update * 2.0**exponent)


@given(problem=_problems(), random=st.randoms())
def test_permuting_tasks_permutes(backend: str, problem: Problem, random: st.DataObject) -> None:
    grads, priority = problem
    order = list(range(len(grads)))
    random.shuffle(order)
    permuted = _project(grads[order], torch.tensor(order).argsort()[priority])
    torch.testing.assert_close(permuted, _project(grads, priority), rtol=1e-9, atol=1e-9)


@given(problem=_problems())
def test_one_task_is_plain_descent(backend: str, problem: Problem) -> None:
    grads, priority = problem
    assert torch.equal(_project(grads[:1], torch.zeros_like(priority)), grads[0])
