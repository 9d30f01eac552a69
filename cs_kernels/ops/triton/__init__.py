"""The backend "triton": kernels for a GPU or, on the CPU, for Triton's interpreter."""

from dataclasses import dataclass
from struct import pack, unpack
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from cs_kernels.ops.gpu import GpuOperators, GradientLaunch, Phase2Launch, StrengthLaunch
from cs_kernels.ops.gpu.device import VECTOR_BYTES, upload
from cs_kernels.ops.gpu.phase2_plan import Phase2Plan, Tiling, power_of_two
from cs_kernels.ops.operands import Option, address_of, checked_options
from cs_kernels.ops.solvers import SOLVERS
from cs_kernels.ops.triton import combine, phase2, solvers
from cs_kernels.ops.triton import sketch as sketches
from cs_kernels.ops.triton.primitives import SEGMENT

_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

# Elements per tile, by itemsize and tasks: as many as fit in a program's registers.
_TILE = {
    2: {2: 2048, 4: 1024, 8: 1024, 64: 512},
    4: {2: 2048, 4: 1024, 8: 512, 64: 256},
    8: {2: 1024, 4: 512, 8: 256, 64: 128},
}
# Maximum tiles per item; reading an item's tables costs about as much as three tiles.
_MOST_TILES = 8
_MOST_GRAMIAN_TILES = 16
_LEAST_ITEMS = 16
# As `_LEAST_ITEMS`, in SUM items per multiprocessor; see `Tiling`.
_LAG = 4


@dataclass(frozen=True)
class Variant:
    """The sizes that kernels are compiled for."""

    tasks: int
    elements: int
    """Elements per tile."""

    @staticmethod
    def of(tasks: int, dtype: torch.dtype) -> "Variant":
        """Rounds the number of tasks up to 2, 4, 8 or 64, to compile few variants."""
        rounded = 64 if tasks > 8 else max(2, power_of_two(tasks))
        return Variant(rounded, _TILE[dtype.itemsize][rounded])


def _options(warps: int, registers: int, *, fma: bool = True) -> dict[str, Any]:
    """Launch options. FMA contraction improves accuracy, but lets lanes' copies of a sum differ."""
    options = {"num_warps": warps, "enable_fp_fusion": fma}
    # AMD's compiler has no option for the number of registers.
    return options if torch.version.hip else {**options, "maxnreg": registers}


OPTIONS = _options(4, 168)
"""Launch options that leave enough registers for three resident programs per multiprocessor."""


def gradient_options(tasks: int) -> dict[str, Any]:
    """Launch options for kernels over gradients; more than 4 tasks need more registers."""
    return OPTIONS if tasks <= 4 else _options(4, 255)


