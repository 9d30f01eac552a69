"""Random numbers as pure functions of a key and an index, bitwise equal to the kernels' numbers."""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): one increment of the state, then the finalizer."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def random_state(seed: int, step: int, counter: Tensor | None = None) -> int:
    """The random state of a step; reading a counter on a GPU synchronizes with the host."""
    replays = 0 if counter is None else int(counter)
    return (splitmix64(seed) + step + replays) & _MASK


def random_key(seed: int, step: int, counter: Tensor | None = None) -> int:
    return splitmix64(random_state(seed, step, counter))


def lowbias32(x: Tensor) -> Tensor:
    """The mixer "lowbias32" (Wellons 2018), for int64 in [0, 2^32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform_numbers(key: int, index: int, count: int, device: torch.device) -> Tensor:
    """Returns float64 [count] in [0, 1), multiples of 2^-24, for the indices from `index` on."""
    numbers = torch.empty(count, dtype=torch.float64, device=device)
    first = index
    while first < index + count:  # one iteration per range of 2^32 indices
        high = first >> 32
        last = min(index + count, (high + 1) << 32)
        low = torch.arange(last - first, device=device) + (first & 0xFFFFFFFF)
        numbers[first - index : last - index] = (_words(key, high, low) >> 8) * 2.0**-24
        first = last
    return numbers


def words(key: int, indices: Tensor) -> Tensor:
    """Returns one random int64 in [0, 2^32) per index."""
    result = torch.empty_like(indices)
    for high in sorted(set((indices >> 32).tolist())):
        chosen = indices >> 32 == high
        result[chosen] = _words(key, high, indices[chosen] & 0xFFFFFFFF)
    return result


def _words(key: int, high: int, low: Tensor) -> Tensor:
    """`words` for the indices high * 2^32 + low."""
    range_key = splitmix64((key + high) & _MASK)
    bits = (lowbias32(low ^ (range_key & 0xFFFFFFFF)) + (range_key >> 32)) & 0xFFFFFFFF
    return lowbias32(bits)
