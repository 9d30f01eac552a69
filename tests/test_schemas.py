"""torch.library's own checks of every operator."""

import pytest
import torch
from layers import KINDS, sample, solver_options, trunk_arguments

import cs_kernels as cs
from cs_kernels.ops.solvers import SOLVERS

pytestmark = pytest.mark.kernel


def test_schemas_and_fakes() -> None:
    """Mutation as declared, fakes alike, usable under compilation."""
    layers = [sample(kind, 3, torch.float32) for kind in KINDS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    weight, gamma, running = torch.randn(4, 3), torch.ones(2, 4), torch.ones(2, 4)
    updates = [torch.zeros(4, 3), torch.zeros(5)]
    grads = [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)]
    priorities, products = [torch.tensor([0, 1, 1, 0])], torch.randn(1, 2, 2, dtype=torch.float64)
    statistics = torch.rand(7), torch.rand(14), torch.rand(14)
    wide = torch.eye(3).double()
    gramians = {"mgda": torch.rand(2, 1, 3, 3), "pcgrad": wide, "cagrad": wide}
    calls = {
        "connection_strength": (weight, gamma, running, [1e-5, 1e-5], True, 0, 1),
        "task_priority": (torch.rand(3, 5),),
        "project_conflicts_": (updates, grads, priorities, [0], [1], 2),
        "phase2_update_": tuple(trunk_arguments(layers).values()),
        "channel_energies": ([torch.randn(4, 3), torch.randn(2, 5, 3)], [0, 1], [1, 2]),
        "energy_priority": (*statistics, [1e-5] * 4, [4, 3]),
        "phase2_products_": (updates, grads, priorities, [0], [1], 2),
        "phase2_apply_": (updates, grads, priorities, products, [0], [1], 2),
        "gramian": (grads, [0, 1], 2, 2),
        "combine_": (updates, grads, torch.rand(2, 2), [1, 0], 2),
        "drop_signs_": (updates, grads, [0.0, 0.5], 1, 2, 2),
    }
    for name in SOLVERS:
        gramian = gramians.get(name, torch.eye(3))
        calls[f"{name}_weights"] = gramian, *solver_options(name, gramian)
    assert set(calls) == set(cs.ops.backends.OPERATORS)
    more = {
        "phase2_update_": [(torch.empty(len(layers), 3, 3).double(),)],
        "drop_signs_": [(torch.tensor([4]),), (None, [2**32 - 5, 0])],
        "pcgrad_weights": [(torch.tensor([4]),)],
        "gradvac_weights": [(torch.tensor([4]),)],
    }
    for name, call in calls.items():
        operator = getattr(torch.ops.cs_kernels, name).default
        for options in [(), *more.get(name, [])]:
            torch.library.opcheck(operator, (*call, *options), test_utils=tests)
