"""Selects the cases of a product of parameters that run by default."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest


def pairwise(cases: Sequence[tuple[Any, ...]]) -> list[int]:
    """The indices of cases that have every pair of values of two parameters among them.

    Greedy: each is the first one with the most pairs that those before it do not have.

    >>> pairwise([(a, b, c) for a in "01" for b in "01" for c in "01"])
    [0, 3, 5, 6]
    """
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        chosen.append(max(range(len(cases)), key=lambda n: len(pairs[n] & missing)))
        missing -= pairs[chosen[-1]]
    return sorted(chosen)


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves a test that is marked `pairwise` these cases alone, for each backend by itself."""
    products: dict[tuple[str, str | None], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            name = item.nodeid.partition("[")[0]
            products[name, item.callspec.params.get("backend")].append(item)
    left_out: set[pytest.Item] = set()
    for cases in products.values():
        chosen = pairwise([tuple(item.callspec.params.values()) for item in cases])
        left_out |= {*cases} - {cases[n] for n in chosen}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
