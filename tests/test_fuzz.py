"""A few random calls of every operator; `make fuzz` makes more, under the sanitizers."""

import warnings

import pytest
from fuzz_operators import run_case
from layers import EMULATION, INTERPRETED, SMALL

pytestmark = pytest.mark.kernel

HERE = {"cpu": True, "triton": INTERPRETED, "cuda": bool(EMULATION)}
"""Whether a backend computes in this machine's memory, where tensors may have any layout."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_calls(backend: str, part: int) -> None:
    if not HERE.get(backend):
        pytest.skip("the reference itself, or a backend on a GPU")
    calls = 10 if SMALL else 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(part * calls, (part + 1) * calls):
            run_case(seed, backend)
