"""The updates of a stacked pass, made for a few layers at a time.

In its backward pass, a layer hands over the gradients of all tasks. They wait until the next
layer's gradients would exceed the memory limit; then the method combines the waiting gradients.
Memory thus holds at most K gradients of the largest layer, and small layers share operator calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Step, Surgery
from cs_kernels.trunk.layers import LayerLists


class LayerUpdates:
    """Makes the updates of the parameters in `taken`.

    Args:
        gradients: Its rows hold the gradients of waiting parameters.
        step: The step, whose tasks take part.
        combine: Makes the updates of the parameters in the rows, and leaves the rows empty.
        by_module: Whether the method combines gradients per module, as with groups="layer".

    """

    def __init__(
        self,
        gradients: TaskGradients,
        step: Step,
        combine: Callable[[], None],
        *,
        by_module: bool,
    ) -> None:
        self._gradients = gradients
        self._step = step
        self._combine = combine
        self.by_module = by_module
        self.taken: Mapping[Tensor, int] = {}
        """The parameters whose update the method makes, and their indices."""
        self._reached: Mapping[str, set[Tensor]] = {}
        """By task, the leaves that its loss reaches."""
        self._limit = 0
        self._waiting: list[int] = []
        self._bytes = 0
        self._handed: set[int] = set()
        self._surgeries: list[tuple[list[int], Surgery]] = []
        """For each call of the method: its parameters, and the method's record."""

    def begin(
        self,
        taken: Mapping[Tensor, int],
        layers: Iterable[Sequence[Tensor]],
        reached: Mapping[str, set[Tensor]],
    ) -> None:
        """Begins a backward pass.

        Args:
            taken: The parameters whose update the method makes, and their indices.
            layers: The parameters of every layer.
            reached: By task, the leaves that its loss reaches; empty if the graph may hide leaves.

        """
        self.taken = taken
        self._reached = reached
        if self.by_module:
            self._gradients.modules = self._gradients.layers([*taken.values()])[1]
        self._limit = max((self._size(layer) for layer in layers), default=0)

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter whose update the method makes."""
        return self._gradients.names[self.taken[parameter]]

    def close(self) -> None:
        """Forgets the parameters."""
        self.taken, self._reached, self._surgeries = {}, {}, []
        self._gradients.modules = ()

    def _size(self, parameters: Sequence[Tensor]) -> int:
        """The bytes of all tasks' gradients of these parameters."""
        sizes = [p.numel() * p.itemsize for p in parameters if p in self.taken]
        return len(self._step.tasks) * sum(sizes)

    def make_room(self, parameters: Sequence[Tensor]) -> None:
        """Flushes waiting gradients if a layer's gradients would not fit beside them."""
        size = self._size(parameters)
        if self._bytes + size > self._limit:
            self.flush()
        self._bytes += size

    def hand_over(self, parameter: Tensor, grads: Iterable[Tensor]) -> None:
        """Takes a parameter's gradients, one after the other, in the order of the step's tasks."""
        index = self.taken[parameter]
        if index in self._handed:
            raise used_otherwise(self.name_of(parameter), "more than once")
        self._handed.add(index)
        self._waiting.append(index)
        for task, grad in zip(self._step.tasks, grads, strict=True):
            if not self._reached or parameter in self._reached[task]:
                self._gradients.put_one(task, index, grad.to(parameter.dtype))

    def flush(self) -> None:
        """Makes the updates of the waiting parameters."""
        if self._waiting:
            with record_function("cs_kernels.surgery"), torch.no_grad():
                self._step.surgery = Surgery()
                self._gradients.release_own()
                self._combine()
                self._gradients.publish()
            if self._step.surgery.rows:  # Empty if every waiting gradient was one task's own.
                self._surgeries.append((self._waiting, self._step.surgery))
        self._waiting, self._bytes = [], 0

    def surgery(self) -> Surgery:
        """The records of all of the method's calls, merged."""
        if not self._surgeries:
            return Surgery() if self.by_module else self._of_no_layer()
        layers_of = [set(self._gradients.layers(of_call)[0]) for of_call, _ in self._surgeries]
        return Surgery.merge([surgery for _, surgery in self._surgeries], layers_of)

    def _of_no_layer(self) -> Surgery:
        """An empty record, for a step in which all prioritized layers are frozen."""
        tasks = self._gradients.tasks
        like = self._gradients.parameters[0]
        return Surgery(
            tasks,
            prioritized=LayerLists.of([]),
            priorities=like.new_empty(0, dtype=torch.int64),
            products=like.new_empty((0, len(tasks), len(tasks)), dtype=torch.float64),
        )


def used_otherwise(name: str, how: str) -> ValueError:
    """The error for a parameter that is not used by exactly one layer."""
    return ValueError(
        f"trunk must use {name} in exactly one call of a convolution or linear layer for"
        f" step_together, but it is used {how}: call step instead"
    )
