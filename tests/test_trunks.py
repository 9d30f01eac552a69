"""Real networks: what of them is prioritized, and their update against a plain loop in float64."""

import pytest
import torch
from trunks import CASES, Setup, compare, layer_weights

import cs_kernels as cs

pytestmark = pytest.mark.networks


@pytest.mark.parametrize("name", CASES)
def test_trunks(name: str) -> None:
    torch.use_deterministic_algorithms(False)  # Takes five times as long in these.
    case = CASES[name]
    coverage, error, conflicts = compare(case)
    setup = Setup(case)
    weights = layer_weights(setup.trunk)
    assert len(weights) == case.layers
    assert len(coverage.prioritized) == case.prioritized
    assert set(coverage.prioritized) <= set(weights)
    assert coverage.own == {}
    assert conflicts > 0
    assert error < 1e-12
    if not setup.converts:
        with pytest.raises(ValueError, match=r"must have batch normalization.*LayerNorm"):
            cs.nn.convert_task_batchnorm(setup.trunk, ["depth", "edges"])
