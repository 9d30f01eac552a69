"""The messages of the ranks about a step: its tasks, failures, what passes have shown.

These messages are few numbers between the hosts, in a gloo group of their own: no device waits for
them. A rank sends one before its first pass of a step and one after its last, before it changes a
parameter. All are alike, so a rank that fails can tell the others with the next one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cs_kernels.errors import add_note
from cs_kernels.ranks.strategy import Call, RankError
from cs_kernels.ranks.transport import Transport
from cs_kernels.stage import Stage

if TYPE_CHECKING:  # It owns the messages.
    from cs_kernels.ranks.distributed import Distributed

Kind = Literal["begin", "passed", "failed"]
_KINDS: tuple[Kind, ...] = ("begin", "passed", "failed")

_OF_STEP = Stage.TURN, Stage.JOINT
"""The stages in which `step` begins."""

_NETWORKS_EVERY = 64
"""Steps between two checks that ranks hold the same parameters: reading them takes time."""

_CHECKS = 2
"""The first steps that are checked: the second one shows whether torch optimizers differ."""


class Facts(NamedTuple):
    """The facts on which the ranks agree before the passes of a step."""

    tasks: tuple[str, ...]
    """The tasks of any rank, in the order of Phase 1."""
    ranks_of: Mapping[str, Sequence[int]]
    """The ranks that have labels for each task."""
    passes: int = 1
    """The greatest number of passes of any rank."""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _is_of_collective(error: BaseException) -> bool:
    """Whether a call of torch.distributed, or the wait for one, has raised an error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    of_torch = module.startswith("torch.distributed.")
    return isinstance(error, RuntimeError) and (of_torch or module == "cs_kernels.ranks.buckets")


