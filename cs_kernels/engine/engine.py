"""The engine: one walk for every step, whichever way its gradients are made.

A `Mode` makes the gradients of a part of a step: of one task in Phase 1, of all in Phase 2. What
comes before and after is here: facts, ranks, averages, surgery, the torch optimizers, undoing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.engine import supports
from cs_kernels.engine.accumulation import Accumulation
from cs_kernels.engine.cuda_graphs import refuse_capture
from cs_kernels.engine.interrupts import held_back
from cs_kernels.engine.kept import Kept
from cs_kernels.engine.loop_guard import LoopGuard
from cs_kernels.engine.loss_graph import Backward, LossGraph
from cs_kernels.engine.pass_checks import PassChecks
from cs_kernels.engine.torch_optimizers import TorchOptimizers
from cs_kernels.engine.transaction import Transaction
from cs_kernels.errors import noted
from cs_kernels.methods import Method
from cs_kernels.monitor.monitor import Monitor
from cs_kernels.monitor.report import Done
from cs_kernels.nn.task_norm import check_tasks
from cs_kernels.options import checked_integer
from cs_kernels.ranks.strategy import Call, Ranks
from cs_kernels.schedules import Phase, Schedule
from cs_kernels.step import CapturedFacts, KeptWeights, Part, Step
from cs_kernels.trunk.layers import StaleLayoutError
from cs_kernels.trunk.trunk import Trunk
from cs_kernels.weightings import Weighting


class Engine:
    """Makes the steps of a training loop from its parts, which it owns.

    Args:
        trunk: What is known of the shared module.
        optimizers: The torch optimizers.
        ranks: The processes that train together; this one alone, perhaps.
        method: Makes the joint update.
        schedule: Says when there is one.
        weighting: Weighs the losses.
        scaler: Scales the losses and steps the optimizers, if there is one.
        backward: Runs backward passes, if it is given.
        check_passes: Whether the first passes are checked.

    """

    def __init__(
        self,
        trunk: Trunk,
        optimizers: TorchOptimizers,
        ranks: Ranks,
        method: Method,
        schedule: Schedule,
        weighting: Weighting,
        scaler: torch.amp.GradScaler | None,
        backward: Backward | None,
        *,
        check_passes: bool,
    ) -> None:
        self.trunk = trunk
        self.optimizers = optimizers
        self.ranks = ranks
        self.method = method
        self.schedule = schedule
        self.weighting = weighting
        self.pass_checks = PassChecks(trunk, enabled=check_passes)
        self.graph = LossGraph(trunk, ranks, scaler, backward, self.pass_checks)
        self.accumulation = Accumulation(ranks.gradients, optimizers)
        self.guard = LoopGuard(ranks.gradients, optimizers, self.accumulation)
        self.transaction = Transaction(trunk, ranks, self.accumulation, self.guard)
        self.monitor = Monitor()
        self.kept = Kept()
        self.epoch: int | None = None
        self.steps = 0
        """The number of steps made."""

    # --- the walk ---

    def run(self, mode: "Mode") -> dict[str, Tensor]:
        """A step, or a call of `backward`; returns the losses of its tasks."""
        self.ranks.wrappers.switch_off()
        with held_back(), self.ranks.together(), mode.around():
            chosen = self.chosen(mode.arguments())
            refuse_capture(self.trunk.device)
            supports.check(mode.name, self)
            phase = mode.phase()
            mode.check()
            if mode.open_step() is None and self.trunk.changed():
                self.forget_passes()
            chosen = self.ranks.begin(chosen, self._call(mode, phase))
            return self.make(mode, chosen, phase)

    def make(
        self, mode: "Mode", tasks: Sequence[str], phase: Phase, counter: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Makes a step that has been checked; returns the losses of its tasks.

        Everything that can fail comes before the step of the torch optimizers, and is undone after
        an exception. Behind it, there are only assignments.

        Args:
            mode: Makes the gradients.
            tasks: The tasks of all ranks.
            phase: The phase of the step.
            counter: In a capture, the number of the step on the device.

        """
        eager = counter is None
        with record_function(mode.label), self._undone_on_error() if eager else nullcontext():
            step = mode.open_step() or self._new_step(mode, tasks, phase, counter)
            parts = [*mode.parts(step, tasks, phase)]
            for part in parts:
                with (
                    noted(part.note),
                    self.transaction.part(
                        part.tasks, clears=not part.continues, restores=mode.applies and eager
                    ) as held,
                ):
                    part.before = step.begin_passes()
                    self.ranks.expect(part)
                    mode.make(part, held)
                    self.pass_checks.end_passes()
                    self.ranks.average(part, held)
                    if part.joint or self.trunk.watcher.norms_ran:
                        self._require_covered()
                    mode.surgery(part)
                    last = part is parts[-1]
                    if last:
                        losses = self.ranks.returned(mode.losses_of(step), tasks)
                        commit = mode.prepared(step, phase)
                    if mode.applies:
                        self._apply()
                    if last:
                        commit()
        if self.weighting.reevaluates:
            note = (
                f"the step has been made: {self.weighting!r} computes losses again after it,"
                " without gradients; with reevaluate=False, it takes those of the next step"
            )
            with noted(note):
                mode.observe_again(step, tasks)
        return losses

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Around a step: one that fails has changed no state, and shown nothing of the trunk."""
        states = self.transaction.states(self.method, self.weighting)
        try:
            with states, self.trunk.reach.undone_on_error():
                yield
        except BaseException:
            self.graph.forget()
            self.pass_checks.end_passes()
            raise

    def _call(self, mode: "Mode", phase: Phase) -> Call:
        """The facts of a step that must be equal on all ranks."""
        epoch = -1 if self.epoch is None else self.epoch
        return Call(self.steps, phase, epoch, len(self.trunk.held()), mode.kind, mode.passes)

    def _new_step(
        self, mode: "Mode", tasks: Sequence[str], phase: Phase, counter: Tensor | None
    ) -> Step:
        self.graph.begin_step(self.steps)
        facts = Step if counter is None else CapturedFacts
        step = facts(
            number=self.steps,
            tasks=self.in_order(tasks),
            at_features=mode.at_features,
            loss_scale=self.graph.known_scale(),
            counter=counter,
        )
        step.kept = mode.kept_weights(step) if phase == 2 else None
        return step

    def collect(self, task: str) -> None:
        """Moves the gradients of one task out of `.grad`."""
        with record_function("cs_kernels.collect"), torch.no_grad():
            reached = self.ranks.collect(task)
            self.pass_checks.collected(task, self.trunk.reach.last_unreached(task))
            self.trunk.check_reached(task, reached)

    def surgery(self, part: Part) -> None:
        """Makes the update of the shared parameters in `.grad`, from the gradients of all tasks."""
        step = part.step
        gradients, eager = self.ranks.gradients, step.counter is None
        if not part.separate:  # The tasks' gradients have added up.
            reached = any(p.grad is not None for p in self.trunk.shared)
            self.trunk.check_reached(step.tasks[0], reached)
        timer = self.monitor.timer(self.trunk.device, eager=eager)
        with record_function("cs_kernels.surgery"), torch.no_grad(), timer:
            gradients.release_own()
            first = gradients.first()
            self.monitor.measure(step)
            if part.separate:
                self.monitor.look_for_zeros(gradients, step)
            if part.separate or step.kept is None:
                self.combine(step)
            else:
                step.surgery = step.kept.surgery()
            gradients.publish()
            if first is not None and self.trunk.shared[first[0]].grad is None:
                raise RuntimeError(
                    f"method must assign the updates, got none in .grad by {self.method!r}.combine:"
                    " call gradients.assign(parameters) in it"
                )
        step.elapsed = timer if eager else None

    def combine(self, step: Step) -> None:
        """Calls the method for the gradients in the rows, and empties the rows."""
        gradients = self.ranks.gradients
        try:
            self.method.combine(gradients, self.trunk.layout(), step)
        except StaleLayoutError:
            self.trunk.forget_layout()
            self.method.combine(gradients, self.trunk.layout(), step)
        gradients.clear()

    def _apply(self) -> None:
        """The step of the torch optimizers."""
        self.optimizers.step(self.scaler)
        self.guard.note_steps()

    def prepared(self, step: Step, phase: Phase) -> Callable[[], None]:
        """Computes what a step leaves beside its update; the function returned assigns it."""
        if not self.weighting.reevaluates:
            self.weighting.observe(step)
        done = Done(step, self.steps, self.epoch, phase)
        unknown = self.trunk.reach.has_unknown_gradient()
        kept = self.kept.after(step, self.method, unknown=unknown) if phase == 2 else None
        counted = self.monitor.counted_step(step)

        def commit() -> None:
            self.steps += 1
            self.monitor.done = done
            if kept is not None:
                self.kept = kept
            counted()
            self.trunk.end_step_if_watched()

        return commit

    # --- what a step begins from ---

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scales the losses, and steps the torch optimizers."""
        return self.graph.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.graph.scaler = scaler

    @property
    def phase(self) -> Phase:
        """1 or 2: the phase of the next step."""
        phase = self.schedule.phase(self.epoch, self.steps)
        if phase not in (1, 2):
            raise ValueError(f"schedule must give phase 1 or 2, got {phase!r} by {self.schedule!r}")
        return phase

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch, counted from 0."""
        number = checked_integer("epoch", epoch, 0)
        with self.transaction.states(self.weighting):
            self.weighting.start_epoch(number)
            self.epoch = number

    def chosen(self, tasks: Iterable[str] | None) -> tuple[str, ...]:
        """The argument `tasks` of a step, checked."""
        known = self.trunk.tasks
        if tasks is None:
            return known
        if self.ranks.size > 1 and isinstance(tasks, Sized) and not len(tasks):
            return ()  # Other ranks have labels.
        chosen = check_tasks(tasks)
        for task in chosen:
            if task not in known:
                raise ValueError(f"tasks must be among {list(known)}, got {task!r}")
        return chosen

    def in_order(self, tasks: Iterable[str]) -> tuple[str, ...]:
        """Some tasks in the order of the rows."""
        taking_part = set(tasks)
        return tuple(task for task in self.trunk.tasks if task in taking_part)

    def check_ready(self) -> None:
        """Raises a RuntimeError if `step` would lose what `backward` has left."""
        if self.accumulation.is_open():
            raise RuntimeError(supports.WOULD_FORGET)
        self.guard.check_gradients()
        self.optimizers.check_step_now()

    def forget_passes(self) -> None:
        """Learns anew what passes show; the next joint step solves for task weights."""
        self.trunk.forget()
        self.kept.forget()
        self.graph.forget()
        self.pass_checks.forget()
        self.ranks.forget_passes()

    def _require_covered(self) -> None:
        if self.method.prioritizes:
            self.trunk.require_covered(self.method)


class Mode(ABC):
    """A way to make the gradients of a step."""

    name: ClassVar[str]
    """Its column in `supports.TABLE`."""
    label: ClassVar[str] = "cs_kernels.step"
    """Its name in a profile."""
    at_features: ClassVar[bool] = False
    """Whether methods combine gradients of features, not of parameters."""
    applies: ClassVar[bool] = True
    """Whether the torch optimizers are stepped here, not by the caller."""
    passes = 1
    """The number of micro-batches."""
    kind = 0
    """For `Call.kind_of_call`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def around(self) -> AbstractContextManager[None]:
        """Around the whole call."""
        return nullcontext()

    @abstractmethod
    def arguments(self) -> Iterable[str] | None:
        """Checks the caller's arguments, and returns the tasks; None for all."""

    def phase(self) -> Phase:
        """The phase of this step."""
        return self.engine.phase

    def check(self) -> None:
        """Raises for a call that does not fit, before anything is changed."""
        self.engine.check_ready()

    def open_step(self) -> Step | None:
        """The step that an earlier call has begun, if this one goes on with it."""
        return None

    def parts(self, step: Step, tasks: Sequence[str], phase: Phase) -> Iterator[Part]:
        """The parts of a step, in order."""
        if phase == 2:
            yield Part(step, tuple(tasks), joint=True, separate=self.separates(step))
            return
        for n, task in enumerate(tasks):
            made = f"in Phase 1, the updates of {list(tasks[:n])} have been made"
            yield Part(step, (task,), joint=False, separate=False, note=made if n else "")

    def kept_weights(self, step: Step) -> KeptWeights | None:
        """The task weights of an earlier step that a new one uses, if it does."""
        return self.engine.kept.weights_for(step, self.engine.method)

    def separates(self, step: Step) -> bool:
        """Whether joint parts keep each task's gradients."""
        weights_are_known = step.kept is not None and not step.kept.layers
        return self.engine.method.separate_gradients and not weights_are_known

    @abstractmethod
    def make(self, part: Part, held: Sequence[nn.Parameter]) -> None:
        """Makes the gradients of a part.

        Args:
            part: The part of the step.
            held: The parameters of the torch optimizers.

        """

    def surgery(self, part: Part) -> None:
        """Makes the update of a joint part, to which no later call adds, from its gradients."""
        if part.joint and not part.adds_up:
            self.engine.surgery(part)

    def prepared(self, step: Step, phase: Phase) -> Callable[[], None]:
        """Computes what this call leaves beside gradients; the function returned assigns it."""
        return self.engine.prepared(step, phase)

    def observe_again(self, step: Step, tasks: Sequence[str]) -> None:
        """Gives a weighting that asks for them the losses after a step."""
        raise NotImplementedError(f"{self.name} does not compute losses again")

    def losses_of(self, step: Step) -> dict[str, Tensor]:
        """The losses that the caller gets."""
        return step.losses
