"""Checks with forward passes that the tasks' parts of stacked tensors are independent."""

from collections.abc import Callable

import torch
from torch import Tensor


class PartsCheck:
    """Checks with three forward passes whether a part of any tensor depends on other parts.

    The first pass is unmodified. The second changes all parts but the first, in inputs and after
    normalizations; the third changes all but the last. In every tensor, the unchanged part must be
    the same as in the first pass.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._kept: int | None = None
        self._first_pass: list[tuple[Tensor, Tensor]] = []
        """The first and the last part of every tensor, in the order of the pass."""
        self._next = 0

    def begin(self, kept: int | None) -> None:
        """Begins a pass that changes all parts but `kept`, or no part if it is None."""
        self._kept, self._next = kept, 0

    def changed(self, x: Tensor) -> Tensor:
        """Changes the numbers in all parts of a normalized tensor but the kept one."""
        scale, offset = (0.5, 1.0) if self._kept == 0 else (2.0, -1.0)
        return self._with(x, lambda part: part * scale + offset)

    def changed_input(self, x: Tensor) -> Tensor:
        """Changes all parts of an input but the kept one: halves floats, reverses other tensors.

        The signs of floats, and the range of all other values, are unchanged.
        """
        if x.is_floating_point():
            return self._with(x, lambda part: part * 0.5)
        return self._with(x, lambda part: part.flip(0))

    def _with(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        if self._kept is None:
            return x
        parts = enumerate(self._split(x))
        return torch.cat([part if n == self._kept else change(part) for n, part in parts])

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(self._parts)

    def keeps(self, x: Tensor) -> bool:
        """Whether the unchanged part of this tensor is the same as in the first pass."""
        first, *_, last = self._split(x)
        if self._kept is None:
            self._first_pass.append((first.clone(), last.clone()))
            return True
        if self._next == len(self._first_pass):
            return False
        before = self._first_pass[self._next][self._kept > 0]
        self._next += 1
        return _alike(first if self._kept == 0 else last, before)


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not (one.is_floating_point() and one.numel()):
        return torch.equal(one, other)
    # A GPU may add in a different order.
    tolerance = 1e-4 if one.dtype.itemsize > 2 else 1e-2
    scale = other.abs().nan_to_num(posinf=0.0).max().item()
    return torch.allclose(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)
