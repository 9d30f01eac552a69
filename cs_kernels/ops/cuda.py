"""The CUDA kernels, through the compiled module `cs_kernels._C`."""

from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops import operands
from cs_kernels.ops.gpu import GpuOperators, GradientLaunch, Phase2Launch
from cs_kernels.ops.gpu.device import stream_of
from cs_kernels.ops.gpu.plan import Phase2Plan, Tiling
from cs_kernels.ops.operands import ALIGNED_SCALES, DTYPES

_kernels: Any = None
if operands.unavailable is None:
    from cs_kernels import _C

    _kernels = getattr(_C, "cuda", None)


def unavailable() -> str | None:
    """Why the kernels cannot run here, if they cannot."""
    if operands.unavailable is not None:
        return operands.unavailable
    if _kernels is None:
        return "cs_kernels was built without CUDA kernels (CS_KERNELS_CUDA=1 asks for them)"
    if not torch.cuda.is_available() or torch.version.hip:
        return "there is no NVIDIA GPU"
    # Not every GPU has code in this build, nor has every driver what its runtime needs.
    reason: str | None = _kernels.unavailable()
    return reason


_TYPES = {dtype: code for code, dtype in enumerate(DTYPES)}

THREADS = 128
"""Of a block. Tiles are those of csrc/cuda; a test compares them."""

_GENERAL_TILE = 32 * 16


class CudaOperators(GpuOperators):
    """Blocks that draw items; every launch is on the current stream of the tensors' device."""

    def tiling(self, tasks: int, dtype: torch.dtype) -> Tiling:
        """A tile is 16 bytes of each gradient for each thread; it goes on in the next row."""
        vectors = THREADS * 16 // dtype.itemsize
        return Tiling(
            # Other numbers of tasks have the general kernel: 16 tiles, one after another, in shared
            # memory.
            elements=vectors if 2 <= tasks <= 8 else _GENERAL_TILE,
            segment=1,
            # As long as an item of SUM, for as many loads under way.
            energy_elements=16 * vectors,
            least_energy_rows=4,
            # An item begins with three reads that wait for each other, about two microseconds: as
            # long as a block takes for some tiles.
            most_tiles=16,
            # A block runs about six of them after another: what the last leaves idle is a tenth.
            least_items=32,
            # As many blocks as run at once on a multiprocessor.
            lag=6,
        )

    def gradient_tile(self, tasks: int, dtype: torch.dtype, *, drop: bool) -> int:
        """Four times 16 bytes for each thread."""
        return 4 * THREADS * 16 // dtype.itemsize

    def launch_phase2(self, launch: Phase2Launch) -> None:
        """One launch of as many blocks as run at once."""
        plan = launch.plan
        _kernels.phase2(
            type=_TYPES[launch.dtype],
            tasks=launch.tasks,
            items=plan.items.data_ptr(),
            item_count=len(plan.items),
            tensors=plan.tensors.data_ptr(),
            table=launch.table.data_ptr(),
            ticket=launch.ticket.data_ptr(),
            counters=launch.counters.data_ptr(),
            energy=launch.energy.data_ptr(),
            gamma_type=_TYPES[launch.gamma.dtype],
            gamma=launch.gamma.data_ptr(),
            variance_type=_TYPES[launch.variance.dtype],
            variance=launch.variance.data_ptr(),
            epsilon=plan.epsilon.data_ptr(),
            products=launch.products.data_ptr(),
            factors=launch.factors.data_ptr(),
            stream=stream_of(launch.table.device),
        )

    def launch_energies(
        self, plan: Phase2Plan, weight: Tensor, energy: Tensor, *, vectors: bool
    ) -> None:
        """The rows of an ENERGY item a block."""
        rows = self.tiling(1, weight.dtype).energy_rows(weight.numel() // len(energy))
        _kernels.energies(
            type=_TYPES[weight.dtype],
            tensor=plan.tensors.data_ptr(),
            items=-(-len(energy) // rows),
            weight=weight.data_ptr(),
            aligned=vectors,
            energy=energy.data_ptr(),
            stream=stream_of(weight.device),
        )

    def launch_strengths(
        self,
        energy: Tensor,
        gamma: Tensor,
        variance: Tensor,
        epsilon: Tensor,
        strength: Tensor,
        *,
        normalize: bool,
    ) -> None:
        """One block a task."""
        tasks, channels = strength.shape
        _kernels.strengths(
            energy=energy.data_ptr(),
            gamma_type=_TYPES[gamma.dtype],
            gamma=gamma.data_ptr(),
            variance_type=_TYPES[variance.dtype],
            variance=variance.data_ptr(),
            epsilon=epsilon.data_ptr(),
            rows=channels,
            tasks=tasks,
            normalize=normalize,
            strength=strength.data_ptr(),
            stream=stream_of(energy.device),
        )

    def launch_priority(self, strength: Tensor, priority: Tensor) -> None:
        """One thread a channel."""
        tasks, channels = strength.shape
        _kernels.task_priority(
            type=_TYPES[strength.dtype],
            strength=strength.data_ptr(),
            tasks=tasks,
            rows=channels,
            priority=priority.data_ptr(),
            stream=stream_of(strength.device),
        )

    def _gradients(self, launch: GradientLaunch) -> dict[str, Any]:
        """The arguments of every function over gradients."""
        return {
            "type": _TYPES[launch.dtype],
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
        """The last block of a group adds up."""
        _kernels.gramian(
            **self._gradients(launch),
            counters=counters.data_ptr(),
            products=products.data_ptr(),
            out=out.data_ptr(),
        )

    def launch_combine(self, launch: GradientLaunch, weights: Tensor) -> None:
        """One tile a block."""
        in_double = weights.to(torch.float64)
        _kernels.combine(**self._gradients(launch), weights=in_double.data_ptr())

    def launch_drop_signs(self, launch: GradientLaunch, leaks: Tensor, keys: Tensor) -> None:
        """One tile a block."""
        _kernels.drop_signs(**self._gradients(launch), leaks=leaks.data_ptr(), keys=keys.data_ptr())

    def launch_solver(
        self, name: str, gramian: Tensor, weights: Tensor, *arguments: Tensor, **options: str
    ) -> None:
        """One thread a Gramian: as on the CPU, and for few tasks a wait for itself either way."""
        in_double = gramian.to(torch.float64)
        tasks = gramian.shape[-1]
        _kernels.solve(
            method=name,
            gramians=in_double.data_ptr(),
            count=weights.numel() // tasks,
            tasks=tasks,
            weights=weights.data_ptr(),
            argument=arguments[0].data_ptr() if arguments else 0,
            scale=ALIGNED_SCALES.index(options.get("scale", "min")),
            stream=stream_of(gramian.device),
        )


operators = CudaOperators()
