"""Random loss weighting."""

from functools import reduce
from math import exp
from statistics import NormalDist

from torch import Tensor

from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.options import checked_seed
from cs_kernels.step import Step
from cs_kernels.weightings.weighting import Weighting


class RandomWeights(Weighting):
    """Draws new weights in each step: random loss weighting (Lin et al., 2021).

    The weights of a step's tasks are the softmax of standard normal numbers and sum to one, as in
    the paper. They depend only on the seed, the step number and the names of the step's tasks, so
    they are the same on all ranks and for all micro-batches, and need no state. A CUDA graph would
    repeat the same weights, so a captured step rejects this weighting.

    Args:
        seed: The seed of the draws.

    Raises:
        ValueError: The seed is outside [0, 2^63).
        TypeError: The seed is not an integer.

    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = checked_seed(seed)
        self._drawn: tuple[tuple[int, tuple[str, ...]], dict[str, float]] | None = None
        """A step's number, tasks and weights, cached because `weigh` is called once per task."""

    def _normal(self, task: str, number: int) -> float:
        """A standard normal number, which depends on the task's name but not on its index."""
        key = random_key(self.seed, number)
        bits = splitmix64(reduce(lambda x, byte: splitmix64(x ^ byte), task.encode(), key))
        # 52 bits plus one half: never 0, and never rounded to 1.
        return NormalDist().inv_cdf(((bits >> 12) + 0.5) * 2.0**-52)

    def weigh(self, task: str, loss: Tensor, step: Step) -> Tensor:
        """The loss times its weight in this step."""
        key = step.number, step.tasks
        if self._drawn is None or self._drawn[0] != key:
            shares = {other: exp(self._normal(other, step.number)) for other in step.tasks}
            total = sum(shares.values())
            self._drawn = key, {other: share / total for other, share in shares.items()}
        return loss * self._drawn[1][task]

    def captured_state(self) -> list[Tensor]:
        """Rejects captured steps.

        Raises:
            ValueError: Always, because the weights are drawn on the host.

        """
        raise ValueError(
            f"weighting must be computed on the device in a captured step, got {self!r}, which"
            " draws random numbers on the host"
        )

    def __repr__(self) -> str:
        return f"RandomWeights(seed={self.seed})"
