"""A linear sketch of each task's gradient, from which the dot products are estimated."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cs_kernels.gradients import as_real
from cs_kernels.ops import run_sketch
from cs_kernels.ops.checks import LEAST_SKETCH
from cs_kernels.ops.random import random_key, splitmix64
from cs_kernels.ops.sketch_hooks import Hook, SketchHooks
from cs_kernels.ranks.collectives import all_reduce
from cs_kernels.torch_internals.autograd import increment_versions


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
        reached: Receives the indices of the parameters whose gradients hooks in C++ have taken.

    """

    def __init__(
        self,
        tasks: int,
        shapes: Sequence[tuple[int, ...]],
        module_of: Sequence[int],
        size: int,
        device: torch.device,
        seed: int,
        reached: set[int],
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
        self._on_gpu = self._values.is_cuda
        self._stream: torch.cuda.Stream | None = None
        """The last stream that used the sketches."""
        self.is_empty = True
        self._hooks = SketchHooks(device, reached, increment_versions)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Clears the sketches for a new step, with new signs and bins."""
        self._hooks.close()
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

    def hook(self, leaf: Tensor, parameter: int, otherwise: Hook) -> Hook:
        """The hook for a parameter's leaf: `otherwise`, or one in C++ that replaces most calls."""
        module, offset = self._module_of[parameter], self._offsets[parameter]
        return self._hooks.hook(leaf, parameter, module, offset, otherwise)

    def open_hooks(self, weights: Sequence[Tensor | float]) -> None:
        """Lets the hooks in C++ add and weight the gradients of this task's pass.

        Args:
            weights: The task's weights, by module; empty to change no gradient.

        """
        self.is_empty = False
        self._hooks.open(self._run, self._rows, self._key, weights)

    def close_hooks(self) -> None:
        """Ends what `open_hooks` began."""
        self._hooks.close()

    def add(
        self,
        parameter: int,
        grad: Tensor,
        update: Tensor | None = None,
        weight: Tensor | float = 1.0,
        *,
        adds: bool = False,
    ) -> bool:
        """Adds a gradient to the task's sketch, reading it once; micro-batches add up.

        Args:
            parameter: The parameter's index.
            grad: The gradient.
            update: Where the weighted gradient is written, or added.
            weight: The weight.
            adds: Whether to add to the update.

        Returns:
            Whether an update was made, too; not if a tensor would have to be copied.

        Raises:
            ValueError: The gradient is on another device than the sketches.

        """
        self._wait()
        self.is_empty = False
        row, offset = self._rows[self._module_of[parameter]], self._offsets[parameter]
        negated = grad.is_neg() or (update is not None and update.is_neg())
        plain = type(grad) is Tensor and not negated
        if plain and self._run(row, grad, offset, self._key, update, weight, adds):
            if update is not None:
                increment_versions((update,))
            return update is not None
        if grad.device != self._values.device:
            raise ValueError(
                f"gradients must be on {self._values.device}, where the parameters were when the"
                f" balancer was built, got one on {grad.device}: build another balancer"
            )
        grad = as_real(grad.detach() if grad.requires_grad else grad)
        torch.ops.cs_kernels.sketch_(row, [grad], [offset], self._seed_of_step)
        return False

    def _wait(self) -> None:
        """Waits for the last stream that used the sketches, since passes may use several."""
        if not self._on_gpu:
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


def _power_of_two(numel: int) -> int:
    """The smallest allowed sketch size, a power of two, that is at least `numel`."""
    return max(LEAST_SKETCH, 1 << (numel - 1).bit_length())
