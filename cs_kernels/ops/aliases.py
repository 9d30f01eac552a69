"""Types of the operators' arguments."""

from collections.abc import Sequence

from torch import Tensor

Tensors = Sequence[Tensor]
Grads = Sequence[Tensor | None]
Ints = Sequence[int]
Floats = Sequence[float]
