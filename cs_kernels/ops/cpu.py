"""The backend "cpu": the compiled kernels of `csrc/cpu`."""

import torch
from torch import Tensor

from cs_kernels import _C
from cs_kernels.ops.aliases import Floats, Ints
from cs_kernels.ops.checks import check_solver, check_strength
from cs_kernels.ops.compiled.combine import CombineOperators
from cs_kernels.ops.compiled.phase2 import Factors, Phase2Operators
from cs_kernels.ops.compiled.sketch import SketchOperators
from cs_kernels.ops.operands import (
    SOLVER_NUMBERS,
    TYPES,
    ChannelLayout,
    Operands,
    Option,
    address_of,
    checked_options,
    dense,
)


def _in_double(tensor: Tensor) -> Tensor:
    return dense(tensor.to(torch.float64))


class CpuOperators(Phase2Operators, CombineOperators, SketchOperators):
    """Each kernel is one C++ call.

    Solvers, strengths and priorities run on one thread, all other kernels on as many as torch uses.
    """

    def run_phase2(
        self,
        operands: Operands,
        priorities: Ints,
        factors: Factors | None,
        products: Tensor | None = None,
    ) -> None:
        weights, gamma, variance, eps = factors or Factors([], torch.empty(0), torch.empty(0), [])
        gamma, variance = _in_double(gamma), _in_double(variance)
        _C.phase2(
            operands.native,
            priorities=priorities,
            weights=[weight.data_ptr() for weight in weights],
            gamma=gamma.data_ptr(),
            variance=variance.data_ptr(),
            epsilon=list(eps),
            products=address_of(products),
            threads=torch.get_num_threads(),
        )

    def run_products(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        _C.phase2_products(
            operands.native,
            priorities=priorities,
            products=products.data_ptr(),
            threads=torch.get_num_threads(),
        )

    def run_apply(self, operands: Operands, priorities: Ints, products: Tensor) -> None:
        _C.phase2_apply(
            operands.native,
            priorities=priorities,
            products=products.data_ptr(),
            threads=torch.get_num_threads(),
        )

    def energies(self, weight: Tensor, layout: ChannelLayout, window: int) -> Tensor:
        energy = torch.empty(layout[0] * layout[2], dtype=torch.float64)
        _C.channel_energies(
            type=TYPES[weight.dtype],
            layout=layout,
            weight=weight.data_ptr(),
            energy=energy.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return energy if window == 1 else energy / window

    def strengths(
        self, energy: Tensor, gamma: Tensor, variance: Tensor, eps: Floats, *, normalize: bool
    ) -> Tensor:
        gamma, variance = _in_double(gamma), _in_double(variance)
        strength = torch.empty((len(eps), len(energy)), dtype=torch.float64)
        _C.strengths(
            energy=energy.data_ptr(),
            gamma=gamma.data_ptr(),
            variance=variance.data_ptr(),
            epsilon=list(eps),
            rows=len(energy),
            normalize=normalize,
            strength=strength.data_ptr(),
        )
        return strength

    def task_priority(self, strength: Tensor) -> Tensor:
        check_strength(strength)
        numbers = _in_double(strength)
        tasks, rows = numbers.shape
        priority = torch.empty(rows, dtype=torch.int64)
        _C.task_priority(
            strength=numbers.data_ptr(), tasks=tasks, rows=rows, priority=priority.data_ptr()
        )
        return priority

    def run_gramian(self, operands: Operands, group_of: Ints, groups: int) -> Tensor:
        result = torch.empty((groups, operands.tasks, operands.tasks), dtype=torch.float64)
        _C.gramian(
            operands.native,
            group_of=group_of,
            groups=groups,
            out=result.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return result

    def run_combine(
        self, operands: Operands, weights: Tensor, group_of: Ints, protected: int | None
    ) -> None:
        in_double = weights.to(torch.float64)
        _C.combine(
            operands.native,
            group_of=group_of,
            groups=len(weights),
            weights=in_double.data_ptr(),
            protected_task=-1 if protected is None else protected,
            threads=torch.get_num_threads(),
        )

    def run_drop_signs(
        self,
        operands: Operands,
        leaks: Floats,
        state: int,
        counter: Tensor | None,
        offsets: Ints | None,
    ) -> None:
        _C.drop_signs(
            operands.native,
            leaks=leaks,
            state=state,
            counter=address_of(counter),
            offsets=offsets,
            threads=torch.get_num_threads(),
        )

    def run_sketch(
        self,
        sketch: Tensor,
        tensor: Tensor,
        offset: int,
        key: int,
        update: Tensor | None = None,
        weight: Tensor | float = 1.0,
        add: bool = False,
    ) -> bool:
        threads = torch.get_num_threads()
        return _C.sketch(sketch, tensor, offset, key, update, float(weight), add, threads)

    def solve(self, name: str, gramian: Tensor, *options: Option) -> Tensor:
        """Reads K * K numbers and writes K numbers per Gramian."""
        check_solver(name, gramian, *options)
        tasks = gramian.shape[-1]
        gramians = _in_double(gramian)
        weights = torch.empty(gramians.shape[:-1], dtype=torch.float64)
        checked = checked_options(gramian, *options)
        _C.solve(
            SOLVER_NUMBERS[name],
            gramians.data_ptr(),
            weights.numel() // tasks,
            tasks,
            weights.data_ptr(),
            checked.word,
            address_of(checked.counter),
            checked.rate,
            address_of(checked.similarities),
        )
        return weights


operators = CpuOperators()
