"""torch.library's own checks of every operator."""

import pytest
import torch
from layers import KINDS, operator_calls

import cs_kernels as cs

pytestmark = pytest.mark.kernel


def test_schemas_and_fakes() -> None:
    """Operators change only what they declare, register autograd correctly, and match fakes."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    calls = operator_calls()
    assert set(calls) == set(cs.ops.backends.OPERATORS)
    more = {
        "phase2_update_": [(torch.empty(len(KINDS), 3, 3).double(),)],
        "drop_signs_": [(torch.tensor([4]),), (None, [2**32 - 5, 0])],
        "pcgrad_weights": [(torch.tensor([4]),)],
        "gradvac_weights": [(torch.tensor([4]),)],
    }
    for name, call in calls.items():
        operator = getattr(torch.ops.cs_kernels, name).default
        for options in [(), *more.get(name, [])]:
            torch.library.opcheck(operator, (*call, *options), test_utils=tests)
