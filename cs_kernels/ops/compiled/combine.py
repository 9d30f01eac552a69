"""Gramian, weighted sum and sign dropping: argument checks and kernel operands."""

from abc import ABC, abstractmethod

from torch import Tensor

from cs_kernels.ops.aliases import Floats, Grads, Ints, Tensors
from cs_kernels.ops.checks import (
    check_group_of,
    check_signs,
    check_task_weights,
    check_tasks,
    first_present,
)
from cs_kernels.ops.operands import Operands, dense
from cs_kernels.ops.random import random_state


class CombineOperators(ABC):
    """Operators over all gradients; each operator reads every gradient once."""

    @abstractmethod
    def run_gramian(self, operands: Operands, group_of: Ints, groups: int) -> Tensor:
        """Returns float64 [groups, K, K]."""

    @abstractmethod
    def run_combine(
        self, operands: Operands, weights: Tensor, group_of: Ints, protected: int | None
    ) -> None:
        """Writes the outputs; `weights` has shape [groups, K]."""

    @abstractmethod
    def run_drop_signs(
        self,
        operands: Operands,
        leaks: Floats,
        state: int,
        counter: Tensor | None,
        offsets: Ints | None,
    ) -> None:
        """Writes the outputs; adds the counter to the random state.

        Without offsets, each tensor's indices continue after the previous tensor's.
        """

    def gramian(self, grads: Grads, group_of: Ints, groups: int, tasks: int) -> Tensor:
        """Reads K * N gradient elements once."""
        check_tasks(tasks)
        check_group_of(group_of, groups, len(group_of))
        operands = Operands(first_present(grads, len(group_of), tasks), grads, tasks, name="grads")
        return self.run_gramian(operands, group_of, groups)

    def combine_(
        self,
        updates: Tensors,
        grads: Grads,
        weights: Tensor,
        group_of: Ints,
        tasks: int,
        protected: int | None = None,
    ) -> None:
        """Reads K * N gradient elements once and writes N."""
        check_task_weights(weights, group_of, tasks, updates, protected)
        operands = Operands(updates, grads, tasks)
        self.run_combine(operands, dense(weights), group_of, protected)
        operands.finish()

    def drop_signs_(
        self,
        updates: Tensors,
        grads: Grads,
        leaks: Floats,
        seed: int,
        step: int,
        tasks: int,
        counter: Tensor | None = None,
        offsets: Ints | None = None,
    ) -> None:
        """Reads K * N gradient elements once and writes N."""
        check_signs(updates, leaks, tasks, counter, offsets)
        operands = Operands(updates, grads, tasks)
        self.run_drop_signs(operands, leaks, random_state(seed, step), counter, offsets)
        operands.finish()
