"""A linear sketch of each task's gradient, from which the dot products are estimated."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cs_kernels.balancing.weighting import Weighting
from cs_kernels.gradients import as_real
from cs_kernels.ops.checks import LEAST_SKETCH
from cs_kernels.ops.random import splitmix64
from cs_kernels.ranks.collectives import all_reduce


class Sketches:
    """The sketches of K tasks in one tensor: a row per task, with a sketch per module.

    Args:
        tasks: K.
        numels: The number of elements of each parameter, counted as real numbers.
        module_of: The index of each parameter's module. Each module has its own sketch.
        size: The number of elements of a sketch, a power of two. A module with fewer elements has a
            smaller sketch that holds all of them, so its dot products are exact.
        device: The device of the gradients.
        seed: The seed of the signs and bins, which are drawn anew in every step.

    """

    def __init__(
        self,
        tasks: int,
        numels: Sequence[int],
        module_of: Sequence[int],
        size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._tasks, self._module_of, self._seed = tasks, module_of, seed
        of_modules = [0] * (1 + max(module_of))
        self._offsets = []
        """The index of each parameter's first element; no two modules share an index."""
        for numel, module in zip(numels, module_of, strict=True):
            self._offsets.append((module << _MODULE_BITS) + of_modules[module])
            of_modules[module] += numel
        self.sizes = [min(size, _power_of_two(numel)) for numel in of_modules]
        # The number of blocks per module; two elements of one block never share a bin.
        self.blocks = [-(-numel // d) for numel, d in zip(of_modules, self.sizes, strict=True)]
        # Each row ends with the sum of the task's losses and the number of losses.
        numbers = sum(self.sizes) + 2
        self._values = torch.zeros(tasks, numbers, dtype=torch.float32, device=device)
        self._of_modules = [row[:-2].split(self.sizes) for row in self._values]
        self._small: dict[tuple[int, int], tuple[list[Tensor], list[int]]] = {}
        """By task and module: copies of small gradients not yet added, and their offsets."""
        self._stream: torch.cuda.Stream | None = None
        """The last stream on which a gradient was added."""
        self.is_empty = True
        self.begin(0)

    def begin(self, step: int) -> None:
        """Clears the sketches for a new step, with new signs and bins."""
        self._drop_small()
        if not self.is_empty:
            self._values.zero_()
            self.is_empty = True
        self._key = (splitmix64(self._seed) + step) & ((1 << 63) - 1)

    def add(
        self, task: int, parameter: int, grad: Tensor, weighting: Weighting | None = None
    ) -> None:
        """Adds a gradient to a task's sketch and weights it, reading it once; passes add up."""
        self.is_empty = False
        if self._values.is_cuda:  # Backward passes may use several streams.
            stream = torch.cuda.current_stream(self._values.device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        module, offset = self._module_of[parameter], self._offsets[parameter]
        if weighting is not None and grad.numel() > _SMALL and _is_fast(grad, weighting.update):
            update, weight, add = weighting
            sketch = self._of_modules[task][module]
            increment_version(update)
            torch.ops.cs_kernels.sketch_and_weight_.default(
                sketch, [update], [grad], [offset], self._key, weight, add
            )
            return
        real = as_real(grad.detach())
        if real.numel() > _SMALL:
            self._run(task, module, [real], [offset])
        else:
            self._copy(task, module, real, offset)
        if weighting is not None:
            weighting.apply(grad)

    def _copy(self, task: int, module: int, grad: Tensor, offset: int) -> None:
        grads, offsets = self._small.setdefault((task, module), ([], []))
        grads.append(grad.clone())  # A later pass may write into the gradient's memory.
        offsets.append(offset)
        self._copied += grad.numel()
        if self._copied > _MOST_COPIED:
            self.add_small()

    def add_small(self) -> None:
        """Adds the copied small gradients, in few calls because one call each would take longer."""
        for (task, module), (grads, offsets) in self._small.items():
            if self._values.is_cuda:
                for grad in grads:  # Its memory may belong to another stream.
                    grad.record_stream(torch.cuda.current_stream(grad.device))
            self._run(task, module, grads, offsets)
        self._drop_small()

    def _drop_small(self) -> None:
        self._small.clear()
        self._copied = 0

    def _run(self, task: int, module: int, grads: list[Tensor], offsets: list[int]) -> None:
        sketch = self._of_modules[task][module]
        torch.ops.cs_kernels.sketch_.default(sketch, grads, offsets, self._key)

    def spoil(self) -> None:
        """Makes the products of this step NaN, on all ranks after `average`."""
        self._drop_small()
        self._values.fill_(torch.nan)
        self.is_empty = False

    def add_loss(self, task: int, loss: Tensor) -> None:
        """Adds a task's loss; micro-batches add up."""
        self._values[task, -2] += loss.detach()
        self._values[task, -1] += 1
        self.is_empty = False

    @property
    def losses(self) -> Tensor:
        """[K]: the tasks' losses, NaN for a task without a loss."""
        return torch.where(self._values[:, -1] > 0, self._values[:, -2], torch.nan)

    def average(self, groups: Sequence[object], ranks: int) -> None:
        """Averages sketches and losses over all ranks, one process group after another."""
        for group in groups:
            all_reduce(self._values, group=group)
        if groups:
            self._values /= ranks
            self.is_empty = False

    def products(self) -> Tensor:
        """Float64 [modules, K, K]: the dot products of the tasks' gradients."""
        modules = range(len(self.sizes))
        rows = [self._of_modules[task][module] for module in modules for task in range(self._tasks)]
        products: Tensor = torch.ops.cs_kernels.gramian(
            rows, [*modules], len(self.sizes), self._tasks
        )
        return products

    def variances(self) -> Tensor:
        """Float64 [modules]: the variance of an estimated product of orthogonal unit vectors."""
        entries = [
            (1 - 1 / blocks) / size for size, blocks in zip(self.sizes, self.blocks, strict=True)
        ]
        return torch.tensor(entries, dtype=torch.float64, device=self._values.device)


_SMALL, _MOST_COPIED = 1 << 17, 1 << 18
"""The maximum number of elements of a small gradient, and of all copies before they are added."""
_MODULE_BITS = 40
"""The number of bits for the index of an element within its module."""


def _is_fast(grad: Tensor, update: Tensor) -> bool:
    """Whether the kernel that sketches and weights at once needs no copies."""
    return grad.is_contiguous() and update.is_contiguous() and not grad.is_complex()


def _power_of_two(numel: int) -> int:
    """The smallest allowed sketch size, a power of two, that is at least `numel`."""
    return max(LEAST_SKETCH, 1 << (numel - 1).bit_length())
