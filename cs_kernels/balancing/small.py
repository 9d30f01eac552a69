"""Small gradients, which are sketched and weighted together at the end of a backward pass."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cs_kernels.balancing.sketches import Sketches
from cs_kernels.balancing.weighting import Factor, adds_in_place, has_hooks_after, weigh_together
from cs_kernels.torch_internals.autograd import at_end_of_pass, current_pass


class SmallGradients:
    """The small gradients of a backward pass, while it runs.

    Autograd accumulates each in an empty `.grad`; what was there before is set aside. At the end of
    the pass, one call adds all of them to the sketches, and another one weights them. Calls for
    each of them would take longer than all large gradients.

    Args:
        sketches: The sketches, which say which parameters are small.
        module_of: The index of each parameter's module.

    """

    def __init__(self, sketches: Sketches, module_of: Sequence[int]) -> None:
        self._sketches = sketches
        self._module_of = module_of
        self._arriving: dict[int, tuple[Tensor, Tensor | None]] = {}
        """By index of a parameter: the leaf, and its `.grad` before the pass."""
        self._pass = -1
        """The last pass at whose end `finish` is called."""
        self._moved = set[int]()
        """Parameters whose gradients something else takes from `.grad` during the pass."""

    def open(self, factors: Sequence[Factor], *, sketching: bool) -> None:
        """Begins passes of a task, with its weights by module, or none."""
        self._factors, self._sketching = factors, sketching
        # Hooks of many ranks, such as DistributedDataParallel's, send `.grad` during the pass.
        self._used = (sketching or bool(factors)) and not dist.is_initialized()

    def take(self, parameter: int, grads: tuple[Tensor | None, ...], leaf: Tensor) -> bool:
        """Takes a gradient, as the argument of the hook of its leaf's node, if it is small."""
        if not self._used or not self._sketches.is_small(parameter, grads):
            return False
        if parameter in self._arriving:  # In a pass that has failed, or one that runs around this.
            self.finish()
            self._restore()
        grad, total = grads[0], leaf.grad
        # Graphs of gradients need the unweighted gradient.
        if torch.is_grad_enabled() or has_hooks_after(leaf) or parameter in self._moved:
            return False
        assert grad is not None
        if total is not None and not adds_in_place(total, grad, leaf):
            return False
        running = current_pass()
        if running != self._pass:
            self._pass = running
            at_end_of_pass(self.finish)
        self._arriving[parameter] = leaf, total
        if total is not None:
            leaf.grad = None
        return True

    @torch.no_grad()
    def finish(self) -> None:
        """Sketches and weights the gradients that have arrived."""
        if not self._arriving:
            return
        arrived = {n: leaf.grad for n, (leaf, _) in self._arriving.items() if leaf.grad is not None}
        if self._sketching:
            self._sketches.add_small(arrived)
        groups = defaultdict[object, list[int]](list)
        for n, grad in arrived.items():
            groups[self._module_of[n], grad.dtype].append(n)
        for numbers in groups.values():
            factor = self._factors[self._module_of[numbers[0]]] if self._factors else None
            leaves, totals = zip(*(self._arriving.pop(n) for n in numbers), strict=True)
            weigh_together(leaves, [arrived[n] for n in numbers], totals, factor)

    def close(self) -> None:
        """Ends the passes of a task; one that failed may have left gradients."""
        self.finish()
        self._restore()

    def _restore(self) -> None:
        """Undoes what was set aside for gradients that are no longer in `.grad`."""
        if self._arriving:
            self._sketches.spoil()
        for n, (leaf, total) in self._arriving.items():
            self._moved.add(n)
            leaf.grad = total
        self._arriving.clear()
