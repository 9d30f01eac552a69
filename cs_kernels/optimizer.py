"""MultiTaskOptimizer: the body of a multi-task training loop.

A joint step: losses -> gradients of every task -> one operator call -> `.grad` ->
`optimizer.step()`. In Phase 1, every task has a plain optimizer step.
"""

import contextlib
import contextvars
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.accumulation import Accumulation
from cs_kernels.capture import CapturedStep, refuse_capture
from cs_kernels.checks import (
    Closure,
    check_devices,
    check_dtypes,
    check_held,
    check_kinds,
    check_scales,
    check_stackable,
    check_steps_now,
    check_trunk,
    check_weighting,
    checked_closures,
    checked_losses,
    checked_optimizers,
    checked_overrides,
    described,
    held_parameters,
    numeric_options,
    refuse_reevaluation,
)
from cs_kernels.conflicts import ConflictCounter, Conflicts
from cs_kernels.distributed import (
    Call,
    PartialGradients,
    Wrappers,
    find_ranks,
    is_sharded,
    reshard,
    unwrapped,
)
from cs_kernels.distributed.networks import digests
from cs_kernels.distributed.phase2 import task_priorities
from cs_kernels.distributed.shown import Shown
from cs_kernels.elapsed import Elapsed
from cs_kernels.features import Features
from cs_kernels.layer_updates import LayerUpdates
from cs_kernels.layout import (
    Coverage,
    Layout,
    StaleLayoutError,
    epsilons,
    find_layout,
    gammas,
    running_vars,
    shared_parameters,
)
from cs_kernels.methods import ConnectionStrength, Method
from cs_kernels.nn import TaskBatchNorm, check_tasks, modules_outside_norms, task_norms
from cs_kernels.notes import add_note, noted
from cs_kernels.ops.operands import MOST_TASKS, Entries
from cs_kernels.options import checked_integer
from cs_kernels.passes import Backward, Passes, Seen, no_shared_parameter
from cs_kernels.report import Done, Report, report_of
from cs_kernels.schedules import Joint, Phase, Schedule
from cs_kernels.stacked import Forward, StackedPass, run_of_one
from cs_kernels.statistics import RunningStatistics
from cs_kernels.step import GraphStep, Losses, Step
from cs_kernels.watching import LAYERS, Watcher
from cs_kernels.weightings import EqualWeights, Weighting

_GRAPHS_EVERY = 32
"""Steps between two checks of the losses' graphs. `backward` does not see the modules behind its
losses: if one is unfrozen, only the graph shows it."""


def _named_state(part: Method | Weighting) -> tuple[str, dict[str, Any]]:
    return type(part).__name__, part.state_dict()


def _described(part: object) -> str:
    """The representation, if it says more than an address."""
    return type(part).__name__ if type(part).__repr__ is object.__repr__ else repr(part)