def solver_options(tasks: int) -> dict[str, Any]:
    """Launch options for a solver.

    A thread holds 2 numbers of a matrix, 4 if K > 16, and 16 if K > 32. The register limit is the
    maximum, because by default the assembler spills to raise occupancy.
    FMA contraction is off: it could make the lanes' copies of a sum differ, so that their loop
    conditions differ and the program hangs.
    """
    warps = min(8, max(1, tasks * tasks // 64))
    return _options(warps, min(255, 65536 // (32 * warps)), fma=False)


def gradient_constants(variant: Variant, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of kernels that read gradients."""
    return {"TASKS": variant.tasks, "ELEMENTS": variant.elements, "DTYPE": _DTYPES[dtype]}


def _signed(word: int) -> int:
    """Reinterprets 64 bits as an int64."""
    return word - (1 << 64) if word >> 63 else word


def _in_memory(
    device: torch.device, word: int, counter: Tensor | None, rate: float = 0.0
) -> Tensor:
    """Returns int64 [3] on the device: the word, the counter's address or 0, and the rate's bits.

    If these were scalar arguments, Triton would specialize kernels for values such as 1.
    """
    return upload([_signed(word), address_of(counter), *unpack("q", pack("d", rate))], device)


class TritonOperators(GpuOperators):
    """Runs one program per item."""

    whole_rows = True
    one_tile = True

    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling:
        """Segments have a fixed size, so a unit is a segment."""
        return Tiling(
            tile_segments=Variant.of(tasks, dtype).elements // SEGMENT.value,
            unit=SEGMENT.value,
            energy_elements=0,
            least_energy_rows=phase2.ENERGY_ROWS.value,
            most_tiles=_MOST_TILES,
            least_items=_LEAST_ITEMS,
            lag=_LAG,
        )

    def gradient_tiling(self, dtype: torch.dtype, tasks: int) -> tuple[int, int]:
        """Uses as many elements as fit in the registers."""
        return Variant.of(tasks, dtype).elements, _MOST_GRAMIAN_TILES

    def launch_phase2(self, launch: Phase2Launch) -> None:
        variant, plan = Variant.of(launch.tasks, launch.dtype), launch.plan
        tables = plan.items, plan.tensors, launch.table, launch.ticket, launch.counters
        strength = launch.energy, launch.gamma, launch.variance, plan.epsilon
        results = launch.item_products, launch.products, launch.coefficients
        constants = gradient_constants(variant, launch.dtype) | gradient_options(variant.tasks)
        phase2.phase2_kernel[(len(plan.items),)](
            *tables, *strength, *results, launch.tasks, **constants
        )

    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """One program per ENERGY_ROWS rows."""
        programs = -(-len(energy) // phase2.ENERGY_ROWS.value)
        vector = VECTOR_BYTES // weight.element_size() if vectors else 1
        phase2.energy_kernel[(programs,)](plan.tensors, weight, energy, VECTOR=vector, **OPTIONS)

    def launch_strengths(self, launch: StrengthLaunch) -> None:
        tasks, channels = launch.strength.shape
        phase2.strength_kernel[(1,)](
            launch.energy,
            launch.gamma,
            launch.variance,
            launch.epsilon,
            launch.strength,
            channels,
            tasks,
            NORMALIZE=launch.normalize,
            TASKS=Variant.of(tasks, torch.float64).tasks,
            **OPTIONS,
        )

    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """One program per 512 strengths, with the number of tasks rounded up."""
        tasks, channels = strength.shape
        rounded = Variant.of(tasks, strength.dtype).tasks
        phase2.priority_kernel[(-(-channels * rounded // 512),)](
            strength, priority, channels, tasks, TASKS=rounded, **OPTIONS
        )

    def _launch(self, kernel: Any, launch: GradientLaunch, *tensors: Tensor, **more: Any) -> None:
        tables = launch.items, launch.tensors, launch.table
        variant = Variant.of(launch.tasks, launch.dtype)
        constants = gradient_constants(variant, launch.dtype) | gradient_options(variant.tasks)
        kernel[(len(launch.items),)](*tables, *tensors, launch.tasks, **constants, **more)

    def launch_gramian(
        self, launch: GradientLaunch, counters: Tensor, products: Tensor, out: Tensor
    ) -> None:
        """The last program of a group to finish adds up the group's products."""
        self._launch(combine.gramian_kernel, launch, counters, products, out)

    def launch_combine(
        self, launch: GradientLaunch, weights: Tensor, protected: int | None
    ) -> None:
        """One program per tile."""
        self._launch(combine.combine_kernel, launch, weights, PROTECTED=protected)

    def launch_drop_signs(
        self, launch: GradientLaunch, leaks: Tensor, state: int, counter: Tensor | None
    ) -> None:
        """One program per tile."""
        drawn = _in_memory(launch.table.device, state, counter)
        self._launch(combine.drop_signs_kernel, launch, leaks, drawn)

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
        """One program per BINS bins."""
        words = upload([_signed(key), offset, tensor.numel()], sketch.device)
        given = tensor if update is None else update, words if weight is None else weight
        sketches.sketch_kernel[(len(sketch) // sketches.BINS.value,)](
            *(sketch, tensor, words, *given),
            SIZE=len(sketch),
            DTYPE=_DTYPES[tensor.dtype],
            UPDATES=update is not None,
            ADDS=add,
            **OPTIONS,
        )

    def launch_solver(self, name: str, gramian: Tensor, weights: Tensor, *options: Option) -> None:
        """One program per Gramian."""
        tasks = gramian.shape[-1]
        rounded = max(2, power_of_two(tasks))
        tensors, constants = [gramian, weights], solver_options(rounded)
        checked = checked_options(gramian, *options)
        if checked.similarities is not None:
            tensors.append(checked.similarities)
        match options:
            case (str() as scale,):
                constants["SCALE"] = scale
            case (first, *_):
                words = _in_memory(gramian.device, checked.word, checked.counter, checked.rate)
                tensors.append(words.view(torch.float64) if isinstance(first, float) else words)
        if name == "fair_grad":
            constants["SOLVES_S"] = cast("float", options[0]) > 1
        _SOLVERS[name][(weights.numel() // tasks,)](*tensors, tasks, TASKS=rounded, **constants)


_SOLVERS = {name: getattr(solvers, f"{name}_kernel") for name in SOLVERS}

operators = TritonOperators()
