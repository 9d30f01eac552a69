"""The backend "cuda": the kernels of `csrc/cuda`."""

from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops import operands
from cs_kernels.ops.gpu import GpuOperators, GradientLaunch, Phase2Launch, StrengthLaunch
from cs_kernels.ops.gpu.combine import GradientCallField, GradientField
from cs_kernels.ops.gpu.device import stream_of
from cs_kernels.ops.gpu.phase2_plan import (
    CallField,
    Counter,
    ItemKind,
    Phase2Plan,
    TensorField,
    Tiling,
)
from cs_kernels.ops.operands import SOLVER_NUMBERS, TYPES, Option, address_of, checked_options

_kernels: Any = None


def use_kernels(kernels: Any) -> None:
    """Makes all later launches use the kernels of this module.

    Raises:
        ImportError: The fields of the module's tables differ from the plans' fields.

    """
    global _kernels
    for table in (TensorField, CallField, Counter, ItemKind, GradientField, GradientCallField):
        fields = {field.name.lower(): int(field) for field in table}
        compiled = kernels.tables()[table.__name__]
        if compiled != fields:
            raise ImportError(
                f"the CUDA kernels must have the fields {fields} in {table.__name__}, got"
                f" {compiled}: build them again"
            )
    _kernels = kernels
    _tiling.cache_clear()


def unavailable() -> str | None:
    """Returns the reason why the kernels cannot run here, or None."""
    if operands.unavailable is not None:
        return operands.unavailable
    if _kernels is None:
        return f"the package was built without CUDA kernels: {_C.without_cuda}"
    if not torch.cuda.is_available() or torch.version.hip:
        return "there is no NVIDIA GPU"
    # The build may lack code for this GPU, or the driver may be too old for the CUDA runtime.
    reason: str | None = _kernels.unavailable()
    return reason


@cache
def _tiling(dtype: torch.dtype) -> Tiling:
    return Tiling(**_kernels.phase2_tiling(TYPES[dtype]))


if operands.unavailable is None:
    from cs_kernels import _C

    if hasattr(_C, "cuda"):
        use_kernels(_C.cuda)


def _addresses(*launches: Any) -> dict[str, int]:
    """The addresses of the tensors in these dataclasses, by field name."""
    values = ((f.name, getattr(launch, f.name)) for launch in launches for f in fields(launch))
    return {name: value.data_ptr() for name, value in values if isinstance(value, Tensor)}


class CudaOperators(GpuOperators):
    """Launches every kernel on the current stream of the tensors' device."""

    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling:
        """The tiling of `csrc/cuda/tuning.h`."""
        return _tiling(dtype)

    def gradient_tiling(self, dtype: torch.dtype, tasks: int) -> tuple[int, int]:
        """The tiling of `csrc/cuda/tuning.h`."""
        elements, most_tiles = _kernels.gradient_tiling(TYPES[dtype])
        return elements, most_tiles

    def launch_phase2(self, launch: Phase2Launch) -> None:
        """Launches a persistent kernel with as many blocks as can be resident."""
        _kernels.phase2(
            type=TYPES[launch.dtype],
            tasks=launch.tasks,
            item_count=len(launch.plan.items),
            gamma_type=TYPES[launch.gamma.dtype],
            variance_type=TYPES[launch.variance.dtype],
            stream=stream_of(launch.table.device),
            **_addresses(launch.plan, launch),
        )

    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """One block per ENERGY item."""
        rows = self.tiling(1, weight.dtype).energy_rows(weight.numel() // len(energy))
        _kernels.energies(
            type=TYPES[weight.dtype],
            tensor=plan.tensors.data_ptr(),
            items=-(-len(energy) // rows),
            weight=weight.data_ptr(),
            aligned=vectors,
            energy=energy.data_ptr(),
            stream=stream_of(weight.device),
        )

    def launch_strengths(self, launch: StrengthLaunch) -> None:
        """One block per task."""
        tasks, rows = launch.strength.shape
        _kernels.strengths(
            gamma_type=TYPES[launch.gamma.dtype],
            variance_type=TYPES[launch.variance.dtype],
            rows=rows,
            tasks=tasks,
            normalize=launch.normalize,
            stream=stream_of(launch.energy.device),
            **_addresses(launch),
        )

    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """One thread per channel."""
        tasks, channels = strength.shape
        _kernels.task_priority(
            type=TYPES[strength.dtype],
            strength=strength.data_ptr(),
            tasks=tasks,
            rows=channels,
            priority=priority.data_ptr(),
            stream=stream_of(strength.device),
        )

    def _gradients(self, launch: GradientLaunch) -> dict[str, Any]:
        return {
            "type": TYPES[launch.dtype],
            "tasks": launch.tasks,
            "items": launch.items.data_ptr(),
            "item_count": len(launch.items),
            "tensors": launch.tensors.data_ptr(),
            "table": launch.table.data_ptr(),
            "stream": stream_of(launch.table.device),
        }

    def launch_gramian(
        self, launch: GradientLaunch, counters: Tensor, products: Tensor, out: Tensor
    ) -> None:
        """The last block of a group to finish adds up the group's products."""
        _kernels.gramian(
            **self._gradients(launch),
            counters=counters.data_ptr(),
            products=products.data_ptr(),
            out=out.data_ptr(),
        )

    def launch_combine(
        self, launch: GradientLaunch, weights: Tensor, protected: int | None
    ) -> None:
        """One block per item."""
        in_double = weights.to(torch.float64)
        _kernels.combine(
            **self._gradients(launch),
            weights=in_double.data_ptr(),
            protected_task=-1 if protected is None else protected,
        )

    def launch_drop_signs(
        self, launch: GradientLaunch, leaks: Tensor, state: int, counter: Tensor | None
    ) -> None:
        """One block per item."""
        _kernels.drop_signs(
            **self._gradients(launch),
            leaks=leaks.data_ptr(),
            state=state,
            counter=address_of(counter),
        )

    def launch_sketch(
        self,
        sketch: Tensor,
        tensor: Tensor,
        offset: int,
        key: int,
        update: Tensor | None,
        weight: Tensor | None,
        add: bool,
    ) -> None:
        """One thread per bin."""
        _kernels.sketch(
            type=TYPES[tensor.dtype],
            data=tensor.data_ptr(),
            size=tensor.numel(),
            index=offset,
            key=key,
            sketch=sketch.data_ptr(),
            bins=len(sketch),
            update=address_of(update),
            weight=address_of(weight),
            add=add,
            stream=stream_of(sketch.device),
        )

    def launch_solver(self, name: str, gramian: Tensor, weights: Tensor, *options: Option) -> None:
        """One block per Gramian."""
        gramians = gramian.to(torch.float64)
        tasks = gramian.shape[-1]
        checked = checked_options(gramian, *options)
        _kernels.solve(
            solver=SOLVER_NUMBERS[name],
            gramians=gramians.data_ptr(),
            count=weights.numel() // tasks,
            tasks=tasks,
            weights=weights.data_ptr(),
            option=checked.word,
            counter=address_of(checked.counter),
            rate=checked.rate,
            similarities=address_of(checked.similarities),
            stream=stream_of(gramian.device),
        )


operators = CudaOperators()
