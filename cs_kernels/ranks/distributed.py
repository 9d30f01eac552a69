"""The base of replicated and sharded ranks: each rank holds a shard of every gradient.

A new strategy implements the five abstract methods of `Distributed`.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.gradients import TaskGradients
from cs_kernels.ops.aliases import Grads
from cs_kernels.ranks.agreement import compare
from cs_kernels.ranks.collectives import all_reduce
from cs_kernels.ranks.discoveries import Discoveries, SharedReach
from cs_kernels.ranks.messages import Facts, Messages
from cs_kernels.ranks.phase2 import Plan, phase2_of_shards, task_priorities
from cs_kernels.ranks.pieces import ChannelArray
from cs_kernels.ranks.strategy import Call, Ranks, Training
from cs_kernels.ranks.transport import Transport
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.stage import Passes, Stage
from cs_kernels.torch_internals.fsdp import is_sharded
from cs_kernels.trunk.layers import LayerLists
from cs_kernels.trunk.reach import Reach

Statistics = Mapping[str | None, Sequence[Tensor]]
"""Running statistics by task; under None, the statistics that all tasks share."""


class Distributed(Ranks):
    """Gradients of the mean losses over the ranks; each rank has a shard of every gradient.

    Args:
        shared: The shared parameters, by name.
        tasks: The names of all tasks.
        wrappers: The DistributedDataParallel modules around the trunk.
        transport: Carries the messages between the ranks.
        groups: Process groups; summing over each group in turn gives the sum over all ranks.

    """

    is_distributed = True
    reach: SharedReach

    def __init__(
        self,
        shared: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        wrappers: Wrappers,
        transport: Transport,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        super().__init__(shared, tasks, wrappers)
        self.transport = transport
        self.size = transport.size
        # Avoids a reference cycle: process groups must be destroyed with their last user.
        self.messages = Messages(transport, tasks, weakref.proxy(self))
        self._groups = groups
        self._planned: Callable[[], dict[str, list[object]]] = dict
        self._factor_is_hidden = False
        self._remaining: Sequence[nn.Parameter] = ()
        """The parameters whose gradients are reduced only in `_average_others`."""
        self._loss_dtypes: dict[str, torch.dtype] = {}
        """The dtype of each task's loss; mean losses are kept in float64."""
        self.version = 0
        """Increases when this rank's shards of the parameters change."""
        self._phase2_plan: Plan | None = None
        """Cached between steps."""
        self._written: list[int] = []
        """The parameters whose updates are written but not yet published."""

    def _new_reach(self, shared: Mapping[str, nn.Parameter], tasks: Sequence[str]) -> Reach:
        return SharedReach(shared, tasks)

    # --- messages ---

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the setup; tells the other ranks about an exception."""
        return self.messages.building()

    def agree(self, training: Training) -> None:
        """Checks that all ranks have the same setup.

        Raises:
            ValueError: Ranks have different settings.
            RankError: A rank has invalid arguments.

        """
        trunk = training.trunk
        self._statistics = trunk.statistics
        self._discoveries = Discoveries(trunk, self.reach)
        self._planned, self._factor_is_hidden = training.planned, training.factor_is_hidden
        self.messages.health.checksums = training.checksums
        compare(self.transport, training.facts(), ValueError)

    def close(self) -> None:
        """Also destroys the process groups that the transport has made."""
        super().close()
        self.transport.close()

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a step; an exception on any rank is raised on all of them."""
        return self.messages.together()

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """Checks that all ranks begin the same call; returns the union of their tasks."""
        self.messages.begin(tasks, call)
        self.passes = self.facts.passes
        return self.facts.tasks

    @property
    def facts(self) -> Facts:
        """The facts on which the ranks have agreed for this step."""
        return self.messages.facts

    def check_tasks(self, call: Call) -> None:
        """Raises RankError on all ranks if this strategy does not support the ranks' tasks."""

    def must_be_alike(self, call: Call) -> dict[str, str]:
        """Further fields of `Call` that must be equal on all ranks, and their names in errors."""
        del call
        return {}

    def has(self, task: str) -> bool:
        """Whether this rank runs the passes of a task."""
        return self.transport.rank in self.facts.ranks_of[task]

    def weight(self, task: str) -> float:
        """The weight of this rank's loss in the mean loss over the ranks with labels."""
        ranks = self.facts.ranks_of[task]
        return 1.0 / len(ranks) if self.transport.rank in ranks else 0.0

    def share(self, task: str) -> float:
        """The factor on this rank's loss that makes gradients sum to the mean loss's gradients."""
        return self.weight(task)

    def returned(self, losses: Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
        """Converts the float64 losses back to the dtypes of the caller's losses."""
        dtypes, other = self._loss_dtypes, torch.get_default_dtype()
        return {task: losses[task].to(dtypes.get(task, other)) for task in tasks}

    def recheck_networks(self) -> None:
        """Checks in the next two steps that all ranks hold the same parameters."""
        self.messages.health.recheck()

    def fingerprint(self) -> int:
        """A checksum of `planned`; a strategy may also prepare the step here."""
        trains = bytes(p.requires_grad for p in self.parameters)
        return crc32(repr(self._planned()).encode(), crc32(trains))

    def planned(self) -> dict[str, list[object]]:
        """The settings that the collectives and the update of the next step depend on."""
        named = zip(self.gradients.names, self.parameters, strict=True)
        trains: list[object] = [(name, p.requires_grad, str(p.dtype)) for name, p in named]
        return {"shared parameters that require a gradient": trains, **self._planned()}

    def has_discovered(self) -> bool:
        """Whether the last passes led to discoveries that the other ranks do not have."""
        return self._discoveries.changed()

    def discovered(self) -> object:
        """The local discoveries, as a message to the other ranks."""
        return self._discoveries.to_send()

    def learn(self, of_ranks: Sequence[Any]) -> None:
        """Merges every rank's discoveries."""
        self._discoveries.receive(of_ranks)

    def drain(self) -> None:
        """Joins the collectives of passes that have failed on this rank."""

    # --- shards: to be implemented by a strategy ---

    @abstractmethod
    def span(self, parameter: int) -> tuple[int, int]:
        """The range of a parameter's elements that this rank holds."""

    @abstractmethod
    def array(self, parameter: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """Describes a weight's elements, in the order of `span`, as an array of output channels."""

    @abstractmethod
    def update_shards(self, parameters: Sequence[int], over: Grads | None = None) -> list[Tensor]:
        """The buffers for this rank's shards of these parameters' updates."""

    @abstractmethod
    def publish_updates(self, parameters: Sequence[int]) -> None:
        """Assigns the written updates of these parameters to their `.grad`."""

    @abstractmethod
    def lend(self, parameter: int, grad: Tensor) -> Tensor:
        """A tensor for a parameter's `.grad` while its gradients wait in the rows."""

    def weight_shard(self, parameter: int) -> Tensor | None:
        """The local elements of a weight, flat; None if every rank has the whole weight."""
        del parameter
        return None

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the shards, bitwise equal on every rank."""
        return self._all_reduce(tensor)

    # --- methods for `TaskGradients` ---

    def release_own(self, gradients: TaskGradients) -> None:
        """Writes the plain sum as the update of every task's own parameters."""
        reached = dict.fromkeys(gradients.reached())
        own = [i for i in self.reach.owners() if i in reached]
        if own:
            number = len(gradients.rows)
            ones = torch.ones(1, number, dtype=torch.float64, device=self.parameters[own[0]].device)
            torch.ops.cs_kernels.combine_(
                gradients.updates(own), gradients.of(own), ones, [0] * len(own), number
            )
            for row in gradients.rows:
                for i in own:
                    row[i] = None
        self._written = own

    def assign(self, parameters: Sequence[int]) -> None:
        """Records that the updates of these parameters are written."""
        self._written += parameters

    def publish(self) -> None:
        """Assigns the written updates to `.grad`; all ranks call this together."""
        self.publish_updates(self._written)
        self._written = []

    def offsets(self, parameters: Sequence[int]) -> list[int]:
        """The index of each shard's first element among the elements of all whole parameters."""
        starts = accumulate((self.parameters[i].numel() for i in parameters), initial=0)
        spans = map(self.span, parameters)
        return [start + first for (first, _), start in zip(spans, starts, strict=False)]

    def priorities(self, lists: LayerLists) -> list[Tensor]:
        """Int64 [O] per layer: the top-priority task of each output channel."""
        # No averaging: users may call this on one rank alone, and steps make the variances equal.
        of_all = task_priorities(self, lists, averaged=True)
        return list(torch.split(of_all, lists.channels))

    def phase2(
        self,
        gradients: TaskGradients,
        lists: LayerLists,
        parameters: Sequence[int],
        tasks: Sequence[str],
    ) -> tuple[Tensor, Tensor]:
        """Writes this rank's shards of the Phase 2 updates."""
        return phase2_of_shards(self, gradients, lists, parameters, tasks)

    def like(self) -> Tensor:
        """A plain tensor on the gradients' device."""
        return self.parameters[0].detach()

    def holds_first(self) -> bool:
        """Whether this rank adds replicated values to a sum over ranks."""
        return self.transport.rank == 0

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, including replicas."""
        return self._all_reduce(tensor)

    def mean_over_ranks(self, tensor: Tensor) -> Tensor:
        """The mean of all ranks' values, in float64."""
        return self._all_reduce(tensor.double() / self.size)

    def phase2_plan(self, lists: LayerLists) -> Plan:
        """The local pieces of these layers; they do not depend on values, so they are cached."""
        plan = self._phase2_plan
        if plan is None or plan.lists is not lists or plan.version != self.version:
            plan = self._phase2_plan = Plan(self, lists)
        return plan

    # --- after the passes ---

    def average(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Averages gradients, losses and statistics, once all ranks have made their passes."""
        self._end_passes(passes, held)
        self.messages.passed()
        with torch.no_grad():
            if passes.stage is Stage.HEADS:
                passes.reached = self._discoveries.pattern()
            if not passes.stage.is_open:
                self._average_others()
            self._average_numbers(passes)
            self._settle(adds_up=passes.stage.is_open)

    def _settle(self, *, adds_up: bool) -> None:
        """Finishes the collectives that the passes started for the shared parameters."""

    def _others(self, held: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters whose gradients are reduced only in `_average_others`."""
        return [parameter for parameter in held if not is_sharded(parameter)]

    def _end_passes(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Records which parameters, or features, have a gradient on this rank."""
        ranks_of = self.facts.ranks_of
        self._remaining = self._others(held)
        at_features = passes.stage is Stage.HEADS
        pattern = passes.reached if at_features else self._pattern()
        tasks = ((task, *ranks_of[task]) for task in passes.tasks)
        self._discoveries.note_pattern((len(self.parameters), at_features, *tasks), pattern)

    def _pattern(self) -> tuple[bool, ...]:
        for grad in (p.grad for p in self._remaining if p.grad is not None):
            if grad.layout is not torch.strided:
                raise ValueError(
                    "gradients of the optimizer's parameters must be dense on several ranks, but"
                    f" one of shape {tuple(grad.shape)} has layout {grad.layout}"
                )
        return tuple(p.grad is not None for p in self._remaining)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        for group in self._groups:
            all_reduce(tensor, group=group)
        return tensor

    def _average_others(self) -> None:
        reached = self._discoveries.pattern()[: len(self._remaining)]
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter, is_reached in zip(self._remaining, reached, strict=True):
            if is_reached:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in kinds.values():
            grads = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in parameters]
            flat = self._all_reduce(torch.cat([grad.flatten() for grad in grads]))
            flat = flat if self.scale == 1 else flat.mul_(self.scale)
            parts = torch.split(flat, [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape)

    def _average_numbers(self, passes: Passes) -> None:
        """Averages all losses and statistics in one float64 collective."""
        tasks, step, like = passes.tasks, passes.step, self.like()
        kinds = (
            (step.losses, passes.before.losses, step.recent.losses),
            (step.weighted_losses, passes.before.weighted_losses, step.recent.weighted_losses),
        )
        numbers = torch.zeros(2 * len(tasks) + 2, dtype=torch.float64, device=like.device)
        for n, task in enumerate(tasks):
            weight = self.weight(task)
            for k, (_, _, recent) in enumerate(kinds):
                if weight and task in recent:
                    numbers[2 * n + k] = recent[task].to(numbers) * weight
        if self._factor_is_hidden and step.loss_scale is not None:
            numbers[-2], numbers[-1] = step.loss_scale.to(numbers), 1
        # With features, the trunk's backward pass still needs its saved statistics unchanged.
        at_features = passes.stage is Stage.HEADS
        alike = [] if at_features else self._alike(tasks, self._statistics.of_norms(tasks))
        # A rank of weight 0 sends zeros: 0 times a non-finite statistic would be NaN.
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
                    self._loss_dtypes[task] = recent[task].dtype
                recent[task] = numbers[2 * n + k]
                losses[task] = earlier[task] + recent[task] if task in earlier else recent[task]
        if self._factor_is_hidden:  # Ranks without passes do not know the loss scale.
            step.loss_scale = (numbers[-2] / numbers[-1]).to(like.dtype)
        means = torch.split(summed[: -len(numbers)], [len(of_kind) for of_kind in flat])
        for (tensors, _), mean in zip(alike, means, strict=True):
            dtype = tensors[0].dtype
            values = (mean if dtype.is_floating_point else mean.round()).to(dtype)
            of_each = torch.split(values, [t.numel() for t in tensors])
            pairs = zip(of_each, tensors, strict=True)
            torch._foreach_copy_(tensors, [x.view(t.shape) for x, t in pairs])

    def _alike(
        self, tasks: Sequence[str], statistics: Statistics
    ) -> list[tuple[list[Tensor], float]]:
        """Running statistics of the trunk and heads, by task and dtype, with this rank's weight.

        The order is the same on all ranks.
        """
        ranks_of, like = self.facts.ranks_of, self.like()
        of_heads: Statistics = {
            task: self._discoveries.of_heads(task, ranks_of[task], like) for task in tasks
        }
        found: dict[tuple[str | None, bool, torch.dtype], list[Tensor]] = {}
        for is_head, by_task in ((False, statistics), (True, of_heads)):
            for task, tensors in by_task.items():
                for tensor in tensors:
                    found.setdefault((task, is_head, tensor.dtype), []).append(tensor)
        return [(found[kind], self._weight_of(kind[0], tasks)) for kind in found]

    def _weight_of(self, task: str | None, tasks: Sequence[str]) -> float:
        """The rank's weight in the mean statistics of a task, or of all tasks if None."""
        if task is not None:
            return self.weight(task)
        with_labels = {rank for t in tasks for rank in self.facts.ranks_of[t]}
        return 1 / len(with_labels) if self.transport.rank in with_labels else 0.0
