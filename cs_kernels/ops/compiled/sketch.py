"""Linear sketches: argument checks and kernel operands."""

from abc import ABC, abstractmethod

from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors
from cs_kernels.ops.checks import check_sketch
from cs_kernels.ops.operands import dense
from cs_kernels.ops.random import random_key


class SketchOperators(ABC):
    """Sketches with one launch per tensor."""

    @abstractmethod
    def run_sketch(self, sketch: Tensor, tensor: Tensor, offset: int, key: int) -> None:
        """Adds a contiguous, non-empty tensor to the sketch."""

    def sketch_(self, sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
        """Reads N elements once, and the sketch once per tensor; copies non-contiguous tensors."""
        check_sketch(sketch, tensors, offsets)
        key = random_key(seed, 0)
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.numel():
                self.run_sketch(sketch, dense(tensor), offset, key)
