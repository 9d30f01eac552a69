"""Replicated ranks: each rank has the whole network, and a flat part of each of K gradients.

A task's gradients are reduced and scattered during its backward pass. For its part of the update,
a rank needs the other ranks' K x K products but not their gradients; the parts of the update are
then gathered. A rank transfers (K + 1) N elements, where K all-reduces would transfer 2 K N, and
stores K N / W + N elements for W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.ops.aliases import Grads
from cs_kernels.ranks.buckets import Buckets, Overlap
from cs_kernels.ranks.distributed import Distributed
from cs_kernels.ranks.pieces import ChannelArray
from cs_kernels.ranks.transport import Transport
from cs_kernels.ranks.wrappers import Wrappers
from cs_kernels.stage import Passes, Stage

_SUM = ""
"""The name of the round that sums all tasks' gradients; no task has this name."""


@dataclass
class _Round:
    """The collectives for one task's gradients, or for the tasks' sum, one per bucket."""

    parts: list[Tensor] | None
    """Tensors that receive this rank's parts; None to leave the whole sum in the buckets."""
    adds: bool
    """Whether the parts are added to the parts of an earlier round."""


@dataclass
class _Passes:
    """The passes of a stage; all ranks run the same rounds of collectives."""

    tasks: tuple[str, ...] = ()
    separate: bool = True
    """Whether each task has a round; otherwise, a single round has the sum."""
    owed: list[str] = field(default_factory=list)
    """The names of the remaining rounds."""
    next_task: str | None = None
    """In Phase 1, the next task, whose passes other ranks may already have begun."""


