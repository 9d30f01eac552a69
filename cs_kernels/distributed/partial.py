"""Gradients of which a rank holds a part: what replicated and sharded ones have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.distributed.control import Control
from cs_kernels.distributed.pieces import ChannelArray
from cs_kernels.distributed.shown import SharedReach, Shown
from cs_kernels.gradients import TaskGradients
from cs_kernels.step import Losses, Step

Statistics = Mapping[str | None, Sequence[Tensor]]
"""Running statistics by task; those of all tasks together for None."""


class PartialGradients(TaskGradients):
    """The gradients of the mean losses over the ranks; this rank's part of each parameter.

    Args:
        parameters: The shared parameters, by name.
        tasks: The names of all tasks.
        control: The ranks.
        groups: The ranks' groups; sums over one after the other are sums over all ranks.

    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        control: Control,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self.control = control
        self._groups = groups
        self.shown: Shown | None = None
        self._passed: tuple[str, ...] = ()
        """The tasks of the last passes."""
        self._remaining: Sequence[nn.Parameter] = ()
        """The parameters whose gradients nothing else reduces."""
        self.loss_dtypes: dict[str, torch.dtype] = {}
        """By task; mean losses are kept in float64."""
        self.options: Callable[[], list[object]] = list
        """The options of the torch optimizer that are numbers."""
        self.threshold: float | None = None
        """That of `count_conflicts`, if it was called: its steps have one more collective."""
        self.scales = False
        """Whether the loss scale shows in the backward passes only."""
        self.version = 0
        """Increases when this rank has other parts of the parameters."""
        self.phase2_plan: object = None
        """Phase 2's plan, kept from step to step."""
        super().__init__(parameters, tasks)
        self.shared_reach = SharedReach(parameters, tasks)
        self.reach = self.shared_reach

    def plan(self) -> int:
        """A number that differs if `planned` does."""
        trains = bytes(p.requires_grad for p in self.parameters)
        return crc32(repr((self.options(), self.threshold)).encode(), crc32(trains))

    def planned(self) -> dict[str, list[object]]:
        """The facts that the collectives and the update of the next step depend on."""
        named = zip(self.names, self.parameters, strict=True)
        return {
            "shared parameters that require a gradient": [
                (name, p.requires_grad, str(p.dtype)) for name, p in named
            ],
            "options of the optimizer": self.options(),
            "threshold of count_conflicts": [self.threshold],
        }

    @abstractmethod
    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the parts, with the same bits on every rank."""

    @abstractmethod
    def span(self, parameter: int) -> tuple[int, int]:
        """The range of a parameter's elements that this rank has."""

    @abstractmethod
    def array(self, parameter: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """A weight's elements, in the order of `span`, as output channels."""

    @abstractmethod
    def weight_part(self, parameter: int) -> Tensor | None:
        """The elements of a weight on this rank, flat; None where every rank has all."""

    def offsets(self, parameters: Sequence[int]) -> list[int]:
        """The index of each part's first element among those of all whole parameters."""
        starts = accumulate((self.parameters[i].numel() for i in parameters), initial=0)
        return [start + self.span(i)[0] for i, start in zip(parameters, starts, strict=False)]

    def average(
        self,
        step: Step,
        before: Losses,
        statistics: Statistics,
        *,
        adds_up: bool = False,
    ) -> None:
        """Averages what the passes just noted have left: gradients, losses and statistics."""
        with torch.no_grad():
            if not adds_up:
                self._average_others()
            self._average_numbers(step, before, statistics)
            self._settle(adds_up=adds_up)

    def _settle(self, *, adds_up: bool) -> None:
        """Ends what the passes have begun for the shared parameters."""

    @abstractmethod
    def _others(self, held: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters whose gradients nothing else reduces."""

    def note_passes(self, held: Sequence[nn.Parameter], tasks: Sequence[str]) -> None:
        """Notes which parameters have a gradient on this rank."""
        assert self.shown is not None
        ranks_of = self.control.facts.ranks_of
        self._passed = tuple(tasks)
        self._remaining = self._others(held)
        kind = len(self.parameters), *((task, *ranks_of[task]) for task in tasks)
        self.shown.note_pattern(kind, self._pattern())

    def holds_first(self) -> bool:
        """Whether this rank adds what all ranks have to sums over them."""
        return self.control.rank == 0

    def _pattern(self) -> tuple[bool, ...]:
        for grad in (p.grad for p in self._remaining if p.grad is not None):
            if grad.layout is not torch.strided:
                raise ValueError(
                    "optimizer must hold parameters with dense gradients on several ranks, got a"
                    f" {grad.layout} one of shape {tuple(grad.shape)}"
                )
        return tuple(p.grad is not None for p in self._remaining)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _average_others(self) -> None:
        assert self.shown is not None
        reached = self.shown.pattern()[: len(self._remaining)]
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter, is_reached in zip(self._remaining, reached, strict=True):
            if is_reached:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in kinds.values():
            grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
            flat = self._all_reduce(torch.cat([grad.flatten() for grad in grads]))
            flat = flat if self._others_scale == 1 else flat.mul_(self._others_scale)
            parts = torch.split(flat, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape)

    _others_scale: float = 1.0
    """The factor by which the sums have still to be multiplied."""

    def _average_numbers(self, step: Step, before: Losses, statistics: Statistics) -> None:
        """One collective for all losses and statistics, in float64."""
        tasks, like = self._passed, self.like()
        kinds = (
            (step.losses, before.losses, step.recent.losses),
            (step.weighted_losses, before.weighted_losses, step.recent.weighted_losses),
        )
        numbers = torch.zeros(2 * len(tasks) + 2, dtype=torch.float64, device=like.device)
        for n, task in enumerate(tasks):
            weight = self.control.weight(task)
            for k, (_, _, recent) in enumerate(kinds):
                if weight and task in recent:
                    numbers[2 * n + k] = recent[task].to(numbers) * weight
        if self.scales and step.loss_scale is not None:
            numbers[-2], numbers[-1] = step.loss_scale.to(numbers), 1
        alike = self._alike(statistics)
        # A rank without weight may have a statistic that is not finite: it must not count.
        flat = [
            torch.cat([t.flatten() for t in tensors]).to(numbers) * weight
            if weight
            else numbers.new_zeros(sum(t.numel() for t in tensors))
            for tensors, weight in alike
        ]
        summed = self._all_reduce(torch.cat([*flat, numbers]))
        numbers = summed[-len(numbers) :]
        for n, task in enumerate(tasks):
            for k, (losses, earlier, recent) in enumerate(kinds):
                if k == 0 and task in recent:
                    self.loss_dtypes[task] = recent[task].dtype
                recent[task] = numbers[2 * n + k]
                losses[task] = earlier[task] + recent[task] if task in earlier else recent[task]
        if self.scales:  # The ranks without passes do not know the factor.
            step.loss_scale = (numbers[-2] / numbers[-1]).to(like.dtype)
        parts = torch.split(summed[: -len(numbers)], [len(part) for part in flat])
        for (tensors, _), part in zip(alike, parts, strict=True):
            dtype = tensors[0].dtype
            values = (part if dtype.is_floating_point else part.round()).to(dtype)
            of_each = torch.split(values, [t.numel() for t in tensors])
            pairs = zip(of_each, tensors, strict=True)
            torch._foreach_copy_(tensors, [x.view(t.shape) for x, t in pairs])

    def _alike(self, statistics: Statistics) -> list[tuple[list[Tensor], float]]:
        """The running statistics of one task and dtype, with this rank's weight, on every rank.

        The gradients of heads are among them.
        """
        assert self.shown is not None
        ranks_of, like = self.control.facts.ranks_of, self.like()
        of_heads: Statistics = {t: self.shown.of_heads(t, ranks_of[t], like) for t in self._passed}
        found: dict[tuple[str | None, bool, torch.dtype], list[Tensor]] = {}
        for is_head, by_task in ((False, statistics), (True, of_heads)):
            for task, tensors in by_task.items():
                for tensor in tensors:
                    found.setdefault((task, is_head, tensor.dtype), []).append(tensor)
        return [(found[kind], self._weight_of(kind[0])) for kind in found]

    def _weight_of(self, task: str | None) -> float:
        """The weight of this rank's statistics of a task, or of all tasks together."""
        if task is not None:
            return self.control.weight(task)
        with_labels = {rank for t in self._passed for rank in self.control.facts.ranks_of[t]}
        return 1 / len(with_labels) if self.control.rank in with_labels else 0.0

    def mean_over_ranks(self, tensor: Tensor) -> Tensor:
        """The mean of all ranks' values, in float64."""
        return self._all_reduce(tensor.double() / self.control.size)

    def _set_reached(self, parts: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Puts into the rows the gradients of the parameters that any rank has reached."""
        for task, ranks in self.control.facts.ranks_of.items():
            unreached = self.shared_reach.unreached(task, ranks)
            row = self.rows[self.tasks.index(task)]
            for i, part in enumerate(parts[task]):
                if i not in unreached:
                    row[i] = part

    def _sum_own(self) -> list[int]:
        """Writes the updates of every task's own parameters, and takes them out of the rows."""
        reached = dict.fromkeys(self.reached())
        own = [i for i in self.reach.owners() if i in reached]
        if own:
            device = self.parameters[own[0]].device
            torch.ops.cs_kernels.combine_(
                self.updates(own),
                self.of(own),
                torch.ones(1, len(self.rows), dtype=torch.float64, device=device),
                [0] * len(own),
                len(self.rows),
            )
            for row in self.rows:
                for i in own:
                    row[i] = None
        return own

    def like(self) -> Tensor:
        """A plain tensor on the gradients' device."""
        return self.parameters[0].detach()
