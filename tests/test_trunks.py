"""Real networks: what of them is prioritized, and their updates in one pass and by a plain loop."""

import copy

import pytest
import torch
from stacking import CLOSE
from trunks import CASES, Setup, compared, layer_weights

import cs_kernels as cs

pytestmark = pytest.mark.networks

SLOW = {"deeplabv3_resnet50", "convnext_tiny"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in CASES]
)
def test_trunks(name: str) -> None:
    """A step in every network of docs/trunks.md."""
    case = CASES[name]
    setup = Setup(case)
    theirs, together = copy.deepcopy(setup), copy.deepcopy(setup)
    opt = setup.optimizer()
    losses = opt.step(setup.loss)
    coverage = opt.coverage()
    weights = layer_weights(setup.trunk)
    assert len(weights) == case.layers
    assert len(coverage.prioritized) == case.prioritized
    assert set(coverage.prioritized) <= set(weights)
    assert coverage.own == {}

    error, conflicts = compared(setup, theirs, coverage)
    assert conflicts > 0
    assert error < 1e-12
    if not setup.converts:
        with pytest.raises(ValueError, match=r"must have batch normalization.*LayerNorm"):
            cs.nn.convert_task_batchnorm(setup.trunk, ["depth", "edges"])
        # `step_together` has no Gramian of the whole trunk.
        setup, together.method = theirs, cs.Sum()
        setup.method = together.method
        losses = setup.optimizer().step(setup.loss)

    prioritized = _assert_same_in_one_pass(setup, together, losses)
    assert prioritized == coverage.prioritized


def _assert_same_in_one_pass(
    first: Setup, second: Setup, losses: dict[str, torch.Tensor]
) -> dict[str, str]:
    """The updates, statistics and losses of a step of the first are those of `step_together`."""
    opt = second.optimizer()
    found = opt.step_together(
        lambda run: {t: second.loss_of(z, t) for t, z in run(second.x).items()}
    )
    torch.testing.assert_close(found, losses, **CLOSE)
    grads = [[p.grad for p in setup.trunk.parameters()] for setup in (first, second)]
    # Some are 0 but for rounding, such as that of a bias before a norm.
    largest = max(g.abs().max().item() for g in grads[0] if g is not None)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-11, atol=1e-13 * largest)
    torch.testing.assert_close(second.trunk.state_dict(), first.trunk.state_dict(), **CLOSE)
    return opt.coverage().prioritized
