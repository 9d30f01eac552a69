"""Real networks: prioritized layers, and updates in one pass against a plain loop."""

import copy

import pytest
import torch
from stacking import CLOSE, Case, assert_alike
from trunks import CASES, TASKS, Setup, compared

import cs_kernels as cs
from cs_kernels.trunk.watcher import LAYERS

pytestmark = pytest.mark.networks


FAST = ["resnet18", "vit_tiny_patch16_224"]
SLOW = [pytest.param(name, marks=pytest.mark.full) for name in CASES if name not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_trunks(name: str) -> None:
    """Makes a step in every network of docs/trunks.md."""
    case = CASES[name]
    setup = Setup(case)
    theirs, together = copy.deepcopy(setup), copy.deepcopy(setup)
    opt = setup.optimizer()
    losses = opt.step(setup.loss)
    coverage, modules = opt.coverage(), setup.trunk.named_modules()
    layers = [m for m in modules if isinstance(m[1], LAYERS) and "weight" in m[1]._parameters]
    assert (len(layers), len(coverage.prioritized)) == (case.layers, case.prioritized)
    assert set(coverage.prioritized) <= {f"{name}.weight" for name, _ in layers}
    assert coverage.own == {}
    error, conflicts = compared(setup, theirs, coverage)
    assert conflicts > 0
    assert error < 1e-12
    if not setup.converts:
        with pytest.raises(ValueError, match=r"must have batch normalization.*LayerNorm"):
            cs.nn.convert_task_batchnorm(setup.trunk, TASKS)
        # `step_together` has no Gramian of the whole trunk.
        setup, together.method = theirs, cs.Sum()
        setup.method = together.method
        losses = setup.optimizer().step(setup.loss)

    opt = together.optimizer()
    found = opt.step_together(
        lambda run: {t: together.loss_of(z, t) for t, z in run(together.x).items()}
    )
    torch.testing.assert_close(found, losses, **CLOSE)
    grads = [[p.grad for p in s.trunk.parameters()] for s in (together, setup)]
    # Some gradients, such as those of biases before a normalization, are only rounding errors.
    largest = max(g.abs().max().item() for g in grads[1] if g is not None)
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-13 * largest)
    torch.testing.assert_close(together.trunk.state_dict(), setup.trunk.state_dict(), **CLOSE)
    assert opt.coverage().prioritized == coverage.prioritized


@pytest.mark.parametrize("name", ["resnet18", pytest.param("hrnet_w18", marks=pytest.mark.full)])
def test_step_together_by_layer(name: str) -> None:
    setup = Setup(CASES[name])
    case = Case(setup.trunk, setup.x, lambda _, z, task: setup.loss_of(z, task), TASKS)
    assert_alike(case, 2, method=cs.UPGrad(groups="layer"))
