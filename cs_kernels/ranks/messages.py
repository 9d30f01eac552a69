"""Messages between ranks about a step: its tasks, failures, and the discoveries of its passes.

A message is a few numbers that the hosts exchange in a separate gloo group, so no device waits for
it. A rank sends one message at the start of each call, and one after each stage's passes, before it
changes a parameter. All messages have the same form, so a failed rank can report its failure in
place of any message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cs_kernels.ranks.agreement import NAMES, compare, difference
from cs_kernels.ranks.failure import Failures, text_of
from cs_kernels.ranks.health import Health
from cs_kernels.ranks.strategy import Call, RankError
from cs_kernels.ranks.transport import Transport

if TYPE_CHECKING:  # Avoids a circular import.
    from cs_kernels.ranks.distributed import Distributed

Kind = Literal["begin", "passed", "failed"]
_KINDS: tuple[Kind, ...] = ("begin", "passed", "failed")


class Facts(NamedTuple):
    """The facts on which the ranks agree before the passes of a step."""

    tasks: tuple[str, ...]
    """The union of all ranks' tasks, in order of first appearance."""
    ranks_of: Mapping[str, Sequence[int]]
    """The ranks that have labels for each task."""
    passes: int = 1
    """The maximum of `Call.passes` over the ranks."""


class Messages:
    """Messages between the ranks.

    Args:
        transport: Carries the messages.
        tasks: The names of all tasks.
        strategy: The strategy for sharing gradients, which owns this object.

    """

    def __init__(self, transport: Transport, tasks: Sequence[str], strategy: Distributed) -> None:
        self._transport = transport
        self._tasks = tuple(tasks)
        self._strategy = strategy
        self.failures = Failures(transport)
        self.health = Health(transport, self.failures)
        self.facts = Facts((), {})
        """The facts of the current step."""
        self._call = Call(0, 0, 0, 0, 0, 0, 0)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Wraps argument checks, so that other ranks do not wait for a rank whose checks fail."""
        try:
            yield
        except Exception as error:
            self._transport.gather({"error": text_of(error)})
            raise

    def begin(self, tasks: Sequence[str], call: Call) -> None:
        """Exchanges the tasks of a call, and sets `facts`.

        Raises:
            RankError: Ranks begin different calls or hold different parameters, no rank has a task,
                or a rank has failed.

        """
        self._call = call
        self.health.begin(call.number)
        order = [self._tasks.index(task) for task in tasks]
        messages = self._send("begin", order)
        self._check_same(messages)
        lists = [message["order"] for message in messages]
        union = dict.fromkeys(n for order in lists for n in order)
        ranks_of = {n: [r for r, order in enumerate(lists) if n in order] for n in union}
        named = {self._tasks[n]: ranks for n, ranks in ranks_of.items()}
        self.facts = Facts((*named,), named, max(message["passes"] for message in messages))
        if not union:
            self.failures.raise_on_all(
                RankError("tasks must name at least one task on some rank, got none on any")
            )
        self._strategy.check_tasks(call)
        if any(message["unchecked"] for message in messages):
            self.health.check()

    def passed(self) -> None:
        """Waits for the other ranks' passes, and exchanges discoveries.

        Raises:
            RankError: A rank has failed.

        """
        messages = self._send("passed")
        self._check_same(messages)
        if any(message["changed"] for message in messages):
            self._strategy.learn(self._transport.gather(self._strategy.discovered()))

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a step; an exception on any rank is raised on all of them."""
        return self.failures.together(lambda: self._call.number, self._fail)

    def _fail(self, error: Exception, after: float) -> None:
        with contextlib.suppress(Exception):
            self._strategy.drain()
        self._send("failed", error=error, after=after)

    def _send(
        self,
        kind: Kind,
        order: Sequence[int] = (),
        error: Exception | None = None,
        after: float = 0.0,
    ) -> list[dict[str, Any]]:
        """Exchanges one message with every rank.

        Raises:
            RankError: Another rank failed before this one.

        """
        changed = kind == "passed" and self._strategy.has_discovered()
        plan = self._strategy.fingerprint() if kind == "begin" else 0
        padding = [0] * (len(self._tasks) - len(order))
        tail = plan, changed, self.health.is_due(), len(order)
        numbers = _KINDS.index(kind), *self._call, *order, *padding, *tail
        messages = [
            {
                "kind": _KINDS[row[0]],
                **dict(zip(Call._fields, row[1:], strict=False)),
                "plan": row[-4],
                "changed": bool(row[-3]),
                "unchecked": bool(row[-2]),
                "order": row[1 + len(Call._fields) :][: row[-1]],
            }
            for row in self._transport.exchange(numbers)
        ]
        if any(message["kind"] == "failed" for message in messages):
            self.health.recheck()  # On some ranks, a torch optimizer may already have stepped.
            self.failures.raise_first(self._call.number, error, after)
        return messages

    def _check_same(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for field, name in (NAMES | self._strategy.must_be_alike(self._call)).items():
            of_ranks = [message[field] for message in messages]
            rank = next((r for r, value in enumerate(of_ranks) if value != of_ranks[0]), None)
            if rank is None:
                continue
            try:
                if field == "plan":  # Equal plans may have different fingerprints.
                    compare(self._transport, self._strategy.planned(), RankError)
                    continue
                text = difference(self._transport, name, rank, of_ranks[0], of_ranks[rank])
                raise RankError(text)
            except RankError as error:
                self.failures.raise_on_all(error)
