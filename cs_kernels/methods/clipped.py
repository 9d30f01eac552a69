"""Clips each task's gradient before another method is applied."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cs_kernels.methods.gramian import GramianMethod, nan_unless_finite
from cs_kernels.methods.sum import Ones, Sum
from cs_kernels.options import is_finite_number
from cs_kernels.step import Step


class Clipped(GramianMethod):
    """Clips each task's gradient to a maximum norm, then applies another method.

    A task's gradient over the shared parameters is scaled to `max_norm` if its norm is larger; the
    gradients of the task's head and normalization are unchanged. The squared norms are the diagonal
    of the Gramian, and the factors go into the task weights, so clipping neither reads nor writes a
    gradient. With groups="layer", each module's gradient is clipped; with `features=z`, the
    gradient with respect to z; on several ranks, the mean gradient over the ranks. Reports show the
    norms and cosines of the unclipped gradients.

    Args:
        method: A Gramian method, or `Sum()`; its `groups`, `update_every` and kept gradients also
            apply here.
        max_norm: A positive number, or a function of the norms, float64 [K] or [layers, K], that
            returns the limits, such as the median:
            `lambda norms: norms.median(-1, keepdim=True).values`.

    Raises:
        TypeError: `method` has no Gramian, like `ConnectionStrength` or `GradDrop`.
        ValueError: `max_norm` is neither a positive number nor a function.

    Examples:
        >>> method = cs.Clipped(cs.Sum(), max_norm=2.0)
        >>> method.weights(torch.tensor([[16.0, 0.0], [0.0, 1.0]]).double())
        tensor([0.5000, 1.0000], dtype=torch.float64)

    """

    def __init__(
        self, method: GramianMethod | Sum, max_norm: float | Callable[[Tensor], Tensor]
    ) -> None:
        if not isinstance(method, GramianMethod | Sum):
            raise TypeError(f"method must be a Gramian method or Sum(), got {method!r}")
        if not callable(max_norm) and not (is_finite_number(max_norm) and max_norm > 0):
            raise ValueError(
                f"max_norm must be positive and finite, or a function, got {max_norm!r}"
            )
        self.method = Ones() if isinstance(method, Sum) else method
        self.max_norm = max_norm
        super().__init__(self.method.groups, self.method.update_every)
        self.keeps = self.method.keeps

    @property
    def layerwise(self) -> bool:
        """Whether the inner method is layerwise."""
        return self.method.layerwise

    def check(self, tasks: Sequence[str]) -> None:
        """Runs the inner method's checks."""
        self.method.check(tasks)

    def weights(self, gramian: Tensor, step: Step | None = None) -> Tensor:
        """The task weights of the clipped gradients, times the clipping factors."""
        norms = gramian.diagonal(dim1=-2, dim2=-1).sqrt()
        limits = self.max_norm(norms) if callable(self.max_norm) else self.max_norm
        # A zero gradient is unchanged.
        factors = torch.where(norms > limits, limits / norms, 1.0)
        scaled = gramian * factors.unsqueeze(-1) * factors.unsqueeze(-2)
        return nan_unless_finite(factors * self.method.weights(scaled, step), gramian)

    def state_dict(self) -> dict[str, Any]:
        """The inner method's name and state."""
        return {"method": type(self.method).__name__, "state": self.method.state_dict()}

    def check_state(self, state: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Checks the inner method's name and state."""
        if state["method"] != (name := type(self.method).__name__):
            raise ValueError(f"state must be for method {name}, got one for {state['method']}")
        self.method.check_state(state["state"], tasks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the inner method's state."""
        self.method.load_state_dict(state["state"])

    def captured_state(self) -> list[Tensor]:
        """The inner method's tensors."""
        return self.method.captured_state()

    def __repr__(self) -> str:
        method = "Sum()" if isinstance(self.method, Ones) else repr(self.method)
        return f"Clipped({method}, max_norm={self.max_norm!r})"
