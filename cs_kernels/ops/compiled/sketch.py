"""Linear sketches: argument checks and kernel operands."""

from abc import ABC, abstractmethod

from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors, Weighting
from cs_kernels.ops.checks import check_sketch, check_weighting
from cs_kernels.ops.operands import dense
from cs_kernels.ops.random import random_key


class SketchOperators(ABC):
    """Sketches with one launch per tensor."""

    @abstractmethod
    def run_sketch(
        self, sketch: Tensor, tensor: Tensor, offset: int, key: int, weighting: Weighting | None
    ) -> None:
        """Adds a contiguous, non-empty tensor to the sketch; with `weighting`, also weights it."""

    def sketch_(self, sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
        """Reads N elements once, and the sketch once per tensor; copies non-contiguous tensors."""
        check_sketch(sketch, tensors, offsets)
        key = random_key(seed, 0)
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.numel():
                self.run_sketch(sketch, dense(tensor), offset, key, None)

    def sketch_and_weight_(
        self,
        sketch: Tensor,
        updates: Tensors,
        tensors: Tensors,
        offsets: Ints,
        seed: int,
        weight: Tensor,
        add: bool,
    ) -> None:
        """As `sketch_`; also writes N update elements, and reads them first if `add`."""
        check_sketch(sketch, tensors, offsets)
        check_weighting(updates, tensors, weight)
        key = random_key(seed, 0)
        for update, tensor, offset in zip(updates, tensors, offsets, strict=True):
            if tensor.numel():
                out = dense(update)
                weighting = Weighting(out, weight, add)
                self.run_sketch(sketch, dense(tensor), offset, key, weighting)
                if out is not update:
                    update.copy_(out)