class Replicated(Distributed):
    """Each rank holds a flat part of each gradient: a range of the elements in memory order.

    Args:
        shared: The shared parameters, by name.
        tasks: The names of all tasks.
        wrappers: The DistributedDataParallel modules around the trunk.
        transport: Carries the messages between the ranks.
        group: The process group of the ranks.

    """

    def __init__(
        self,
        shared: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        wrappers: Wrappers,
        transport: Transport,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(shared, tasks, wrappers, transport, [group])
        self._group = group
        self._trains: list[object] | None = None
        self._passes = _Passes()
        self._orders: dict[object, list[int]] = {}
        self._round: _Round | None = None
        self._had: set[int] = set()
        """The parameters with a gradient on this rank in the last round."""

    # --- the buckets ---

    def _make_buckets(self) -> None:
        """Makes new buckets if a parameter's requires_grad, dtype, device or strides changed."""
        trains: list[object] = [
            (p.requires_grad, p.dtype, p.device, p.stride()) for p in self.parameters
        ]
        if self._trains == trains:
            return
        if self.gradients.collected:
            raise RuntimeError(
                "parameters must keep requires_grad, dtype, device and strides across"
                " micro-batches, but one has changed since the last backward(..., update=False)"
            )
        self._trains = trains
        self.version += 1
        trained = {i: p for i, p in enumerate(self.parameters) if p.requires_grad}
        self._buckets = Buckets(trained, self._group)
        self._overlap = Overlap(trained)
        self._parts: dict[str, list[Tensor]] = {}
        """For each task, this rank's part of each bucket."""
        self._rows: dict[str, list[Tensor | None]] = {}
        """For each task, this rank's part of each parameter."""
        self._updates = self._of_parameters(self._buckets.own_parts())
        """This rank's part of each parameter's update, in the buckets."""

    def _of_parameters(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        slots, part_of = self._buckets.slots, self._buckets.part_of
        return [part_of(i, parts) if i in slots else None for i in range(len(self.parameters))]

    def fingerprint(self) -> int:
        """Also makes the buckets, which must be equal on all ranks."""
        self._make_buckets()
        return super().fingerprint()

    def forget_passes(self) -> None:
        """Also forgets how often earlier passes accumulated each gradient."""
        super().forget_passes()
        if self._trains is not None:
            self._overlap.forget()

    # --- passes ---

    def expect(self, passes: Passes) -> None:
        """Begins the passes that precede the ranks' next message."""
        owed = [*passes.tasks] if passes.separate else [] if passes.stage.is_open else [_SUM]
        self._passes = _Passes(passes.tasks, passes.separate, owed)

    def last_backward(self, task: str) -> None:
        """Lets the next pass send a task's gradients or, if it is the last task, the sum."""
        separate = self._passes.separate
        if separate or (self._passes.owed and task == self._last_task()):
            name = task if separate else _SUM
            self._begin(name)
            self._overlap.start(self._kind(name), self._buckets.members, self._send)

    def _last_task(self) -> str:
        """The last task that this rank has labels for."""
        return [task for task in self._passes.tasks if self.has(task)][-1]

    def _order(self, name: str) -> list[int]:
        """The order of the buckets: first the buckets that earlier passes reached in full.

        The ranks agree on this order. The other buckets may have to wait for the end of the pass.
        """
        tasks = self._passes.tasks if name == _SUM else (name,)
        key = tasks, self.version, self.reach.version
        if key in self._orders:
            return self._orders[key]
        reached = self.reach.reached_by_any(tasks)
        missing = [sum(i not in reached for i in members) for members in self._buckets.members]
        full = [len(members) for members in self._buckets.members]
        kinds = [(n > 0) + (n == of_all) for n, of_all in zip(missing, full, strict=True)]
        self._orders[key] = sorted(range(len(kinds)), key=kinds.__getitem__)
        return self._orders[key]

    def _kind(self, name: str) -> object:
        return (name, *self._passes.tasks) if name == _SUM else name

    def _begin(self, name: str) -> _Round:
        self._had.clear()
        self._overlap.reset(self._order(name))
        if not self._passes.separate:
            self._round = _Round(None, adds=False)
        elif name in self.gradients.collected:
            self._round = _Round(self._buckets.new_parts(), adds=True)
        else:
            parts = self._parts.get(name)
            if parts is None:
                parts = self._parts[name] = self._buckets.new_parts()
                self._rows[name] = self._of_parameters(parts)
            self._round = _Round(parts, adds=False)
        return self._round

    def _send(self, bucket: int) -> None:
        assert self._round is not None
        for i in self._buckets.members[bucket]:
            grad = self.parameters[i].grad
            if grad is not None:
                self._had.add(i)
                if grad.layout is not torch.strided:
                    raise ValueError(
                        "gradients of trunk must be dense, but the gradient of"
                        f" {self.gradients.names[i]} has layout {grad.layout}"
                    )
        self._buckets.send(bucket, self._round.parts)

    def _finish(self, name: str) -> None:
        """Sends the remaining buckets of a round; a rank without the task sends all of them."""
        now = self._round if self._round is not None else self._begin(name)
        self._overlap.finish(self._kind(name), self._send)
        self._round = None
        self._passes.owed.remove(name)
        late = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if late and late[0] not in self._buckets.slots:
            raise RuntimeError(
                "parameters must not be unfrozen within a step on several ranks, got a gradient for"
                f" {self.gradients.names[late[0]]}"
            )
        if late:
            self._overlap.forget()
            raise RuntimeError(
                "gradients must not change after they were sent to the other ranks, but the"
                f" gradient of {self.gradients.names[late[0]]} did: either DistributedDataParallel"
                " wraps the network too (pass the wrapped network as trunk), or the parameter's"
                " layer ran more often than in earlier steps, under reentrant checkpointing"
            )
        if now.adds:
            assert now.parts is not None
            self._buckets.wait_all()
            torch._foreach_add_(self._parts[name], now.parts)

    def drain(self) -> None:
        """Joins, without gradients, the collectives of passes that have failed on this rank."""
        if not self._passes.owed and self._passes.next_task is not None:
            self._passes = _Passes((self._passes.next_task,), separate=False, owed=[_SUM])
        for parameter in self.parameters if self._passes.owed else ():
            parameter.grad = None
        self._overlap.fail()
        owed, self._passes.owed = self._passes.owed, []
        for name in owed:
            self._passes.owed = [name]
            self._finish(name)

    def collect(self, task: str) -> bool:
        """Ends the passes of a task; returns whether this rank has any gradient."""
        self._finish(task)
        self.gradients.collected.add(task)
        return self._note(task)

    def note(self, task: str) -> bool:
        """Ends passes whose gradients stay in `.grad`; returns whether this rank has gradients."""
        self._finish(_SUM)
        return self._note(task)

    def skip(self, task: str) -> None:
        """Joins the collectives of a task for which this rank has no gradients."""
        if self._passes.separate:
            self._finish(task)
            self.gradients.collected.add(task)

    def _note(self, task: str) -> bool:
        if self.has(task):
            self.reach.note(task, [i for i in range(len(self.parameters)) if i not in self._had])
        return bool(self._had)

    # --- after the passes ---

    def _end_passes(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Ends passes whose gradients add up; records which parameters have a gradient."""
        for name in [*self._passes.owed]:
            self._finish(name)
        super()._end_passes(passes, held)

    def _others(self, held: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        shared = set(self.parameters)
        return [parameter for parameter in held if parameter not in shared]

    def _pattern(self) -> tuple[bool, ...]:
        pattern = super()._pattern()
        if self._passes.separate:
            return pattern
        return pattern + tuple(i in self._had for i in range(len(self.parameters)))

    def _settle(self, *, adds_up: bool) -> None:
        """Assigns separate parts to the rows, or the sum over all tasks to `.grad`."""
        self._buckets.wait_all()
        if self._passes.separate:
            self._set_reached(self._rows)
            return
        if adds_up:
            return
        for i, is_reached in enumerate(self._discoveries.pattern()[-len(self.parameters) :]):
            if is_reached:
                self.parameters[i].grad = self._buckets.views[i].detach()

    def average(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Extends the base method: in Phase 1, records the task that other ranks may begin next."""
        super().average(passes, held)
        if passes.stage is Stage.TURN:
            tasks = self.facts.tasks
            n = tasks.index(passes.tasks[-1]) + 1
            self._passes.next_task = tasks[n] if n < len(tasks) else None

    def _set_reached(self, parts: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Fills the rows with the gradients of all parameters that any rank has reached."""
        for task, ranks in self.facts.ranks_of.items():
            unreached = self.reach.unreached(task, ranks)
            row = self.gradients.row_of(task)
            for i, part in enumerate(parts[task]):
                if i not in unreached:
                    row[i] = part

    # --- gradients that are kept between steps ---

    def keep(
        self, task: str, row: Sequence[Tensor | None], device: str | None
    ) -> list[Tensor | None]:
        """The whole gradients of a task: all ranks' parts, gathered."""
        wholes = self._buckets.gathered(self._parts[task])
        kept = [None if part is None else wholes[i] for i, part in enumerate(row)]
        return super().keep(task, kept, device)

    def anchor(self, kept: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The local parts of a kept row."""
        return [
            None if grad is None else self._buckets.flat_of(i, grad)[slice(*self.span(i))]
            for i, grad in enumerate(super().anchor(kept))
        ]

    # --- shards ---

    def span(self, parameter: int) -> tuple[int, int]:
        """The range of the parameter that lies in this rank's equal part of the bucket."""
        slot = self._buckets.slots[parameter]
        return slot.first, slot.last

    def array(self, parameter: int, out_channel_dim: int, groups: int) -> ChannelArray:
        """The weight's elements in the order of its bucket."""
        return self._buckets.array(parameter, out_channel_dim, groups)

    def update_shards(self, parameters: Sequence[int], over: Grads | None = None) -> list[Tensor]:
        """The local parts of the updates, in the buckets."""
        del over
        return [cast("Tensor", self._updates[i]) for i in parameters]

    def publish_updates(self, parameters: Sequence[int]) -> None:
        """Gathers the updates of all ranks, and assigns them to `.grad`."""
        self._buckets.gather(sorted({self._buckets.slots[i].bucket for i in parameters}))
        # New tensors with the same memory: `.grad.data` may be replaced, e.g. by `trunk.to(...)`.
        for i in parameters:
            self.parameters[i].grad = self._buckets.views[i].detach()

    def lend(self, parameter: int, grad: Tensor) -> Tensor:
        """The view of the parameter's elements in its bucket."""
        del grad
        return self._buckets.views[parameter].detach()
