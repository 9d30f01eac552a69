"""The passes of `GradientBalancer.backward` through the graph of one forward pass."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cs_kernels.engine.pass_checks import check_shared_part
from cs_kernels.engine.task_weights import find_one_pass
from cs_kernels.torch_internals.autograd import hooked, reached_parameters


class OneGraph:
    """Checks that passes through one graph are repeatable; makes one pass instead if possible.

    Args:
        named: The shared parameters by name.
        optimizer: The torch optimizer that holds all parameters, or None.
        checks: Whether to check that passes are repeatable.

    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer | None,
        *,
        checks: bool,
    ) -> None:
        self._named = named
        self._optimizer = optimizer
        self._checks = checks
        self._checked: set[frozenset[str]] = set()
        """The sets of tasks whose passes are known to be repeatable."""

    def _held(self) -> list[nn.Parameter]:
        """The parameters to which passes may add gradients: shared ones and the optimizer's."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        held = [p for _, p in self._named] + [p for group in groups for p in group["params"]]
        return [*dict.fromkeys(held)]

    def _hides(self, losses: Mapping[str, Tensor]) -> bool:
        """Whether an autograd function may hide parameters, which only an optimizer would list."""
        return self._optimizer is None and any(
            reached_parameters(loss).hidden for loss in losses.values()
        )

    def check(self, losses: Mapping[str, Tensor]) -> None:
        """Checks the passes of a new combination of tasks, with three extra passes.

        If a function may hide parameters, there is no check: it could not restore their gradients.

        Raises:
            RuntimeError: A pass is not repeatable.

        """
        tasks = frozenset(losses)
        if len(tasks) < 2 or not self._checks or tasks in self._checked:
            return
        if self._hides(losses):
            return
        held = self._held()
        names: dict[Tensor, str] = {p: f"a parameter of shape {tuple(p.shape)}" for p in held}
        names |= {p: f"parameter {name}" for name, p in self._named}
        check_shared_part(
            losses, names, held, ways_out="use a forward pass and task(...) for each task"
        )
        self._checked.add(tasks)

    def one_pass(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """Makes one weighted pass if it gives the same gradients as one pass per task.

        Args:
            losses: The loss of each task.
            weights: The weight of each task's gradients of the shared parameters.

        Returns:
            Whether the pass was made.

        """
        shared = {p for _, p in self._named if p.requires_grad}
        if self._hides(losses):
            return False
        found = find_one_pass(losses, shared, self._held(), trusts_functions=False)
        if found is None:
            return False
        with hooked(found.hooks(weights)), torch.enable_grad():
            terms = found.terms(losses, weights)
            sum(terms[1:], terms[0]).backward()  # type: ignore[no-untyped-call]
        return True
