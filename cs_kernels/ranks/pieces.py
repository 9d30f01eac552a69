"""Cuts a range of a weight's elements into pieces that have output channels as a dimension.

A rank holds a range of each parameter, which may begin and end inside an output channel. The Phase
2 operators take this range as a few tensors, one per piece, whose products add up.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

ChannelArray = tuple[int, int, int, int]
"""A weight's memory as an array [groups, outer, channels of a group, inner]."""


class Piece(NamedTuple):
    """Adjacent elements of a weight, as a tensor with output channels."""

    start: int
    """The index of the first element in the weight's memory."""
    shape: tuple[int, ...]
    out_channel_dim: int
    groups: int
    first_channel: int
    channels: int

    def of(self, memory: Tensor, start: int) -> Tensor:
        """The piece's elements in `memory`, which begins with the weight's element `start`."""
        first = self.start - start
        return memory[first : first + prod(self.shape)].view(self.shape)


def channel_array(
    shape: Sequence[int], strides: Sequence[int], out_channel_dim: int, groups: int
) -> ChannelArray:
    """The array of a dense weight whose dimension 0 is the outermost in memory."""
    channels = shape[out_channel_dim]
    if channels > 1:
        others = [d for d, size in enumerate(shape) if size > 1 and d != out_channel_dim]
        outer = prod(shape[d] for d in others if strides[d] > strides[out_channel_dim])
    else:  # The stride of a single channel is arbitrary.
        outer = prod(shape[:out_channel_dim])
    return groups, outer // groups, channels, prod(shape) // (outer * channels)


def pieces_of(start: int, stop: int, array: ChannelArray) -> list[Piece]:
    """Cuts a range of elements into at most seven pieces, each the largest that fits."""
    _, outer, channels, inner = array
    row, block = channels * inner, outer * channels * inner
    found = []
    while start < stop:
        group, size = start // block, stop - start
        first = group * channels
        if start % block == 0 and size >= block:
            n = size // block
            if outer == 1:
                piece = Piece(start, (n * channels, inner), 0, 1, first, n * channels)
            else:
                shape = n * outer, channels, inner
                piece = Piece(start, shape, 1, n, first, n * channels)
        elif start % row == 0 and size >= row:
            n = min((block - start % block) // row, size // row)
            piece = Piece(start, (n, channels, inner), 1, 1, first, channels)
        elif start % inner == 0 and size >= inner:
            first += start % row // inner
            n = min((row - start % row) // inner, size // inner)
            piece = Piece(start, (n, inner), 0, 1, first, n)
        else:
            first += start % row // inner
            n = min(inner - start % inner, size)
            piece = Piece(start, (1, n), 0, 1, first, 1)
        found.append(piece)
        start += prod(piece.shape)
    return found
