"""Sketches on a GPU."""

from abc import abstractmethod

import torch
from torch import Tensor

from cs_kernels.ops.checks import fits_sketch
from cs_kernels.ops.compiled.sketch import SketchOperators
from cs_kernels.ops.gpu.device import on_device


class GpuSketch(SketchOperators):
    @abstractmethod
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
        """As `run_sketch`, with a weight in memory; both are None if nothing is weighted."""

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
        fits = fits_sketch(sketch, tensor, update)
        if fits:
            scalar = None
            if update is not None:
                scalar = torch.as_tensor(weight, dtype=torch.float64, device=sketch.device)
            with on_device(sketch.device):
                self.launch_sketch(sketch, tensor, offset, key, update, scalar, add)
        return fits
