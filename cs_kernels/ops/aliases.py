"""The types of the operators' lists."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Tensors = Sequence[Tensor]
Grads = Sequence[Tensor | None]
Ints = Sequence[int]
Floats = Sequence[float]
Dictionaries = list[dict[str, Any]]
