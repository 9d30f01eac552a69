"""Linear sketches: argument checks and kernel operands."""

from abc import ABC, abstractmethod

from torch import Tensor

from cs_kernels.ops.aliases import Ints, Tensors
from cs_kernels.ops.checks import check_sketch, check_weighting
from cs_kernels.ops.operands import dense
from cs_kernels.ops.random import random_key


class SketchOperators(ABC):
    """Sketches with one launch per tensor."""

    @abstractmethod
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
        """Adds a tensor to the sketch; with `update`, also weights it, as `sketch_and_weight_`.

        Args:
            sketch: The sketch.
            tensor: The tensor.
            offset: The index of its first element.
            key: The key of the signs and bins.
            update: Where to write or add the weighted tensor; it may be the tensor itself.
            weight: A float64 scalar on the tensor's device; on the CPU, also a Python float.
            add: Whether to add to the update rather than overwrite it.

        Returns:
            Whether the kernel can use the tensors' memory as it is; if not, nothing was done.

        """

    def sketch_(self, sketch: Tensor, tensors: Tensors, offsets: Ints, seed: int) -> None:
        """Reads N elements once, and the sketch once per tensor; copies non-contiguous tensors."""
        check_sketch(sketch, tensors, offsets)
        key = random_key(seed, 0)
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.numel():
                done = self.run_sketch(sketch, dense(tensor), offset, key)
                assert done

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
                done = self.run_sketch(sketch, dense(tensor), offset, key, out, weight, add)
                assert done
                if out is not update:
                    update.copy_(out)
