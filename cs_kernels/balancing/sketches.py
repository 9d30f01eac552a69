"""A linear sketch of each task's gradient, from which the dot products are estimated."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cs_kernels.gradients import as_real
from cs_kernels.ops import run_sketch
from cs_kernels.ops.aliases import Weighting
from cs_kernels.ops.checks import LEAST_SKETCH, is_aligned
from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.ranks.collectives import all_reduce


class Sketches:
    """The sketches of K tasks in one tensor: a row per task, with a sketch per module.

    Args:
        tasks: K.
        shapes: The shape of each parameter; complex ones as pairs of real numbers, [..., 2].
        module_of: The index of each parameter's module. Each module has its own sketch.
        size: The number of elements of a sketch, a power of two. A module with fewer elements has a
            smaller sketch that holds all of them, so its dot products are exact.
        device: The device of the gradients.
        seed: The seed of the signs and bins, which are drawn anew in every step.

    """

    def __init__(
        self,
        tasks: int,
        shapes: Sequence[tuple[int, ...]],
        module_of: Sequence[int],
        size: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self._tasks, self._module_of, self._seed = tasks, module_of, seed
        numels = [*map(math.prod, shapes)]
        of_modules = [0] * (1 + max(module_of))
        self._offsets = []
        """The index of each parameter's first element; no two modules share an index."""
        for module, numel in zip(module_of, numels, strict=True):
            self._offsets.append((module << _MODULE_BITS) + of_modules[module])
            of_modules[module] += numel
        self.sizes = [min(size, _power_of_two(numel)) for numel in of_modules]
        # The number of blocks per module; two elements of one block never share a bin.
        self.blocks = [
            max(1, -(-numel // d)) for numel, d in zip(of_modules, self.sizes, strict=True)
        ]
        # Each row ends with the sum of the task's losses and the number of losses.
        numbers = sum(self.sizes) + 2
        self._values = torch.zeros(tasks, numbers, dtype=torch.float32, device=device)
        self._of_modules = [row[:-2].split(self.sizes) for row in self._values]
        self._stream: torch.cuda.Stream | None = None
        """The last stream that used the sketches."""
        self.is_empty = True
        self.begin(0)

    def begin(self, step: int) -> None:
        """Clears the sketches for a new step, with new signs and bins."""
        self._wait()
        if not self.is_empty:
            self._values.zero_()
            self.is_empty = True
        self._seed_of_step = (splitmix64(self._seed) + step) & ((1 << 63) - 1)
        self._key = random_key(self._seed_of_step, 0)

    def open(self, task: int) -> None:
        """Begins passes of a task."""
        self._run = run_sketch(self._values.device.type)
        self._rows = self._of_modules[task]

    def add(self, parameter: int, grad: Tensor) -> None:
        """Adds a gradient to the task's sketch, reading it once; micro-batches add up.

        Raises:
            ValueError: The gradient is on another device than the sketches.

        """
        self._check_device(grad)
        self.is_empty = False
        self._wait()
        module, offset = self._module_of[parameter], self._offsets[parameter]
        grad = as_real(grad.detach() if grad.requires_grad else grad)
        if _is_plain(grad):
            self._run(self._rows[module], grad, offset, self._key, None)
        else:
            torch.ops.cs_kernels.sketch_(self._rows[module], [grad], [offset], self._seed_of_step)

    def add_and_weigh(
        self,
        parameter: int,
        grad: Tensor,
        update: Tensor | None,
        weight: Tensor | float,
        *,
        adds: bool,
    ) -> bool:
        """As `add`, but also weights the gradient into `update`, if neither tensor needs a copy.

        Returns:
            Whether this was possible; if not, nothing was done.

        """
        if update is None or not _is_plain(grad):
            return False
        if update is not grad and not _is_plain(update):
            return False
        self._check_device(grad)
        self.is_empty = False
        self._wait()
        increment_version(update)
        row, offset = self._rows[self._module_of[parameter]], self._offsets[parameter]
        self._run(row, grad, offset, self._key, Weighting(update, weight, adds))
        return True

    def _check_device(self, grad: Tensor) -> None:
        if grad.device != self._values.device:
            raise ValueError(
                f"gradients must be on {self._values.device}, where the parameters were when the"
                f" balancer was built, got one on {grad.device}: build another balancer"
            )

    def _wait(self) -> None:
        """Waits for the last stream that used the sketches, since passes may use several."""
        if not self._values.is_cuda:
            return
        stream = torch.cuda.current_stream(self._values.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def spoil(self) -> None:
        """Makes the products of this step NaN, on all ranks after `average`."""
        self._wait()
        self._values.fill_(torch.nan)
        self.is_empty = False

    def add_loss(self, task: int, loss: Tensor) -> None:
        """Adds a task's loss; micro-batches add up."""
        self._wait()
        self._values[task, -2] += loss.detach()
        self._values[task, -1] += 1
        self.is_empty = False

    @property
    def losses(self) -> Tensor:
        """[K]: the tasks' losses, NaN for a task without a loss."""
        return torch.where(self._values[:, -1] > 0, self._values[:, -2], torch.nan)

    def average(self, groups: Sequence[object], ranks: int) -> None:
        """Averages sketches and losses over all ranks, one process group after another."""
        self._wait()
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


_MODULE_BITS = 40
"""The number of bits for the index of an element within its module."""


def _is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can read a tensor's memory as it is."""
    return (
        type(tensor) is Tensor
        and tensor.is_contiguous()
        and not (tensor.is_complex() or tensor.is_neg())
        and is_aligned(tensor)
    )


def _power_of_two(numel: int) -> int:
    """The smallest allowed sketch size, a power of two, that is at least `numel`."""
    return max(LEAST_SKETCH, 1 << (numel - 1).bit_length())