class MultiTaskOptimizer:
    """Steps a torch optimizer with the gradients of several tasks.

    Args:
        trunk: The shared module. Its parameters outside task-specific normalization are shared,
            except those that only one task ever reaches (a head, if trunk is the whole network):
            these get that task's gradient, like all other parameters of the optimizer.
        optimizer: Any torch optimizer whose step needs no closure, with the parameters of the trunk
            and of the heads; or several that share them (Muon for matrices, AdamW for the rest).
        tasks: The names of the tasks, in the order of Phase 1 and of ties in priority.
        method: Makes the update from the gradients in Phase 2. Default: `ConnectionStrength()`.
        schedule: When to update tasks in turn and when jointly. Default: `Joint()`.
        weighting: Weighs the losses. Default: `EqualWeights()`.
        layers: Overrides the result of watched forward passes: by name of a layer in the trunk, the
            task-specific normalization that gives its channels' priority, or None for the sum.
        scaler: A `torch.amp.GradScaler`: it scales losses, steps the optimizer and is updated.
        backward: Called with a loss instead of `loss.backward()`, for frameworks that must run the
            backward pass: `accelerator.backward`, `fabric.backward`, Lightning's
            `self.manual_backward`. It must accept `retain_graph=True` if
            `MultiTaskOptimizer.backward` is used. It may multiply the loss by a factor.
        process_group: The ranks that hold the same network, each with batches of its own, such as
            `torch.distributed.group.WORLD`. The gradient of a task is then that of its mean loss
            over the ranks. Default: that of `trunk`, if it is a DistributedDataParallel. Of one
            around the trunk and the heads, hand over the wrapped network as `trunk`. The ranks of a
            trunk after `fully_shard` are found from its parameters; a rank that fails there leaves
            the others in a collective until the timeout of their group.

    Raises:
        ValueError: An argument does not fit; the message names it and quotes the value.
        TypeError: An argument is of the wrong kind.

    Examples:
        >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> trunk = cs.nn.convert_task_batchnorm(trunk, ["a", "b"])
        >>> heads = torch.nn.ModuleDict({t: torch.nn.Linear(8, 1) for t in ["a", "b"]})
        >>> sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
        >>> opt = cs.MultiTaskOptimizer(trunk, sgd, ["a", "b"])
        >>> x = torch.randn(16, 4)
        >>> losses = opt.step(lambda task: heads[task](trunk(x)).square().mean())
        >>> print(opt.coverage())
        1 of 2 shared parameters are prioritized, 80.0 % of 40 elements
          0.weight  prioritized by 1
          0.bias    plain sum: not the weight of a convolution or linear layer

    """

    def __init__(
        self,
        trunk: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        tasks: Iterable[str],
        method: Method | None = None,
        schedule: Schedule | None = None,
        weighting: Weighting | None = None,
        *,
        layers: Mapping[str, str | None] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        backward: Backward | None = None,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        self.trunk = trunk
        self.optimizer = optimizer
        self.tasks = check_tasks(tasks)
        self.method = ConnectionStrength() if method is None else method
        self.schedule = Joint() if schedule is None else schedule
        self.weighting = EqualWeights() if weighting is None else weighting
        self.scaler = scaler
        self._backward = backward
        self._layers = layers
        if not isinstance(trunk, nn.Module):
            raise TypeError(f"trunk must be a torch.nn.Module, got {described(trunk)}")
        self._wrappers = Wrappers()
        for module in trunk.modules():
            self._wrappers.take(module)
        inner = unwrapped(trunk)
        shared = shared_parameters(inner)
        self._ranks, self._gradients = find_ranks(
            inner, shared, self.tasks, process_group, self._wrappers
        )
        weakref.finalize(self, self._ranks.close).atexit = False  # The default group may be gone.
        with self._ranks.building():
            self._build(inner, shared, layers or {})
        if isinstance(self._gradients, PartialGradients):
            self._agree(self._gradients)

    def _build(
        self,
        inner: nn.Module,
        shared: dict[str, nn.Parameter],
        layers: Mapping[str, str | None],
    ) -> None:
        """Checks the arguments, and makes the parts."""
        check_kinds(self.method, self.schedule, self.weighting, self.scaler, self._backward)
        self.weighting.check(self.tasks)
        self.method.check(self.tasks)
        self._optimizers = checked_optimizers(self.optimizer)
        check_weighting(self.weighting, self.method, self._ranks)
        check_trunk(inner, self.tasks, self.method)
        check_devices(shared, self.tasks, self.method)
        check_dtypes(shared, self.method)
        self._overrides = checked_overrides(inner, layers)
        check_held(inner, shared, set(held_parameters(self._optimizers)), self.weighting)

        if self.scaler is not None and self.scaler.is_enabled():
            check_scales(self._optimizers)

        self._inner = inner
        self._norms = task_norms(inner)
        self._shared = self._gradients.parameters
        self._shared_set = set(self._shared)
        self._reach = self._gradients.reach
        self._accumulation = Accumulation(self._gradients, self._optimizers)
        self._statistics = RunningStatistics(inner)
        this = weakref.proxy(self)  # Freed at once when it goes, and its ranks' groups with it.
        self._watcher = Watcher(inner, lambda module, task: this._first_use(module, task))
        self._passes = Passes(
            inner,
            self._norms,
            self._watcher,
            self._gradients,
            self._ranks,
            self.weighting,
            self.scaler,
            self._backward,
        )
        self._scaled_by = None if self._backward is not None else self.scaler
        """The scaler whose factor is known before a step; that of `backward` shows in the step."""
        self._layout: tuple[object, Layout] | None = None
        self._whole_layout: tuple[int, Layout] | None = None
        """The watcher's version, and the layout of `_layout_of_all`."""
        self._covered = 0
        """The watcher's version for which a prioritized layer was found."""
        self._submodules = Entries(module._modules for module in inner.modules())
        """The modules of the trunk, to see when one is exchanged."""
        self._find_parameters_of_norms()
        self._trainable = self._what_trains()
        self._seen = self._watcher.version
        """The watcher's version for which `_trainable` was found."""
        self._epoch: int | None = None
        self._steps = 0
        self._done: Done | None = None
        """The last step."""
        self._reported = False
        """Whether a report has been asked for."""
        self._conflicts: ConflictCounter | None = None
        """If `count_conflicts` was called."""

    def _agree(self, gradients: PartialGradients) -> None:
        """Checks that all ranks train the same, and tells them what passes show from now on."""
        shared = set(self._shared)
        others = [p for p in held_parameters(self._optimizers) if p not in shared]
        gradients.shown = Shown(gradients.shared_reach, self._watcher, self._statistics)
        gradients.scales = self._backward is not None
        optimizers, inner = self._optimizers, self._inner  # Ranks must not keep this alive.
        gradients.options = lambda: numeric_options(optimizers)
        gradients.control.agree(
            {
                "tasks, in this order": list(self.tasks),
                "method": _described(self.method),
                "schedule": _described(self.schedule),
                "weighting": _described(self.weighting),
                "use of a scaler": self.scaler is not None and self.scaler.is_enabled(),
                "use of backward=": self._backward is not None,
                "number of shared parameters": len(self._shared),
                "shared parameters": [
                    (name, tuple(p.shape), str(p.dtype), p.requires_grad)
                    for name, p in zip(gradients.names, self._shared, strict=True)
                ],
                "number of other parameters in the optimizer": len(others),
                "other parameters in the optimizer": [
                    (tuple(p.shape), str(p.dtype)) for p in others
                ],
            },
            self.tasks,
            gradients,
            lambda: digests(inner, held_parameters(optimizers)),
        )

    def _first_use(self, module: nn.Module, task: str) -> None:
        """Before a module outside the trunk first runs for a task."""
        if (
            isinstance(module, TaskBatchNorm)
            and module.active not in (None, task, *self._watcher.passing_tasks)
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in module.parameters())
        ):
            raise ValueError(
                "trunk must contain the task-specific normalizations of its passes, got one outside"
                f" it with {module.active!r} active in the loss of {task!r}: hand over the whole"
                " converted network, or run that part inside active_task(part, task)"
            )
        self._statistics.first_use(module, task)
        self._wrappers.take(module)

    def __repr__(self) -> str:
        names = " + ".join(type(optimizer).__name__ for optimizer in self._optimizers)
        numel = sum(p.numel() for p in self._shared)
        return (
            f"MultiTaskOptimizer({type(self._inner).__name__} with {len(self._shared)} shared"
            f" parameters of {numel} elements, {names},"
            f" tasks={list(self.tasks)}, method={self.method!r}, schedule={self.schedule!r},"
            f" weighting={self.weighting!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The arguments and the state: a copy is built from them, as a resumed run is."""
        if "_copied" in self.__dict__:
            return dict(self.__dict__["_copied"])
        if self._accumulation.is_open():
            raise RuntimeError(
                "MultiTaskOptimizer must have no gradients of backward(..., update=False) that wait"
                " when it is copied or pickled, which would lose them: end them with backward(...)"
            )
        if self._ranks.size > 1 or isinstance(self._gradients, PartialGradients):
            raise TypeError(
                f"MultiTaskOptimizer must be in one process to be copied or pickled, got"
                f" {self._ranks.size} ranks: save its state_dict()"
            )
        names = "trunk", "optimizer", "tasks", "method", "schedule", "weighting", "scaler"
        arguments = {name: getattr(self, name) for name in names}
        return {
            "arguments": {**arguments, "layers": self._layers, "backward": self._backward},
            "threshold": None if self._conflicts is None else self._conflicts.threshold,
            "state": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Builds a copy; if its trunk holds it and is not complete yet, when it is first used."""
        self.__dict__["_copied"] = state
        if hasattr(state["arguments"]["trunk"], "_modules"):
            self._build_copy()

    def _build_copy(self) -> None:
        state = self.__dict__.pop("_copied")
        MultiTaskOptimizer.__init__(self, **state["arguments"])
        self.count_conflicts(state["threshold"])
        self.load_state_dict(state["state"])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The first use of a copy that is not built yet."""
            if "_copied" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            self._build_copy()
            return getattr(self, name)

    @property
    def phase(self) -> Phase:
        """1 or 2: the phase of the next step.

        Raises:
            RuntimeError: The schedule depends on the epoch and `start_epoch` was not called.
            ValueError: The schedule gives another value.

        """
        phase = self.schedule.phase(self._epoch, self._steps)
        if phase not in (1, 2):
            raise ValueError(f"schedule must give phase 1 or 2, got {phase!r} by {self.schedule!r}")
        return phase

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch, counted from 0; starting one again draws the same phase.

        Raises:
            ValueError: The epoch is negative.
            TypeError: It is not an integer.

        """
        number = checked_integer("epoch", epoch, 0)
        self.weighting.start_epoch(number)
        self._epoch = number

    def step(
        self, closure: Closure | Iterable[Closure], tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """One training step: Phase 1, an optimizer step a task; Phase 2, one for all.

        The gradients of all parameters in the optimizer are set to None first, so the parameters of
        tasks that take no part do not change, not even by momentum or weight decay.

        After any exception, also the closure's, parameters and running statistics are as they were
        before the step (in Phase 1: before that task's update), and gradients are None; but what a
        torch optimizer has changed before it raises, or before the next one of several does, stays.
        The statistics are those of the trunk, and of the modules that ran in the first step of each
        task. The parameters that a loss depends on are checked in that step, whenever other
        parameters require a gradient, and every 32 steps.

        Args:
            closure: Called with a task, which is active in the trunk meanwhile; runs the network on
                a batch and returns the loss, a scalar. Or a sequence of closures, one for each
                micro-batch: their losses and gradients add up (divide by their number for a mean).
            tasks: The tasks that the batch has labels for, in the order of Phase 1; all by default.
                On many ranks, each names its own, perhaps none; a task counts with the ranks that
                name it. After `fully_shard`, every rank runs the tasks that any rank names, and
                needs a loss with finite gradients for them, such as `0 * output.sum()`.

        Returns:
            The loss of each task, detached and unweighted; the mean over the ranks that name it.

        Raises:
            ValueError: `tasks` does not fit, a loss is not a scalar, has no graph, depends on a
                parameter that the optimizer does not hold or on none of the trunk, or the method
                needs a prioritized layer and the trunk has none.
            TypeError: A closure is not a function, or did not return a tensor.
            RuntimeError: `backward` has left gradients or an update to be used first; or a CUDA
                graph is captured around the step; or another rank has failed, or makes another
                step.

        """
        self._wrappers.switch_off()
        with self._ranks.together():
            closures = checked_closures(closure)
            chosen = self._chosen(tasks)
            phase = self.phase
            self._check_ready()
            chosen = self._ranks.begin(chosen, self._call(phase, 0, len(closures)))
            losses = self._make_step(closures, chosen, phase)
        return self._returned(losses, chosen)

    def _call(self, phase: Phase, kind: int, passes: int) -> Call:
        """The facts of this step that must be equal on all ranks."""
        epoch = -1 if self._epoch is None else self._epoch
        held = len(held_parameters(self._optimizers))
        return Call(self._steps, phase, epoch, held, kind, passes)

    def _returned(self, losses: Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
        """The losses of some tasks; mean losses are float64 until here."""
        if not isinstance(self._gradients, PartialGradients):
            return {task: losses[task] for task in tasks}
        dtypes, other = self._gradients.loss_dtypes, torch.get_default_dtype()
        return {task: losses[task].to(dtypes.get(task, other)) for task in tasks}

    def _check_ready(self) -> None:
        """Raises a RuntimeError as `step`, before anything is changed."""
        refuse_capture(self._shared[0].device)
        if self._accumulation.is_open():
            raise RuntimeError(
                "step would forget the gradients of backward(..., update=False): end these with"
                " backward(...), or forget them by optimizer.zero_grad(), first"
            )
        self._accumulation.check_update_used()
        check_steps_now(self._optimizers)

    def _make_step(
        self,
        closures: Sequence[Closure],
        chosen: Sequence[str],
        phase: Phase,
        counter: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One step; in a capture, with a counter of the steps in device memory."""
        with record_function("cs_kernels.step"):
            step = self._new_step(chosen, counter)
            if phase == 1:
                for n, task in enumerate(chosen, 1):
                    made = f"in Phase 1, the updates of {list(chosen[: n - 1])} have been made"
                    with (
                        noted(made if n > 1 else ""),
                        self._restored_on_error([task], step) as held,
                    ):
                        self._make_passes([task], closures, step, held, separate=False)
                        if self._watcher.norms_ran:
                            self._check_covered()
                        self._gradients.ahead = chosen[n : n + 1]
                        self._optimizer_step()
            else:
                with self._restored_on_error(chosen, step) as held:
                    separate = self.method.separate_gradients
                    self._make_passes(chosen, closures, step, held, separate=separate)
                    self._check_covered()
                    self._combine(step)
                    self._optimizer_step()
            try:
                if self.weighting.reevaluates:
                    step.losses_after = self._losses_again(chosen, closures)
            finally:  # The step has been made.
                self._finish(step, phase)
        return step.losses

    def _losses_again(self, tasks: Sequence[str], closures: Sequence[Closure]) -> dict[str, Tensor]:
        """The losses after a step, on the same batch; buffers and random numbers are restored."""
        with self._restored(tasks), self._accumulation.passing():
            return {task: self._passes.evaluate(task, closures) for task in tasks}

    @contextlib.contextmanager
    def _restored(self, tasks: Sequence[str]) -> Iterator[None]:
        """Around passes that leave buffers and random numbers as they were."""
        device = self._shared[0].device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        with (
            torch.random.fork_rng(devices, device_type=kind),
            self._statistics.restored_on_error(tasks, always=True),
        ):
            yield
        # Weights may be changed before the next pass, and this one may have had no graph.
        torch.clear_autocast_cache()

    def _make_passes(
        self,
        tasks: Sequence[str],
        closures: Sequence[Closure],
        step: Step,
        held: Sequence[nn.Parameter],
        *,
        separate: bool,
    ) -> None:
        """The passes of some tasks, whose gradients are separate or add up in `.grad`."""
        before = step.begin_passes()
        self._gradients.expect(tasks, separate=separate)
        for task in tasks:
            if not self._ranks.has(task):
                self._gradients.skip(task)
                continue
            watched = task not in self._watcher.tasks
            with self._accumulation.passing():
                self._passes.task_pass(task, closures, step, held)
            if separate:
                self._collect(task)
            elif len(tasks) == 1:
                self._check_reached(task, self._gradients.note(task))
            self._watch_new_layers(watched)
        self._share(tasks, step, before, held)

    def _share(
        self,
        tasks: Sequence[str],
        step: Step,
        before: Losses,
        held: Sequence[nn.Parameter],
        *,
        adds_up: bool = False,
    ) -> None:
        """Makes equal on all ranks what the passes of some tasks have left."""
        if isinstance(self._gradients, PartialGradients):
            self._gradients.note_passes(held, tasks)
            self._ranks.passed()
            statistics = self._statistics.of_norms(tasks)
            self._gradients.average(step, before, statistics, adds_up=adds_up)

    def step_together(
        self, forward: Forward, tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """`step` with one forward and one backward pass for all tasks in Phase 2.

        The batch of every task is stacked: the trunk runs once, on K times the batch; each
        task-specific normalization treats a task's part with that task's module; and updates are
        made during the backward pass, a few layers at a time. They are those of `step`. Memory
        holds the activations of K passes at once, but the gradients of one update and K of the
        largest layer, in place of K + 1 of all layers.

            losses = opt.step_together(
                lambda run: {task: loss_of[task](heads[task](z)) for task, z in run(x).items()}
            )

        Phase 1 is that of `step`: `forward` is called for each task in turn, and `run` gives the
        output for that task alone. So it takes the tasks from `run`, as above.

        Compiled modules run eagerly. The batch is in dimension 0 of the trunk's tensor arguments
        and of all tensors behind them, and nothing is computed over it but task-specific
        normalization. To see that, the first step, the first after parts were frozen or unfrozen,
        and every 32nd make three more forward passes of the trunk.

        Args:
            forward: Called with `run`, a function of the trunk's arguments that runs the trunk for
                the tasks and gives each its output. Returns the loss of each task, which depends on
                the outputs of this task alone.
            tasks: As in `step`.

        Returns:
            As `step`.

        Raises:
            ValueError: As `step`; or the method is neither `ConnectionStrength()` nor `Sum()` nor a
                Gramian one with groups="layer"; the trunk has batch normalization in training that
                is not task-specific, changes other buffers, or uses a prioritized weight in several
                layers or in another way (with groups="layer": any shared parameter that trains); a
                task's loss depends on another task's outputs; there are many ranks, or conflicts
                are counted. `step` takes all these.
            TypeError: A loss is not a tensor, or `forward` not a function.
            RuntimeError: As `step`.

        Examples:
            >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            >>> trunk = cs.nn.convert_task_batchnorm(trunk, ["a", "b"])
            >>> sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
            >>> opt = cs.MultiTaskOptimizer(trunk, sgd, ["a", "b"])
            >>> x = torch.randn(16, 4)
            >>> losses = opt.step_together(
            ...     lambda run: {task: z.square().mean() for task, z in run(x).items()}
            ... )
            >>> list(losses)
            ['a', 'b']

        """
        if not callable(forward):
            raise TypeError(
                "forward must be a function of run that returns the losses, got"
                f" {described(forward)}"
            )
        modules = list(modules_outside_norms(self._inner))
        check_stackable(self.method, self.weighting, modules)
        self._check_stacks()
        if self.phase == 1:
            return self.step(partial(self._loss_alone, forward), tasks)
        chosen = self._chosen(tasks)
        self._check_ready()
        losses = self._make_stacked_step(forward, chosen, modules)
        return {task: losses[task] for task in chosen}

    def _loss_alone(self, forward: Forward, task: str) -> Tensor:
        """The loss of one task, from the outputs for it alone."""
        try:
            losses = checked_losses(forward(run_of_one(self.trunk, task)))
        except KeyError as error:
            if error.args[:1] != (task,):
                add_note(error, "in Phase 1, run gives one task's output: iterate over its items()")
            raise
        if task not in losses:
            raise ValueError(f"forward must return the loss of {task!r}, got those of {[*losses]}")
        return losses[task]

    def _check_stacks(self) -> None:
        """Raises where a stacked pass cannot have all gradients of the tasks."""
        sharded = any(map(is_sharded, held_parameters(self._optimizers)))
        if self._ranks.size > 1 or isinstance(self._gradients, PartialGradients) or sharded:
            raise ValueError(
                "process_group must be None and no parameter sharded for step_together, got"
                f" {self._ranks.size} ranks: use step"
            )
        if self._conflicts is not None:
            raise ValueError(
                "count_conflicts needs all gradients of the tasks, got step_together, which never"
                " has them: use step, or end counting by count_conflicts(None)"
            )

    def _make_stacked_step(
        self, forward: Forward, chosen: Sequence[str], modules: Sequence[tuple[str, nn.Module]]
    ) -> dict[str, Tensor]:
        with record_function("cs_kernels.step"):
            step = self._new_step(chosen)
            # On a GPU, autograd calls it from a thread that does not know `use_backend`.
            context, by_module = contextvars.copy_context(), not self.method.prioritizes
            combine = partial(context.run, partial(self._combine_rows, step))
            updates = LayerUpdates(self._gradients, step, combine, by_module=by_module)
            candidates = self._parameters_of_layers(modules)
            stacked = StackedPass(self.trunk, modules, self._norms, step, updates, candidates)
            restored = partial(self._restored, step.tasks)
            with self._restored_on_error(step.tasks, step) as held, contextlib.closing(stacked):
                before = self.method.state_dict()
                try:
                    with self._accumulation.passing():
                        self._passes.stacked_pass(
                            stacked, forward, step, held, restored, self._take
                        )
                except BaseException:
                    self.method.load_state_dict(before)  # It may have made a part of the updates.
                    raise
                self._check_covered()
                step.surgery = updates.surgery()
                self._optimizer_step()
            self._finish(step, 2)
        return step.losses

    def _parameters_of_layers(
        self, modules: Sequence[tuple[str, nn.Module]]
    ) -> dict[nn.Parameter, str]:
        """The parameters, with names, whose update the method may make in a stacked pass."""
        if not self.method.separate_gradients:
            return {}
        layers = {name: m for name, m in modules if isinstance(m, LAYERS)}
        candidates = {m._parameters.get("weight") for m in layers.values()} | set(self._overrides)
        if self.method.prioritizes:
            prioritized = {layer.weight for layer in self._layout_of_all().layers}
            ran = self._watcher.norms.keys() & layers.keys()
            candidates -= {layers[n]._parameters.get("weight") for n in ran} - prioritized
        else:
            candidates |= {m._parameters.get("bias") for m in layers.values()}
        names = {p: n for n, p in zip(self._gradients.names, self._shared, strict=True)}
        return {
            p: names[p]
            for p in candidates & names.keys()
            if p is not None and p.requires_grad and p.is_floating_point()
        }

    def _take(self, seen: Seen) -> dict[Tensor, int]:
        """The parameters whose update the method makes, and their indices.

        Raises:
            ValueError: The method needs the gradients of others too.

        """
        if not self.method.separate_gradients:
            return {}
        if self.method.prioritizes:
            return {layer.weight: layer.weight_index for layer in self._current_layout().layers}
        if seen.unknown:
            raise ValueError(
                "trunk must show which task reaches which parameters for step_together with"
                f" {self.method!r}, got a torch.autograd.Function that may hide some, and a loss"
                " that does not depend on every output of run: use step"
            )
        return {self._shared[i]: i for i in seen.shared}

    def _layout_of_all(self) -> Layout:
        """The layers of the trunk, also those that only one task reaches."""
        version = self._watcher.version
        if self._whole_layout is None or self._whole_layout[0] != version:
            layout = find_layout(self._inner, self.tasks, self._watcher, self._overrides, {})
            self._whole_layout = version, layout
        return self._whole_layout[1]

    def capture(
        self,
        closure: Closure | Iterable[Closure],
        tasks: Iterable[str] | None = None,
        *,
        warmup: int = 3,
    ) -> CapturedStep:
        """A step to be captured in CUDA graphs: `captured()` is `step(closure, tasks)`.

        A small network on a GPU waits for the host, which launches its kernels one by one; a CUDA
        graph launches those of a whole step at once. There is a graph for each phase: its first
        `warmup` steps are made as by `step`, the next one is captured, and later ones replay it.

        A replay runs no Python. The closure reads its batch from tensors that are refilled in
        place; what it computes on the host, and numbers of the network such as a dropout rate, stay
        those of the capture. After parameters, buffers, states or numbers in `param_groups` have
        been replaced, `warmup` steps are made and the next one is captured again. So give a
        learning rate that changes in every step as a tensor on the device: schedulers write it in
        place, and optimizers that are fused or capturable read it there.

        On the CPU there are no graphs, and every call is `step(closure, tasks)`.

        Args:
            closure: As in `step`.
            tasks: As in `step`.
            warmup: Steps before the capture, at least 1: they allocate, and see the layers.

        Raises:
            ValueError: Replays would go wrong: an optimizer without `capturable=True` where it has
                that option, a scaler with an optimizer that is not fused, `backward=`, batch
                normalization with momentum=None in the trunk, a method or weighting whose state
                cannot be captured (`NashMTL(update_every=2)`, `RandomWeights()`, `FAMO()`),
                parameters on several devices; or `tasks` or `warmup` does not fit.
            TypeError: A closure is not a function, or `warmup` not an integer.
            RuntimeError: `backward` has left gradients or an update to be used first.

        Examples:
            >>> trunk = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            >>> trunk = cs.nn.convert_task_batchnorm(trunk, ["a", "b"])
            >>> sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
            >>> opt = cs.MultiTaskOptimizer(trunk, sgd, ["a", "b"])
            >>> x = torch.empty(16, 4)
            >>> captured = opt.capture(lambda task: trunk(x).square().mean())
            >>> for batch in torch.randn(5, 16, 4):
            ...     _ = x.copy_(batch)
            ...     losses = captured()
            >>> list(losses)
            ['a', 'b']

        """
        return CapturedStep(self, checked_closures(closure), self._chosen(tasks), warmup)

    def backward(
        self,
        losses: Mapping[str, Tensor],
        *,
        update: bool = True,
        features: Tensor | Iterable[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The joint update of losses that come from one forward pass, into `.grad`.

        For networks without task-specific normalization: one forward pass for all tasks, a backward
        pass a task, of which the last frees the graph. The trunk's `.grad` is then the update, a
        head's the gradient of its own loss; the torch optimizer (or the scaler) makes the step. All
        gradients in the optimizer are set to None first. Beside the graph, memory holds the K
        gradients of the shared parameters and one update.

        With micro-batches, the gradients of every task add up over calls with `update=False`; a
        call without it adds its own and makes one update:

            for i, batch in enumerate(batches):
                opt.backward(losses_of(batch), update=i + 1 == len(batches))
            optimizer.step()

        `optimizer.zero_grad()` in between drops these gradients. So does any exception here: all
        gradients are None, and the next call begins a new update and warns that it does.

        With `features`, outputs of the trunk on which all heads build, the method combines the
        gradients of the losses with respect to them: K backward passes of the heads and one of the
        trunk, and K gradients of the features in memory (MGDA-UB, Sener and Koltun 2018). What has
        led to the features gets one gradient, the combination's; parameters behind them get that of
        their own losses:

            z = trunk(x)
            opt.backward({task: loss_of(heads[task](z)) for task in tasks}, features=z)

        Args:
            losses: A scalar with a graph for each task that the batch has labels for. Losses of
                micro-batches add up: divide by their number for a mean.
            update: Whether to make the update now.
            features: A tensor that the trunk returned in the forward pass of the losses, or a
                sequence of them. Every loss depends on some, and on what has led to them through
                them alone. A shared parameter may lie behind them if only one loss reaches it.

        Returns:
            The losses, detached.

        Raises:
            ValueError: A task is unknown, a loss is not a scalar, has no graph, depends on a
                parameter that the optimizer does not hold or on none of the trunk, or the trunk has
                task-specific normalization, or the weighting computes losses again (`FAMO()`); or
                `features` does not separate the losses from the trunk, or does not go with the
                method, `update=False`, `backward=` or many ranks.
            TypeError: `losses` is not a mapping, or a loss or a feature not a tensor.
            RuntimeError: The schedule is in Phase 1, which takes a forward pass a task; or the
                last update was neither used by the optimizer nor set to zero; or a CUDA graph is
                captured around it; or gradients of `update=False` wait and there are features.

        """
        self._wrappers.switch_off()
        with self._ranks.together(), self._accumulation.dropped_on_error(self._drop):
            losses = checked_losses(losses)
            chosen = self._chosen(losses)
            refuse_capture(self._shared[0].device)
            refuse_reevaluation(self.weighting, "after backward, which has no closure")
            if features is not None:
                self._check_takes_features(update=update)
            if self._norms:
                raise ValueError(
                    "trunk must have no task-specific normalization for backward, which takes"
                    f" one forward pass for all tasks, got {len(self._norms)} of them: use"
                    " step(closure)"
                )
            if features is None:
                return self._make_update(losses, chosen, update=update)
            names_of = self._watcher.names_of
            found = Features(features, losses, self.tasks, self._shared, names_of)
            with contextlib.closing(found):
                return self._make_update(losses, chosen, update=True, features=found)

    def _check_takes_features(self, *, update: bool) -> None:
        """Raises where `backward` cannot stop at features."""
        if self.method.prioritizes:
            raise ValueError(
                "method must take gradients of any tensors for backward with features, got"
                f" {self.method!r}, which takes those of weights"
            )
        if self._backward is not None:
            raise ValueError(
                "backward must be None for backward with features, whose passes end there, got"
                f" {self._backward!r}"
            )
        if self._ranks.size > 1 or isinstance(self._gradients, PartialGradients):
            raise ValueError(
                "process_group must be None for backward with features, got"
                f" {self._ranks.size} ranks"
            )
        sharded = sum(map(is_sharded, held_parameters(self._optimizers)))
        if sharded:
            raise ValueError(
                "optimizer must hold whole parameters for backward with features, got"
                f" {sharded} after fully_shard"
            )
        if self._conflicts is not None:
            raise ValueError(
                "count_conflicts needs gradients of all shared parameters, got features in"
                " backward, whose passes end there: leave them out, or end counting by"
                " count_conflicts(None)"
            )
        if not update:
            raise ValueError(
                "update must be True for backward with features, which change from one micro-batch"
                f" to the next, got {update!r}"
            )
        if self._accumulation.is_open():
            raise RuntimeError(
                "features must be None in a call that ends those with update=False, whose gradients"
                " are dropped now: end them without features, or call optimizer.zero_grad() first"
            )

    def _make_update(
        self,
        losses: Mapping[str, Tensor],
        chosen: Sequence[str],
        *,
        update: bool,
        features: Features | None = None,
    ) -> dict[str, Tensor]:
        accumulation = self._accumulation
        is_open = accumulation.is_open()
        if not is_open:
            if self.phase == 1:
                raise RuntimeError(
                    f"backward makes joint updates, but {self.schedule!r} is in Phase 1: use step"
                )
            accumulation.check_update_used()
            accumulation.begin()
        kind = 1 + (not update) + 2 * is_open
        chosen = self._ranks.begin(chosen, self._call(2, kind, 1))
        step = accumulation.step or self._new_step(chosen)
        before = step.begin_passes()
        separate = self.method.separate_gradients
        with (
            record_function("cs_kernels.backward"),
            self._cleared_on_error(first=not is_open) as held,
        ):
            accumulation.unmark()
            taking_part = {*step.tasks, *chosen}
            step.tasks = tuple(task for task in self.tasks if task in taking_part)
            self._gradients.expect(chosen, separate=separate, adds_up=not update)
            collect = self._collect if separate else None
            features = features if separate else None  # A sum of gradients needs no stop.
            whole = update and not is_open
            self._passes.backward_passes(chosen, losses, step, held, collect, features, whole=whole)
            self._share(chosen, step, before, held, adds_up=not update)
            if features is not None:
                self._combine_at(features, step)
            elif update:
                self._combine(step)
        if update:
            accumulation.clear()
            self._finish(step, 2)
            accumulation.note_update()
        else:
            accumulation.wait(step)
        return self._returned(step.recent.losses, chosen)

    def trace(self, closure: Closure) -> Coverage:
        """Finds the prioritized layers without a step, from one forward pass a task.

        Running statistics are restored; random numbers are consumed as by any forward pass.

        Args:
            closure: As in `step`; there is no backward pass. After `fully_shard`, all ranks have to
                call it.

        Returns:
            `coverage()`.

        Raises:
            ValueError: The loss depends on a parameter that the optimizer does not hold, or on none
                of the trunk.

        """
        (closure,) = checked_closures(closure)
        self._forget_passes()
        held = held_parameters(self._optimizers)
        with self._statistics.restored_on_error(self.tasks, always=True):
            for task in self.tasks:
                self._passes.trace(task, closure, held)
        self._reach.has_new = False
        reshard(self._inner)
        self._seen, self._trainable = self._watcher.version, self._what_trains()
        return self.coverage()

    def coverage(self) -> Coverage:
        """Which shared parameters are prioritized, which get the plain sum, and why.

        Raises:
            RuntimeError: No forward pass has been seen yet.

        """
        self._check_watched()
        self._layout = None  # Parameters may have been frozen since the last step.
        return self._current_layout().coverage

    def priority(self) -> dict[str, Tensor]:
        """The top-priority task of every output channel, from the current weights and statistics.

        After `fully_shard`, all ranks have to call it.

        Returns:
            By name of the layer, int64 [O]: an index into `tasks`.

        Raises:
            RuntimeError: No forward pass has been seen yet.

        """
        self._check_watched()
        self._layout = None  # Normalizations may have been replaced.
        with torch.no_grad():
            if isinstance(self._gradients, PartialGradients):
                lists = self._current_layout().lists
                # No average: a user may ask on one rank alone, and a step has made them equal.
                of_all = task_priorities(self._gradients, lists, averaged=True)
                priorities = torch.split(of_all, lists.channels)
                names = (layer.name for layer in lists.layers)
                return dict(zip(names, priorities, strict=True))
            return {
                layer.name: torch.ops.cs_kernels.task_priority(
                    torch.ops.cs_kernels.connection_strength(
                        layer.weight,
                        torch.stack(gammas([layer])),
                        torch.stack(running_vars([layer])),
                        epsilons([layer]),
                        True,
                        layer.out_channel_dim,
                        layer.groups,
                    )
                )
                for layer in self._current_layout().layers
            }

    def report(self) -> Report:
        """What the last step did: losses, task weights, cosines, channel groups, conflicts.

        It is made from numbers that the step has kept anyway, without a host synchronization;
        `report.scalars()` and `print(report)` wait for the device, once. In a hook of the torch
        optimizer, it is still that of the step before.

            for name, value in opt.report().scalars().items():
                writer.add_scalar(name, value, step)

        On many ranks it is the same on all, but for the time.

        Raises:
            RuntimeError: No step has been made yet, or none since `load_state_dict`.

        """
        if self._done is None:
            raise RuntimeError("a report is of the last step: call step or backward first")
        self._reported = True
        return report_of(self._done, self.method, self.weighting)

    def count_conflicts(self, threshold: float | None = 0.0) -> None:
        """Counts, from the next joint step on, in which parameters the tasks' gradients conflict.

        A joint step then reads the gradients once more, without a host synchronization; the update
        stays the same, bit for bit. Called again, it begins anew with its threshold. `state_dict`
        has the counts: a resumed run calls this first, then `load_state_dict`. On many ranks, all
        have to call it.

        Args:
            threshold: Two gradients are in conflict where their cosine is below it, in [-1, 1];
                None ends counting, and forgets the counts.

        Raises:
            ValueError: The threshold is outside of [-1, 1], there are more than 64 tasks, or the
                method does not keep the tasks' gradients one by one.

        Examples:
            >>> trunk = torch.nn.Linear(4, 8)
            >>> sgd = torch.optim.SGD(trunk.parameters(), lr=0.1)
            >>> opt = cs.MultiTaskOptimizer(trunk, sgd, ["a", "b"], cs.PCGrad())
            >>> opt.count_conflicts()
            >>> for x in torch.randn(5, 16, 4):
            ...     y = trunk(x).mean()
            ...     _ = opt.backward({"a": y, "b": -y})
            ...     sgd.step()
            >>> print(opt.conflicts())
            cosines below 0 among those of all pairs of tasks and all steps
              weight  5 of 5, 100.0 %
              bias    5 of 5, 100.0 %

        """
        if threshold is None:
            if isinstance(self._gradients, PartialGradients):
                self._gradients.threshold = None
            self._conflicts = None
            return
        if not self.method.separate_gradients:
            raise ValueError(
                "method must keep the tasks' gradients one by one for count_conflicts, got"
                f" {self.method!r}, which adds them up: for the plain sum, use"
                " cs.Sum(separate=True)"
            )
        if len(self.tasks) > MOST_TASKS:
            raise ValueError(
                f"tasks must be at most {MOST_TASKS} for count_conflicts, got {len(self.tasks)}"
            )
        self._conflicts = ConflictCounter(self._gradients, threshold)
        if isinstance(self._gradients, PartialGradients):
            self._gradients.threshold = self._conflicts.threshold

    def conflicts(self) -> Conflicts:
        """The cosines of the last joint step and the counts since `count_conflicts`, by parameter.

        Steps of Phase 1 have no joint gradients and are not counted. Asking does not wait for the
        device; reading a number does.

        Raises:
            RuntimeError: `count_conflicts` was not called.

        """
        if self._conflicts is None:
            raise RuntimeError("conflicts are not counted: call count_conflicts() before the steps")
        return self._conflicts.conflicts()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs beside those of the network and the torch optimizer.

        It has no gradients that wait for their update (`backward` with `update=False`). On many
        ranks it is the same on all, and can be loaded on another number of them; for
        torch.distributed.checkpoint, hand over the MultiTaskOptimizer itself.
        """
        # Distributed checkpoints store a tuple as it is, and a dictionary entry by entry, which
        # would need the same entries in the one that they are loaded into.
        state = {
            "tasks": list(self.tasks),
            "epoch": self._epoch,
            "steps": self._steps,
            "reach": (self._reach.state_dict(),),
            "method": _named_state(self.method),
            "weighting": _named_state(self.weighting),
        }
        if self._conflicts is not None:
            state["conflicts"] = (self._conflicts.state_dict(),)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`; gradients that wait for their update are dropped.

        If conflicts are counted, their counts go on from those of the state, or from 0 if it has
        none. If they are not, those of the state are left out.

        Raises:
            ValueError: It is of other tasks, another trunk, method or weighting, has conflicts
                counted with another threshold, or is not whole. The state before is kept.

        """
        self._check_state(state)
        before = self.state_dict()
        try:
            self._load(state)
        except Exception as error:
            self._load(before)
            raise ValueError(f"state must be a whole state_dict, got one with {error!r}") from error
        self._passes.check_graphs()  # They may show what this state has not noted.
        if self._accumulation.step is not None:
            self._clear(held_parameters(self._optimizers))
        self._accumulation.restart()
        self._done = None
        self._ranks.recheck_networks()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        expected = {key: of for key, of in self.state_dict().items() if key != "conflicts"}
        if not isinstance(state, Mapping) or not set(expected) <= set(state):
            found = list(state) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state must have {list(expected)}, got {found}")
        tasks = state["tasks"]
        if not isinstance(tasks, Sequence) or list(tasks) != list(self.tasks):
            raise ValueError(f"state must be of tasks {list(self.tasks)}, got {tasks!r}")
        for part in ("method", "weighting"):
            given = state[part]
            name = given[0] if isinstance(given, Sequence) and len(given) == 2 else given
            if name != expected[part][0]:
                raise ValueError(f"state must be of {part} {expected[part][0]}, got {name}")

    def _load(self, state: Mapping[str, Any]) -> None:
        epoch, steps = state["epoch"], int(state["steps"])
        (reach,), (_, of_method), (_, of_weighting) = (
            state[part] for part in ("reach", "method", "weighting")
        )
        self._reach.load_state_dict(reach)
        self.method.load_state_dict(of_method)
        self.weighting.load_state_dict(of_weighting)
        if self._conflicts is not None:
            (of_conflicts,) = state.get("conflicts", (None,))
            self._conflicts.load_state_dict(of_conflicts)
        self._epoch, self._steps = None if epoch is None else int(epoch), steps

    def _chosen(self, tasks: Iterable[str] | None) -> tuple[str, ...]:
        if tasks is None:
            return self.tasks
        if self._ranks.size > 1 and isinstance(tasks, Sized) and not len(tasks):
            return ()  # Other ranks have labels.
        chosen = check_tasks(tasks)
        for task in chosen:
            if task not in self.tasks:
                raise ValueError(f"tasks must be among {list(self.tasks)}, got {task!r}")
        return chosen

    def _new_step(self, tasks: Sequence[str], counter: Tensor | None = None) -> Step:
        if not self._notice_changes() and self._steps % _GRAPHS_EVERY == 0:
            self._passes.check_graphs()
        scale = None
        if self._scaled_by is not None and self._scaled_by.is_enabled():
            scale = self._scaled_by.scale(torch.ones((), device=self._shared[0].device))
        facts = Step if counter is None else GraphStep
        return facts(
            number=self._steps,
            tasks=tuple(task for task in self.tasks if task in tasks),
            loss_scale=scale,
            counter=counter,
        )

    def _notice_changes(self) -> bool:
        """Whether other parameters train than in the last step, or a normalization was replaced."""
        replaced, trains = self._submodules.changed(), self._what_trains()
        if not replaced and trains == self._trainable:
            return False
        self._check_parameters()
        if replaced:
            self._submodules.watch(module._modules for module in self._inner.modules())
        self._forget_passes()
        self._trainable = self._what_trains()
        return True

    def _check_parameters(self) -> None:
        """Raises if the trunk has other parameters than those that the gradients are of."""
        reshard(self._inner)
        now = shared_parameters(self._inner)
        other = [name for name, p in now.items() if p not in self._shared_set]
        if other or len(now) != len(self._shared):
            self._trainable = []  # The next step looks again.
            raise ValueError(
                "trunk must keep the parameters that it had when MultiTaskOptimizer was built, got"
                f" {f'another one as {other[0]}' if other else 'fewer'}: build a new one, and load"
                " the state_dict of this one if the names are the same"
            )

    def _forget_passes(self) -> None:
        """Looks at the next passes anew: other parameters may train, other modules may run."""
        self._norms[:] = task_norms(self._inner)
        self._find_parameters_of_norms()
        self._passes.forget()
        self._gradients.forget_passes()
        self._statistics.find(self._inner)
        self._layout = self._whole_layout = None
        self._covered = 0

    def _find_parameters_of_norms(self) -> None:
        """Finds them, and those among them that the torch optimizer does not hold."""
        held = held_parameters(self._optimizers)
        of_optimizer = set(held)
        self._of_norms = [p for norm in self._norms for p in norm.parameters()]
        self._not_held = [p for p in self._of_norms if p not in of_optimizer]
        self._passes.watch_gradients(held)

    def _finish(self, step: Step, phase: Phase) -> None:
        self._done = Done(step, self._steps, self._epoch, phase)
        self._steps += 1
        self.weighting.observe(step)
        if self._conflicts is not None:
            self._conflicts.add(step)
        if self._seen != self._watcher.version:
            self._seen = self._watcher.version
            self._trainable = self._what_trains()

    def _watch_new_layers(self, watched: bool) -> None:
        """Watches the next passes if a layer has first run in an unwatched one.

        In a compiled network no hook shows it, but the first gradient of the layer's weight does.
        """
        if self._reach.has_new and not watched:
            self._watcher.forget()
        self._reach.has_new = False

    def _collect(self, task: str) -> None:
        """Moves the gradients of one task out of `.grad`, unless they may add up there."""
        if self.method.separate_gradients:
            with record_function("cs_kernels.collect"), torch.no_grad():
                self._check_reached(task, self._gradients.collect(task))

    def _combine(self, step: Step) -> None:
        """Writes the update into `.grad`."""
        if not self.method.separate_gradients:  # The tasks' gradients have added up.
            self._check_reached(step.tasks[0], any(p.grad is not None for p in self._shared))
        eager = step.counter is None
        elapsed = Elapsed(self._shared[0].device, wanted=self._reported and eager)
        with record_function("cs_kernels.surgery"), torch.no_grad(), elapsed:
            self._gradients.release_own()
            first = self._gradients.first()
            if self._conflicts is not None:
                self._conflicts.measure(step)
            self._combine_rows(step)
            self._gradients.publish()
            if first is not None and self._shared[first[0]].grad is None:
                raise RuntimeError(
                    f"method must assign the updates, got none in .grad by {self.method!r}.combine:"
                    " call gradients.assign(parameters) in it"
                )
        step.elapsed = elapsed if eager else None

    def _combine_rows(self, step: Step) -> None:
        """Writes the updates of the gradients in the rows into `.grad`, and empties the rows."""
        try:
            self.method.combine(self._gradients, self._current_layout(), step)
        except StaleLayoutError:
            self._layout = None
            self.method.combine(self._gradients, self._current_layout(), step)
        self._gradients.clear()

    def _combine_at(self, features: Features, step: Step) -> None:
        """Combines the gradients of features, and takes the combination through the trunk."""
        elapsed = Elapsed(self._shared[0].device, wanted=self._reported)
        with record_function("cs_kernels.surgery"), torch.no_grad(), elapsed:
            features.combine(self.method, step)
        step.elapsed = elapsed
        features.trunk_pass()

    def _check_reached(self, task: str, reached: bool) -> None:
        """Raises for a loss that reaches nothing of the trunk, unless the trunk is frozen."""
        if reached:
            return
        before = self._reach.reached_by(task)
        held = set(held_parameters(self._optimizers))
        own = [p for norm in self._norms for p in norm.of(task).parameters() if p in held]
        frozen = bool(before) and not any(p.requires_grad for p in before)
        trains = any(p.requires_grad for p in self._shared)
        if trains and not frozen and all(p.grad is None for p in own):
            raise no_shared_parameter(task)

    def _check_watched(self) -> None:
        if not self._watcher.tasks and not self._reach.tasks_seen:
            raise RuntimeError(
                "which layers are prioritized is seen in a forward pass: call step or trace first"
            )

    def _current_layout(self) -> Layout:
        owners = self._reach.owners()
        known = (self._watcher.version, owners)
        if self._layout is None or self._layout[0] != known:
            reshard(self._inner)
            names = self._gradients.names
            own = {names[i]: task for i, task in owners.items()}
            layout = find_layout(self._inner, self.tasks, self._watcher, self._overrides, own)
            self._layout = known, layout
        return self._layout[1]

    def _check_covered(self) -> None:
        """Raises if the method needs prioritized layers and there are none; a task's own count."""
        if not self.method.prioritizes or self._covered == self._watcher.version:
            return
        layout = self._layout_of_all()
        if not layout.layers:
            self._passes.forget()
            raise ValueError(
                f"trunk must have a layer whose output goes to a task-specific normalization for"
                f" {self.method!r} (`layers` can name one); {layout.coverage}"
            )
        self._covered = self._watcher.version

    def _what_trains(self) -> list[int]:
        """Changes when other parameters require a gradient or the optimizer holds others."""
        held = held_parameters(self._optimizers)
        flags = [*map(id, held), *(p.requires_grad for p in held)]
        flags += [p.requires_grad for p in (*self._shared, *self._not_held)]
        for module in self._watcher.outside:
            flags += [p.requires_grad for p in module._parameters.values() if p is not None]
        return flags

    @contextlib.contextmanager
    def _restored_on_error(self, tasks: Sequence[str], step: Step) -> Iterator[list[nn.Parameter]]:
        """As `_cleared_on_error`, and an exception restores the running statistics.

        A capture only records what would change them.
        """
        with contextlib.ExitStack() as stack:
            if step.counter is None:
                stack.enter_context(self._statistics.restored_on_error(tasks))
            yield stack.enter_context(self._cleared_on_error())

    @contextlib.contextmanager
    def _cleared_on_error(self, first: bool = True) -> Iterator[list[nn.Parameter]]:
        """Sets every gradient to None, first and after an exception.

        The gradients of the last step are not kept: they would take the memory of one more row.

        Args:
            first: Whether to do so first.

        Yields:
            The parameters of the torch optimizer.

        """
        held = held_parameters(self._optimizers)
        # The normalizations' gradients are kept during the passes: without these few kilobytes
        # between its freed blocks, glibc would trim the heap in each pass (5 % of a step).
        kept = [p.grad for p in self._of_norms]
        try:
            if first:
                self._clear(held)
            yield held
            kept.clear()
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Drops all gradients after an exception."""
        held = held_parameters(self._optimizers)
        self._clear(held)
        self._gradients.recover(held)

    def _clear(self, held: Sequence[nn.Parameter]) -> None:
        self._gradients.clear()
        self._accumulation.clear()
        for parameter in held:
            parameter.grad = None

    def _optimizer_step(self) -> None:
        if self.scaler is None:
            for optimizer in self._optimizers:
                optimizer.step()
        else:
            for optimizer in self._optimizers:
                # The scaler refuses an optimizer without any gradient, such as another task's.
                if any(p.grad is not None for p in held_parameters([optimizer])):
                    self.scaler.step(optimizer)
            self.scaler.update()
        torch.clear_autocast_cache()  # An autocast around the step would keep the old weights.
        self._accumulation.note_steps()
