"""torch.library's own checks of every operator."""

import torch
from layers import KINDS, sample, trunk_arguments

import cs_kernels as cs


def test_schemas_and_fakes() -> None:
    """Mutation as declared, fakes alike, usable under compilation."""
    layers = [sample(kind, 3, torch.float32) for kind in KINDS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    operators = torch.ops.cs_kernels
    weight, gamma, running = torch.randn(4, 3), torch.ones(2, 4), torch.ones(2, 4)
    calls = {
        operators.connection_strength: (weight, gamma, running, [1e-5, 1e-5], True, 0, 1),
        operators.task_priority: (torch.rand(3, 5),),
        operators.project_conflicts_: (
            [torch.empty(4, 3), torch.empty(5)],
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            [torch.tensor([0, 1, 1, 0])],
            [0],
            [1],
            2,
        ),
        operators.phase2_update_: tuple(trunk_arguments(layers).values()),
        operators.channel_energies: ([torch.randn(4, 3), torch.randn(2, 5, 3)], [0, 1], [1, 2]),
        operators.energy_priority: (
            torch.rand(7),
            torch.rand(14),
            torch.rand(14),
            [1e-5] * 4,
            [4, 3],
        ),
        operators.phase2_products_: (
            [torch.empty(4, 3), torch.empty(5)],
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            [torch.tensor([0, 1, 1, 0])],
            [0],
            [1],
            2,
        ),
        operators.phase2_apply_: (
            [torch.zeros(4, 3), torch.zeros(5)],
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            [torch.tensor([0, 1, 1, 0])],
            torch.randn(1, 2, 2, dtype=torch.float64),
            [0],
            [1],
            2,
        ),
        operators.gramian: (
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            [0, 1],
            2,
            2,
        ),
        operators.combine_: (
            [torch.empty(4, 3), torch.empty(5)],
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            torch.rand(2, 2),
            [1, 0],
            2,
        ),
        operators.drop_signs_: (
            [torch.empty(4, 3), torch.empty(5)],
            [torch.randn(4, 3), None, torch.randn(5), torch.randn(5)],
            [0.0, 0.5],
            1,
            2,
            2,
        ),
        operators.pcgrad_weights: (torch.eye(3).double(), 1, 2),
        operators.cagrad_weights: (torch.eye(3).double(), 0.4),
        operators.mgda_weights: (torch.rand(2, 1, 3, 3),),
        operators.aligned_mtl_weights: (torch.eye(3), "median"),
        operators.nash_mtl_weights: (torch.eye(3),),
        operators.imtl_g_weights: (torch.eye(3),),
        operators.upgrad_weights: (torch.eye(3),),
    }
    assert {operator.__name__ for operator in calls} == set(cs.ops.backends.OPERATORS)
    for operator, call in calls.items():
        torch.library.opcheck(operator.default, call, test_utils=tests)
