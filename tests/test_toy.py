"""The problem with two parameters: its gradients, its front, and which methods reach it."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cs_kernels as cs

pytestmark = pytest.mark.docs

# The recipes also have a module of this name.
_spec = importlib.util.spec_from_file_location(
    "toy_problem", Path(__file__).parent.parent / "examples" / "toy.py"
)
toy = sys.modules["toy_problem"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)


def _losses(points):
    """The definition, as in the appendix of CAGrad, with a tenth of the first loss."""
    x, y = points.unbind(-1)
    first = (0.5 * (-x - 7) - torch.tanh(-y)).abs().clamp(min=5e-6).log() + 6
    second = (0.5 * (-x + 3) - torch.tanh(-y) + 2).abs().clamp(min=5e-6).log() + 6
    upper, lower = torch.tanh(0.5 * y).clamp(min=0), torch.tanh(-0.5 * y).clamp(min=0)
    bowls = [((-x + c) ** 2 + 0.1 * (-y - 8) ** 2) / 10 - 20 for c in (7, -7)]
    losses = first * upper + bowls[0] * lower, second * upper + bowls[1] * lower
    return torch.stack([0.1 * losses[0], losses[1]], -1)


def test_losses_and_gradients():
    points = 20 * torch.rand(500, 2, dtype=torch.float64) - 10
    expected = _losses(points.requires_grad_())
    losses, gradients = toy.losses_and_gradients(points.detach().numpy())
    torch.testing.assert_close(torch.from_numpy(losses), expected.detach())
    for i in range(2):
        (gradient,) = torch.autograd.grad(expected[:, i].sum(), points, retain_graph=True)
        torch.testing.assert_close(torch.from_numpy(gradients[:, i]), gradient)


def test_steps_equal_adams():
    points = torch.tensor(toy.STARTS, requires_grad=True)
    adam = torch.optim.Adam([points], lr=toy.RATE)
    for _ in range(toy.KEPT):
        adam.zero_grad()
        _losses(points).sum().backward()
        adam.step()
    (path,) = toy.follow(["Sum"], toy.KEPT)
    away = toy.STARTS[:, 1] != 0  # Not on the kink between valleys and bowls.
    np.testing.assert_allclose(path.points[-1, away], points.detach()[away], atol=1e-12)


def test_the_front():
    """On the front, gradients are opposed or, at its ends, one is zero."""
    front = toy.pareto_front()
    assert toy.have_reached(front).all()
    gradients = torch.from_numpy(toy.losses_and_gradients(front)[1])
    weights = cs.MGDA().weights(gradients @ gradients.mT)
    shortest = (weights.unsqueeze(1) @ gradients)[:, 0].norm(dim=-1)
    assert (shortest <= 0.02 * gradients.norm(dim=-1).amax(-1)).all()
    assert not toy.have_reached(np.array([[9.0, 9.0], [0.0, 0.0], [0.0, -2.0], [12.0, -8.4]])).any()


@pytest.mark.full
@pytest.mark.parametrize("steps", [toy.STEPS // 2, toy.STEPS])
def test_who_reaches_the_front_and_where(steps):
    """As in the papers, plain descent and PCGrad from (9, 9) end in the valley, not on the front.

    CAGrad, the slowest, ends where the mean loss is least, Nash-MTL closer to the middle.
    """
    names = ["Sum", "PCGrad", "CAGrad", "NashMTL", "FairGrad"]
    paths = {path.name: path for path in toy.follow(names, steps)}
    ends = {name: path.points[-1, :, 0] for name, path in paths.items()}
    stuck = [True, True, False, True, True]
    reached = {"Sum": stuck, "PCGrad": stuck} | ({"CAGrad": stuck} if steps < toy.STEPS else {})
    for name, path in paths.items():
        assert path.reached.tolist() == reached.get(name, [True] * 5)
    assert steps == toy.STEPS or ends["CAGrad"][2] < ends["Sum"][2] - 0.5
    front = toy.pareto_front()
    least = front[toy.losses_and_gradients(front)[0].mean(1).argmin(), 0]
    assert abs(ends["CAGrad"][paths["CAGrad"].reached] - least).max() < 1
    assert abs(ends["Sum"][stuck] - least).max() < 0.1
    assert abs(ends["NashMTL"]).max() < 5
    np.testing.assert_allclose(ends["NashMTL"], ends["FairGrad"], atol=0.1)


@pytest.mark.full
def test_every_method_draws_its_paths(tmp_path):
    paths = toy.follow([*toy.METHODS], toy.KEPT)
    for path in paths:
        assert path.points.shape == (2, len(toy.STARTS), 2)
        assert (path.points[0] == toy.STARTS).all()
        # Adam's steps are about as long as the learning rate.
        assert 0 < abs(path.points[1] - path.points[0]).max() < 2 * toy.KEPT * toy.RATE
    toy.draw(paths, tmp_path / "toy.svg")
    for look in ("", "-dark"):
        assert (tmp_path / f"toy{look}.svg").stat().st_size > 1000
