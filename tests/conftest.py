"""Fixtures for every test: poisoned memory, seeds, the backends."""

from collections.abc import Iterator

import pytest
import torch

import cs_kernels as cs

RUNNABLE = [name for name, reason in cs.available_backends().items() if reason is None]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills every new tensor with NaN, so what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=RUNNABLE)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend that can run here, in force."""
    with cs.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch
    doctest_namespace["cs"] = cs
