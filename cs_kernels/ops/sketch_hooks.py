"""Sketches gradients in a backward pass without Python code, on the backend "cpu"."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cs_kernels.ops import backends, operands

if operands.unavailable is None:
    from cs_kernels import _C

Hook = Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None] | None]
"""A hook of the node that accumulates a leaf's gradient."""


class SketchHooks:
    """Hooks in C++ for gradients that are added to `.grad` in place, and for unweighted ones.

    Between the kernels of a backward pass, Python's code is no longer in the CPU's caches, so a
    hook in Python takes three times as long as one in C++.

    Args:
        device: The device of the gradients; hooks stay in Python for all but the CPU.
        reached: Receives the indices of the parameters whose gradients the hooks have taken.
        increment_versions: Tells autograd that tensors have changed.

    """

    def __init__(
        self,
        device: torch.device,
        reached: set[int],
        increment_versions: Callable[[tuple[Tensor, ...]], None],
    ) -> None:
        self._pass: Any = None
        if device.type == "cpu" and operands.unavailable is None:
            given = reached, torch.is_grad_enabled, increment_versions
            self._pass = _C.SketchPass(*given)

    def hook(self, leaf: Tensor, parameter: int, module: int, offset: int, otherwise: Hook) -> Hook:
        """The hook for a leaf; it calls `otherwise` in all other cases, and while no pass is open.

        Args:
            leaf: The leaf.
            parameter: Its index.
            module: The index of its module's sketch and weight.
            offset: The index of its first element.
            otherwise: The hook in Python.

        """
        if self._pass is None:
            return otherwise
        given = leaf, parameter, module, offset, otherwise
        hook: Hook = _C.SketchHook(self._pass, *given)
        return hook

    def open(
        self,
        run: Callable[..., bool],
        sketches: Sequence[Tensor],
        key: int,
        weights: Sequence[Tensor | float],
    ) -> None:
        """Begins a pass of a task, if `run` is the `run_sketch` of the backend "cpu".

        Args:
            run: The selected backend's `run_sketch`.
            sketches: The task's sketches, by module.
            key: The key of the signs and bins.
            weights: The task's weights, by module; empty to change no gradient.

        """
        if self._pass is not None and run is backends.run_sketch_of("cpu"):
            self._pass.open([*sketches], key, [*weights], torch.get_num_threads())

    def close(self) -> None:
        """Ends the pass."""
        if self._pass is not None:
            self._pass.close()
