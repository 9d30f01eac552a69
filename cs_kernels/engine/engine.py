"""The engine: the components of a training loop, and the operations that all steps share.

Read `steps.py` first: it defines how steps are made.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.engine import supports
from cs_kernels.engine.accumulation import Accumulation
from cs_kernels.engine.anchors import Anchors
from cs_kernels.engine.arguments import check_method
from cs_kernels.engine.cuda_graphs import refuse_capture
from cs_kernels.engine.interrupts import held_back
from cs_kernels.engine.kept import Kept
from cs_kernels.engine.loop_guard import LoopGuard
from cs_kernels.engine.loss_graph import Backward, LossGraph
from cs_kernels.engine.pass_checks import PassChecks
from cs_kernels.engine.torch_optimizers import TorchOptimizers
from cs_kernels.engine.transaction import Transaction
from cs_kernels.methods import Method
from cs_kernels.monitor.monitor import Monitor
from cs_kernels.monitor.report import Done
from cs_kernels.options import checked_integer, checked_tasks
from cs_kernels.ranks.strategy import Call, Ranks
from cs_kernels.schedules import Phase, Schedule
from cs_kernels.stage import Passes, Stage
from cs_kernels.step import CapturedFacts, Step
from cs_kernels.trunk.layers import StaleLayoutError
from cs_kernels.trunk.trunk import Trunk
from cs_kernels.weightings import Weighting


class Engine:
    """Owns the components of a training loop.

    Args:
        trunk: The shared module, and the discoveries of its passes.
        optimizers: The torch optimizers.
        ranks: The processes that train together, perhaps only this one.
        method: Makes the joint update.
        schedule: Gives each step its phase.
        weighting: Gives each loss its weight.
        scaler: Scales the losses and steps the optimizers, if there is one.
        backward: Runs backward passes in place of `loss.backward()`, if given.
        check_passes: Whether each task's first passes are checked.

    """

    # Declared for type checkers: `supports` reads them, and the two modules import each other.
    trunk: Trunk
    ranks: Ranks
    schedule: Schedule
    weighting: Weighting
    graph: LossGraph
    accumulation: Accumulation
    monitor: Monitor

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
        self._method = method
        self.schedule = schedule
        self.weighting = weighting
        self.pass_checks = PassChecks(trunk, enabled=check_passes, alone=not ranks.is_distributed)
        self.graph = LossGraph(trunk, ranks, scaler, backward, self.pass_checks)
        self.accumulation = Accumulation(ranks.gradients, optimizers)
        self.guard = LoopGuard(ranks.gradients, optimizers, self.accumulation)
        self.transaction = Transaction(trunk, ranks, self.accumulation, self.guard)
        self.monitor = Monitor()
        self.kept = Kept()
        self.anchors = Anchors(ranks)
        self.epoch: int | None = None
        self.steps = 0
        """The number of steps made."""

    # --- called by every step, in this order ---

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wraps a call: delays Ctrl-C until its end, and reports an exception to other ranks."""
        self.ranks.wrappers.switch_off()
        with held_back(), self.ranks.together():
            yield

    def check(self, way: str, tasks: Iterable[str] | None) -> tuple[str, ...]:
        """Checks that this loop supports a way to make gradients; returns the call's tasks."""
        chosen = self.chosen(tasks)
        refuse_capture(self.trunk.device)
        supports.check(way, self)
        return chosen

    def begin(
        self,
        tasks: Sequence[str],
        phase: Phase,
        stage: Stage,
        *,
        passes: int = 1,
        features: int = 0,
    ) -> tuple[str, ...]:
        """Checks that all ranks begin the same call; returns the tasks of all ranks.

        Args:
            tasks: This rank's tasks.
            phase: The phase of the step.
            stage: The first stage of the call.
            passes: The number of micro-batches; in `backward`, `passes_needed`.
            features: The number of features.

        """
        if not stage.continues and self.trunk.changed():
            if self.trunk.modules_changed():
                self.kept.forget()
            self.forget_passes()
            self.anchors.expire()
        if stage is Stage.JOINT:
            tasks = self.anchors.due(tasks, self.method, self.steps)
        epoch = -1 if self.epoch is None else self.epoch
        call = Call(self.steps, phase, epoch, len(self.trunk.held()), stage, features, passes)
        return self.ranks.begin(tasks, call)

    @contextmanager
    def undone_on_error(self, label: str, *, eager: bool = True) -> Iterator[None]:
        """Wraps a step: after a failure, states are restored, and graphs are checked again.

        Args:
            label: The name of the step in a profile.
            eager: False in a capture, which only records changes.

        """
        with record_function(label):
            if not eager:
                yield
                return
            states = self.transaction.states(self.method, self.weighting)
            try:
                with states, self.trunk.reach.undone_on_error():
                    yield
            except BaseException:
                self.graph.forget()
                self.pass_checks.end_passes()
                raise

    def new_step(
        self,
        tasks: Sequence[str],
        phase: Phase,
        *,
        at_features: bool = False,
        more: bool = False,
        counter: Tensor | None = None,
    ) -> Step:
        """Begins a step, and returns its facts.

        Args:
            tasks: The tasks that are known so far to take part.
            phase: The step's phase.
            at_features: Whether methods combine gradients of features, not of parameters.
            more: Whether a later call may add tasks.
            counter: In a capture, a device tensor with the step's number.

        """
        self.graph.begin_step(self.steps)
        facts = Step if counter is None else CapturedFacts
        step = facts(
            number=self.steps,
            tasks=self.in_order(tasks),
            at_features=at_features,
            loss_scale=self.graph.known_scale(),
            counter=counter,
        )
        step.trains = self.trunk.requires_grad() if self.method.update_every > 1 else ()
        if phase == 2 and not (more and step.tasks != self.trunk.tasks):
            step.kept = self.kept.weights_for(step, self.method)
        return step

    def separates(self, step: Step) -> bool:
        """Whether joint passes keep the tasks' gradients separate."""
        weights_are_known = step.kept is not None and not step.kept.layers
        return self.method.separate_gradients and not weights_are_known

    @contextmanager
    def passing(
        self, passes: Passes, *, restores: bool = False
    ) -> Iterator[Sequence[nn.Parameter]]:
        """Wraps a stage, from its passes to its update; an exception undoes the stage.

        Args:
            passes: The passes.
            restores: Whether to restore running statistics after an exception.

        Yields:
            The parameters of the torch optimizers.

        """
        clears = not passes.stage.continues
        with self.transaction.part(passes.tasks, clears=clears, restores=restores) as held:
            passes.before = passes.step.begin_passes()
            self.ranks.expect(passes)
            yield held

    def average(self, passes: Passes, held: Sequence[nn.Parameter]) -> None:
        """Averages gradients, losses and statistics over ranks after the passes of a stage."""
        self.pass_checks.end_passes()
        self.ranks.average(passes, held)
        covers = passes.stage.is_joint or self.trunk.watcher.norms_ran
        if covers and self.method.prioritizes:
            self.trunk.require_covered(self.method)

    def collect(self, task: str) -> None:
        """Moves the gradients of one task out of `.grad`."""
        with record_function("cs_kernels.collect"), torch.no_grad():
            reached = self.ranks.collect(task)
            self.pass_checks.collected(task, self.trunk.reach.last_unreached(task))
            self.trunk.check_reached(task, reached)

    def collect_batched(self, tasks: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Puts the gradients of several tasks into their rows.

        Args:
            tasks: The tasks.
            grads: For each shared parameter, a [K, ...] tensor, or None.

        """
        with record_function("cs_kernels.collect"), torch.no_grad():
            of_tasks = [[None] * len(tasks) if g is None else g.unbind() for g in grads]
            for n, task in enumerate(tasks):
                row = [of_parameter[n] for of_parameter in of_tasks]
                for i in self.trunk.reach.last_unreached(task):
                    grad = row[i]
                    # A batched pass gives zeros to a task that does not reach a parameter.
                    if grad is not None and not grad.any():
                        row[i] = None
                unreached = [i for i, grad in enumerate(row) if grad is None]
                reached = self.ranks.gradients.put(task, row, unreached)
                self.trunk.check_reached(task, reached)

    def surgery(self, passes: Passes) -> None:
        """Writes the shared parameters' update to `.grad`, from the gradients of all tasks."""
        step = passes.step
        gradients, eager = self.ranks.gradients, step.counter is None
        if not passes.separate:  # `.grad` already contains the sum of the tasks' gradients.
            reached = any(p.grad is not None for p in self.trunk.shared)
            self.trunk.check_reached(step.tasks[0], reached)
        timer = self.monitor.timer(self.trunk.device, eager=eager)
        with record_function("cs_kernels.surgery"), torch.no_grad(), timer:
            gradients.release_own()
            first = gradients.first()
            self.monitor.measure(step)
            if passes.separate:
                self.monitor.look_for_zeros(gradients, step)
            if passes.separate or step.kept is None:
                self.combine(step)
            else:
                step.surgery = step.kept.surgery()
            gradients.publish()
            if first is not None and self.trunk.shared[first[0]].grad is None:
                raise RuntimeError(
                    f"method must assign the updates, but {self.method!r}.combine left none in"
                    " .grad: call gradients.assign(parameters) in it"
                )
        step.elapsed = timer if eager else None

    def combine(self, step: Step) -> None:
        """Calls the method on the rows of gradients, and empties the rows."""
        gradients = self.ranks.gradients
        self.anchors.lend(step, self.method)
        try:
            self.method.combine(gradients, self.trunk.layout(), step)
        except StaleLayoutError:
            self.trunk.forget_layout()
            self.method.combine(gradients, self.trunk.layout(), step)
        gradients.clear()

    def apply(self) -> None:
        """Steps the torch optimizers."""
        with self.guard.during("steps"):
            self.optimizers.step(self.scaler)
        self.guard.note_steps()

    def finish(self, step: Step, tasks: Sequence[str], phase: Phase) -> dict[str, Tensor]:
        """Steps the torch optimizers for the last time in a step; returns the losses.

        Everything that can fail comes before the optimizers' step, and is undone after an
        exception. Only assignments follow the optimizers' step.
        """
        losses = self.ranks.returned(step.losses, tasks)
        commit = self.prepared(step, phase)
        self.apply()
        commit()
        return losses

    def leave(
        self, step: Step, losses: Mapping[str, Tensor], tasks: Sequence[str]
    ) -> dict[str, Tensor]:
        """Leaves the update to the caller's torch optimizers; returns the losses of the call."""
        returned = self.ranks.returned(losses, tasks)
        commit = self.prepared(step, 2)
        commit()
        self.accumulation.clear()
        self.guard.note_update()
        return returned

    def prepared(self, step: Step, phase: Phase) -> Callable[[], None]:
        """Computes a step's results other than its update; returns a function that assigns them."""
        if not self.weighting.reevaluates:
            self.weighting.observe(step)
        done = Done(step, self.steps, self.epoch, phase)
        # For gradients of features, it does not matter which task reaches which parameter.
        unknown = not step.at_features and self.trunk.reach.has_unknown_gradient()
        trains = self.trunk.requires_grad() if step.trains else ()
        kept = self.kept.after(step, self.method, trains, unknown=unknown) if phase == 2 else None
        counted = self.monitor.counted_step(step)
        anchored = self.anchors.after(step, self.method)

        def commit() -> None:
            self.steps += 1
            self.monitor.done = done
            if kept is not None:
                self.kept = kept
            counted()
            anchored()
            self.trunk.end_step_if_watched()

        return commit

    # --- settings and checks before a step ---

    @property
    def method(self) -> Method:
        """Makes the joint update; another method can replace it between steps."""
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        check_method(method, self.trunk.module, self.trunk.tasks)
        if self.accumulation.is_open():
            raise RuntimeError(
                "method must not change while gradients of backward(..., update=False) wait for"
                f" their update, got {method!r}: call backward(...) first"
            )
        self._method = method
        self.kept.forget()
        self.anchors.forget()

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
            raise ValueError(
                f"schedule must give phase 1 or 2, got {phase!r} from {self.schedule!r}"
            )
        return phase

    @property
    def due_tasks(self) -> tuple[str, ...]:
        """The tasks whose gradients the next step computes."""
        if self.phase == 1 or self.trunk.changed():
            return self.trunk.tasks
        return self.anchors.due(self.trunk.tasks, self.method, self.steps)

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch, counted from 0."""
        number = checked_integer("epoch", epoch, 0)
        with self.transaction.states(self.weighting):
            self.weighting.start_epoch(number)
            self.epoch = number

    def chosen(self, tasks: Iterable[str] | None) -> tuple[str, ...]:
        """Checks the argument `tasks` of a step, and returns it as a tuple."""
        known = self.trunk.tasks
        if tasks is None:
            return known
        if self.ranks.size > 1 and isinstance(tasks, Sized) and not len(tasks):
            return ()  # Allowed here: other ranks may have the labels.
        chosen = checked_tasks(tasks)
        for task in chosen:
            if task not in known:
                raise ValueError(f"tasks must be among {list(known)}, got {task!r}")
        return chosen

    def in_order(self, tasks: Iterable[str]) -> tuple[str, ...]:
        """Sorts tasks into the order of the rows."""
        taking_part = set(tasks)
        return tuple(task for task in self.trunk.tasks if task in taking_part)

    def check_ready(self) -> None:
        """Raises a RuntimeError if `step` would lose gradients, or cannot step the optimizers."""
        if self.accumulation.is_open():
            raise RuntimeError(supports.WOULD_FORGET)
        self.guard.check_gradients()
        self.optimizers.check_step_now()

    def forget_passes(self) -> None:
        """Forgets the discoveries of all passes."""
        self.trunk.forget()
        self.graph.forget()
        self.pass_checks.forget()
        self.ranks.forget_passes()
