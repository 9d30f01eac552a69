"""Random numbers as pure functions of a key and an index, with the bits of the kernels."""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), of the state after one increment."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_state(seed: int, step: int, counter: Tensor | None = None) -> int:
    """The state of a seeded method at a step, to which a counter adds; reading it synchronizes."""
    more = 0 if counter is None else int(counter)
    return (splitmix64(seed) + step + more) & _MASK


def random_key(seed: int, step: int, counter: Tensor | None = None) -> int:
    """The key of one step."""
    return splitmix64(random_state(seed, step, counter))


def _lowbias32(x: Tensor) -> Tensor:
    """The mixer "lowbias32" (Wellons 2018), of int64 in [0, 2^32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform_numbers(key: int, index: int, count: int, device: torch.device) -> Tensor:
    """Float64 [count] in [0, 1), multiples of 2^-24, for the indices from `index` on."""
    numbers = torch.empty(count, dtype=torch.float64, device=device)
    first = index
    while first < index + count:  # once for every 2^32 indices
        high = first >> 32
        last = min(index + count, (high + 1) << 32)
        of_range = splitmix64((key + high) & _MASK)
        low = torch.arange(last - first, device=device) + (first & 0xFFFFFFFF)
        bits = (_lowbias32(low ^ (of_range & 0xFFFFFFFF)) + (of_range >> 32)) & 0xFFFFFFFF
        numbers[first - index : last - index] = (_lowbias32(bits) >> 8) * 2.0**-24
        first = last
    return numbers