class Messages:
    """Messages between the ranks.

    Args:
        transport: Carries them.
        sharded: Whether all ranks have to make the same passes, as those of `fully_shard`.

    """

    def __init__(self, transport: Transport, *, sharded: bool) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self._ranks = transport.numbers
        self._sharded = sharded
        self._tasks: tuple[str, ...] = ()
        self._strategy: Distributed | None = None
        self._checksums: Callable[[], dict[str, int]] = dict
        self._checks = _CHECKS
        """The next steps in which the parameters are compared."""
        self.facts = Facts((), {})
        """The facts of the current step."""
        self._call = Call(0, 0, 0, 0, 0, 0, 0)
        self._started, self._failed_after = time.monotonic(), 0.0
        """When the step has begun, and after how many seconds this rank has failed."""
        self._received = False
        """Whether the failure of a step is known to all ranks."""

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Around the checks of one rank's arguments: the others do not wait for one that fails."""
        try:
            yield
        except Exception as error:
            self.transport.gather({"error": _text(error)})
            raise

    def agree(
        self,
        facts: Mapping[str, object],
        tasks: Sequence[str],
        strategy: Distributed,
        checksums: Callable[[], dict[str, int]],
    ) -> None:
        """Checks that ranks have the same facts, and takes the parts of the optimizer.

        Args:
            facts: By name of an argument, its description.
            tasks: All tasks.
            strategy: What makes the passes of a step, and owns this.
            checksums: By name of a parameter, a number that differs if its values do.

        Raises:
            ValueError: Ranks have different facts.
            RankError: The arguments of one do not fit.

        """
        self._tasks, self._strategy, self._checksums = tuple(tasks), strategy, checksums
        self._compare(facts, ValueError)

    def _compare(self, facts: Mapping[str, object], kind: type[Exception]) -> None:
        of_ranks = self.transport.gather(dict(facts))
        for rank, other in enumerate(of_ranks):
            if "error" in other:
                raise RankError(f"rank {self._ranks[rank]} has failed: {other['error']}")
        for name, first in of_ranks[0].items():
            for rank, other in enumerate(of_ranks):
                if other[name] != first:
                    raise kind(self._difference(name, rank, first, other[name]))

    def _difference(self, name: str, rank: int, first: Any, other: Any) -> str:
        """The message for two values that differ; of long lists, the first entries that do."""
        if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
            first, other = next(
                pair for pair in zip(first, other, strict=True) if pair[0] != pair[1]
            )
        return (
            f"ranks must have the same {name}: rank {self._ranks[0]} has {first!r}, rank"
            f" {self._ranks[rank]} has {other!r}"
        )

    # --- in a step ---

    def begin(self, tasks: Sequence[str], call: Call) -> tuple[str, ...]:
        """The tasks of all ranks, in the order of the first rank that has each.

        Raises:
            RankError: Ranks begin different steps, or one has failed.

        """
        self._call = call
        if call.number % _NETWORKS_EVERY == 0:
            self._checks = max(self._checks, 1)
        order = [self._tasks.index(task) for task in tasks]
        messages = self._send("begin", order)
        self._check_same(messages)
        lists = [message["order"] for message in messages]
        union = dict.fromkeys(n for order in lists for n in order)
        ranks_of = {n: [r for r, order in enumerate(lists) if n in order] for n in union}
        named = {self._tasks[n]: ranks for n, ranks in ranks_of.items()}
        self.facts = Facts((*named,), named, max(message["passes"] for message in messages))
        if not union:
            self._received = True
            raise RankError("tasks must name at least one task on some rank, got none on all")
        if self._sharded and call.stage not in _OF_STEP:
            for rank, of_rank in enumerate(lists):
                if set(of_rank) != set(union):
                    self._received = True
                    missing = [t for t in self.facts.tasks if rank not in self.facts.ranks_of[t]]
                    raise RankError(
                        "losses must have the same tasks on all ranks after fully_shard: rank"
                        f" {self._ranks[rank]} lacks {missing}; give a loss of zero there, with"
                        " step(closure, tasks=...) it gets no weight"
                    )
        if any(message["unchecked"] for message in messages):
            self._check_networks()
        return self.facts.tasks

    def has(self, task: str) -> bool:
        """Whether this rank has labels for a task of the step; sharded ranks make every pass."""
        return self._sharded or self.rank in self.facts.ranks_of[task]

    def share(self, task: str) -> float:
        """1 / n for n ranks with labels; relative to 1 / W if sharded gradients are averaged."""
        of_task = self.facts.ranks_of[task]
        if self._sharded:
            return self.size / len(of_task) if self.rank in of_task else 0.0
        return 1.0 / len(of_task)

    def weight(self, task: str) -> float:
        """The weight of this rank's loss in the mean loss over the ranks with labels."""
        of_task = self.facts.ranks_of[task]
        return 1.0 / len(of_task) if self.rank in of_task else 0.0

    def passed(self) -> None:
        """Waits for the passes of the other ranks, and exchanges what they have shown.

        Raises:
            RankError: A rank has failed.

        """
        messages = self._send("passed")
        self._check_same(messages)
        if any(message["changed"] for message in messages):
            assert self._strategy is not None
            self._strategy.learn(self.transport.gather(self._strategy.discovered()))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An exception of this rank reaches all, and theirs this one.

        Raises:
            RankError: This rank failed because another one had.

        """
        self._started = time.monotonic()
        self._received = False
        try:
            yield
        except Exception as error:
            if self._received:  # By all ranks.
                raise
            if _is_of_collective(error):
                late = RankError(
                    f"rank {self._ranks[self.rank]} has waited in vain for another rank in step"
                    f" {self._call.number}: one has ended, or has not come to this step within the"
                    f" timeout of the process group; {_text(error)}"
                )
                late.__cause__, error = error, late
            self._failed_after = time.monotonic() - self._started
            with contextlib.suppress(Exception):
                assert self._strategy is not None
                self._strategy.drain()
            try:
                self._send("failed", error=error)
            except RankError as other:
                raise other from error
            except Exception:
                add_note(error, f"the other ranks of {self._ranks} did not answer")
            raise error from error.__cause__

    def _send(
        self, kind: Kind, order: Sequence[int] = (), error: Exception | None = None
    ) -> list[dict[str, Any]]:
        """Exchanges a message.

        Raises:
            RankError: Another rank has failed, and did so before this one.

        """
        assert self._strategy is not None
        changed = kind == "passed" and self._strategy.has_discovered()
        plan = self._strategy.fingerprint() if kind == "begin" else 0
        padding = [0] * (len(self._tasks) - len(order))
        tail = plan, changed, self._checks > 0, len(order)
        numbers = _KINDS.index(kind), *self._call, *order, *padding, *tail
        received = self.transport.exchange(numbers)
        messages = [
            {
                "kind": _KINDS[row[0]],
                **dict(zip(Call._fields, row[1:], strict=False)),
                "plan": row[-4],
                "changed": bool(row[-3]),
                "unchecked": bool(row[-2]),
                "order": row[1 + len(Call._fields) :][: row[-1]],
            }
            for row in received
        ]
        if any(message["kind"] == "failed" for message in messages):
            self._raise_failure(error)
        return messages

    def _raise_failure(self, error: Exception | None) -> None:
        """Raises for the rank that failed first, if it is another one."""
        self._received = True
        mine = None if error is None else (self._failed_after, _text(error))
        failures = [
            (after_and_text, rank)
            for rank, after_and_text in enumerate(self.transport.gather(mine))
            if after_and_text is not None
        ]
        self.recheck_networks()  # A torch optimizer may have made its step on some ranks.
        ((_, text), rank) = min(failures)
        if error is None or (rank != self.rank and text != _text(error)):
            raise RankError(f"rank {self._ranks[rank]} failed in step {self._call.number}: {text}")

    def _check_same(self, messages: Sequence[Mapping[str, Any]]) -> None:
        names = {
            "kind": "calls in a step",
            "number": "number of steps made before",
            "epoch": "epoch, by start_epoch",
            "phase": "phase",
            "stage": "calls: step, or backward with the same update=",
            "features": "number of features",
            "held": "number of parameters in the optimizer",
            "plan": "shared parameters that require a gradient, and options of the optimizer",
        }
        if self._sharded and messages[0]["stage"] in _OF_STEP:
            names["passes"] = "number of micro-batches"
        for key, name in names.items():
            first = messages[0][key]
            for rank, message in enumerate(messages):
                if message[key] != first:
                    self._received = True
                    if key == "plan":
                        assert self._strategy is not None
                        self._compare(self._strategy.planned(), RankError)
                        self._received = False  # Written in another way, but the same.
                        break
                    both = first, message[key]
                    if key == "stage":
                        both = Stage(both[0]).name, Stage(both[1]).name
                    raise RankError(self._difference(name, rank, *both))

    def recheck_networks(self) -> None:
        """Checks in the next steps that ranks hold the same parameters."""
        self._checks = _CHECKS

    def _check_networks(self) -> None:
        """Raises RankError if ranks hold different parameters."""
        self._checks = max(self._checks - 1, 0)
        of_ranks = self.transport.gather(self._checksums())
        found: dict[str, tuple[int, int]] = {}
        for rank, numbers in enumerate(of_ranks):
            for name, number in numbers.items():
                first, other = found.setdefault(name, (number, rank))
                if first != number:
                    self._received = True
                    self.recheck_networks()  # Until they are the same again.
                    raise RankError(
                        f"ranks must hold the same parameters: {name} of rank {self._ranks[rank]}"
                        f" differs from that of rank {self._ranks[other]}; load the same checkpoint"
                        " or set the same seed before the network is built"
                    )
