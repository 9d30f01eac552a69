"""Selects the cases of a parameter product that run by default."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

MOST_QUICK = 3
"""The number of cases per test and backend with `--quick`."""


def covering(cases: Sequence[tuple[int, ...]], width: int) -> list[int]:
    """The indices of cases that cover every combination of values of `width` parameters.

    Greedy: each case adds the most new combinations; with a width of 1, ties go to the case whose
    values were taken least often.

    >>> covering([(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], 2)
    [0, 3, 5, 6]
    >>> covering([(a, b) for a in (0, 1, 2, 3) for b in (0, 1)], 1)
    [0, 3, 4, 7]
    """
    values = [[*enumerate(case)] for case in cases]
    parts = [set(combinations(of_case, width)) for of_case in values]
    missing = set().union(*parts)
    chosen, taken = [], Counter[tuple[int, int]]()

    def gain(n: int) -> tuple[int, int]:
        often = sum(taken[value] for value in values[n]) if width == 1 else 0
        return len(parts[n] & missing), -often

    while missing:
        chosen.append(max(range(len(cases)), key=gain))
        missing -= parts[chosen[-1]]
        taken.update(values[chosen[-1]])
    return sorted(chosen)


def left_out(items: Iterable[pytest.Item], most: int, *, quick: bool) -> set[pytest.Item]:
    """The tests that run only with `--full`.

    For each backend, tests marked `pairwise` keep cases with every pair of values, and tests marked
    `each` keep cases with every value. With `most` of 1, `pairwise` works like `each`. With
    `quick`, all tests are taken as marked `each`, and keep at most `MOST_QUICK` of these cases,
    spread evenly over them; tests with the same parameters keep different cases.
    """
    products: dict[tuple[str, str | None, int], list[pytest.Function]] = defaultdict(list)
    result = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        if not (isinstance(item, pytest.Function) and hasattr(item, "callspec")):
            continue
        if item.get_closest_marker("each") or quick:
            width = 1
        elif item.get_closest_marker("pairwise"):
            width = most
        else:
            continue
        name = item.nodeid.partition("[")[0]
        products[name, item.callspec.params.get("backend"), width].append(item)
    for (name, backend, width), cases in products.items():
        params = [{**item.callspec.params, "backend": None} for item in cases]
        # A product repeats each value as the same object, so ids identify values.
        chosen = covering([tuple(map(id, of_case.values())) for of_case in params], width)
        if quick and len(chosen) > MOST_QUICK:
            start = zlib.crc32(f"{name} {backend}".encode())
            spread = (start + n * len(chosen) // MOST_QUICK for n in range(MOST_QUICK))
            chosen = [chosen[n % len(chosen)] for n in spread]
        result |= {*cases} - {cases[n] for n in chosen}
    return result
