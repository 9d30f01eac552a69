"""MultiTaskOptimizer: the body of a multi-task training loop, documented; `engine` makes the steps.

A joint step: losses -> gradients of every task -> one operator call -> `.grad` ->
`optimizer.step()`. In Phase 1, every task has a plain optimizer step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.engine import steps
from cs_kernels.engine.build import build_engine
from cs_kernels.engine.captured import CapturedStep
from cs_kernels.engine.copies import Copyable, PartOfEngine
from cs_kernels.engine.loss_graph import Backward
from cs_kernels.engine.one_graph import trace_losses
from cs_kernels.engine.per_task import Closure, trace
from cs_kernels.engine.stacked.together import Forward, KnownPasses, step_together
from cs_kernels.engine.state import load_state, state_of
from cs_kernels.methods import ConnectionStrength, Method
from cs_kernels.monitor.conflicts import Conflicts
from cs_kernels.monitor.report import Report
from cs_kernels.schedules import Joint, Phase, Schedule
from cs_kernels.trunk.layers import Coverage
from cs_kernels.weightings import EqualWeights, Weighting


class MultiTaskOptimizer(Copyable):
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
            task-specific normalization that gives its channels' priority, or None for the sum. Not
            for methods that treat all layers alike.
        scaler: A `torch.amp.GradScaler`: it scales losses, steps the optimizer and is updated.
        backward: Called with a loss instead of `loss.backward()`, for frameworks that must run the
            backward pass: `accelerator.backward`, `fabric.backward`, Lightning's
            `self.manual_backward`. It must accept `retain_graph=True` if
            `MultiTaskOptimizer.backward` is used. It may multiply the loss by a factor.
        process_group: The ranks that hold the same network, each with batches of its own, such as
            `torch.distributed.group.WORLD`. The gradient of a task is then that of its mean loss
            over the ranks. Default: the group of `trunk`, if it is a DistributedDataParallel. If
            one wraps both the trunk and the heads, hand over the wrapped network as `trunk`. The
            ranks of a trunk after `fully_shard` are found from its parameters; a rank that fails
            there leaves the others in a collective until the timeout of their group.
        check_passes: Whether to check the first backward pass of every task, and the next one after
            other parameters train: gradients must arrive in `.grad`, and parameters must stay.
            Where `backward` makes several passes through one graph, these must be repeatable: one
            is made three times more, once with a zero gradient, when tasks first come together.
            After `fully_shard` and with reentrant checkpointing, passes are not repeated.

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

    method = PartOfEngine[Method]()
    schedule = PartOfEngine[Schedule]()
    weighting = PartOfEngine[Weighting]()
    scaler = PartOfEngine["torch.amp.GradScaler | None"]()

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
        check_passes: bool = True,
    ) -> None:
        self.trunk = trunk
        self.optimizer = optimizer
        self._engine = build_engine(
            trunk,
            optimizer,
            tasks,
            ConnectionStrength() if method is None else method,
            Joint() if schedule is None else schedule,
            EqualWeights() if weighting is None else weighting,
            layers or {},
            scaler,
            backward,
            process_group,
            check_passes=check_passes,
        )
        self._arguments = {"layers": layers, "backward": backward, "check_passes": check_passes}
        self._known_passes = KnownPasses()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks, in the order of Phase 1."""
        return self._engine.trunk.tasks

    def __repr__(self) -> str:
        trunk = self._engine.trunk
        names = " + ".join(type(optimizer).__name__ for optimizer in self._engine.optimizers)
        numel = sum(p.numel() for p in trunk.shared)
        return (
            f"MultiTaskOptimizer({type(trunk.module).__name__} with {len(trunk.shared)} shared"
            f" parameters of {numel} elements, {names},"
            f" tasks={list(self.tasks)}, method={self.method!r}, schedule={self.schedule!r},"
            f" weighting={self.weighting!r})"
        )

    def _saved(self) -> dict[str, Any]:
        names = "trunk", "optimizer", "tasks", "method", "schedule", "weighting", "scaler"
        arguments = {name: getattr(self, name) for name in names} | self._arguments
        if self.method.separate_gradients and not self.method.prioritizes:
            # `method` was replaced since; this one refuses `layers`.
            arguments["layers"] = None
        threshold = self._engine.monitor.threshold
        return {**arguments, "threshold": threshold, "state": self.state_dict()}

    def _restore(self, saved: dict[str, Any]) -> None:
        threshold, state = saved.pop("threshold"), saved.pop("state")
        MultiTaskOptimizer.__init__(self, **saved)
        self.count_conflicts(threshold)
        self.load_state_dict(state)

    @property
    def phase(self) -> Phase:
        """1 or 2: the phase of the next step, for which a schedule may need `start_epoch`."""
        return self._engine.phase

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch (an integer, counted from 0).

        Starting the same one again draws the same phase.
        """
        self._engine.start_epoch(epoch)

    def step(
        self, closure: Closure | Iterable[Closure], tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """One training step: an optimizer step per task in Phase 1, one for all tasks in Phase 2.

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
        return steps.step(self._engine, closure, tasks)

    def step_together(
        self, forward: Forward, tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """`step` with one forward and one backward pass for all tasks in Phase 2.

        The trunk runs once on K copies of the batch; each task-specific normalization treats a
        task's copy with that task's module; updates equal `step`'s, and are made during the
        backward pass, a few layers at a time. Memory holds the activations of K passes at once, but
        K gradients of the largest layer and one update, in place of K + 1 gradients of all layers.

            losses = opt.step_together(
                lambda run: {task: loss_of[task](heads[task](z)) for task, z in run(x).items()}
            )

        Phase 1 is `step`'s: `run` gives the output for one task alone, so `forward` takes the
        tasks from it, as above. Compiled modules run eagerly. The batch must be dimension 0 of the
        trunk's tensors, and only task-specific normalization may compute over it: three more
        forward passes verify that in the first step, and in the first after a change of the
        parameters that train.

        Args:
            forward: Called with `run`, a function of the trunk's arguments that runs the trunk for
                the tasks and gives each its output. Returns the loss of each task, which depends on
                the outputs of this task alone.
            tasks: As in `step`.

        Returns:
            As `step`.

        Raises:
            ValueError: As `step`; or something that `step` supports is not supported here: the
                method is neither `ConnectionStrength()` nor `Sum()` nor a Gramian one with
                groups="layer"; the trunk has other batch normalization in training, changes other
                buffers, or uses a prioritized weight in several layers or in another way (with
                groups="layer": any shared parameter that trains); a loss depends on another task's
                outputs; there are many ranks, or conflicts are counted.
            TypeError: A loss is not a tensor, or `forward` not a function.
            RuntimeError: As `step`.

        """
        return step_together(self._engine, forward, tasks, self.trunk, self._known_passes)

    def backward(
        self,
        losses: Mapping[str, Tensor],
        *,
        update: bool = True,
        features: Tensor | Iterable[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The joint update of losses that come from one forward pass, into `.grad`.

        For networks without task-specific normalization: one forward pass for all tasks, and a
        backward pass per task, the last of which frees the graph. The trunk's `.grad` is then the
        update, and a head's is the gradient of its own loss; the torch optimizer (or the scaler)
        makes the step. All gradients in the optimizer are set to None first. Beside the graph,
        memory holds the K gradients of the shared parameters and one update.

        Over calls with `update=False` (micro-batches), the gradients of every task add up; the
        first call without it makes one update. `optimizer.zero_grad()` in between drops these
        gradients. So does any exception here: all gradients are None, and the next call begins a
        new update and warns that it does.

        With `features`, outputs of the trunk on which all heads build, the method combines the
        gradients of the losses with respect to them: K backward passes of the heads and one of the
        trunk, and K gradients of the features in memory (MGDA-UB, Sener and Koltun 2018):

            z = trunk(x)
            opt.backward({task: loss_of(heads[task](z)) for task in tasks}, features=z)

        Args:
            losses: A scalar with a graph for each task that the batch has labels for. Losses of
                micro-batches add up: divide by their number for a mean.
            update: Whether to make the update now.
            features: A tensor that the trunk returned in the forward pass of the losses, or a
                sequence of them. Every loss depends on some, and on what has led to them through
                them alone. A shared parameter may lie behind them if only one loss reaches it. Each
                rank hands over as many, of its own batch; without losses, any tensors.

        Returns:
            The losses, detached.

        Raises:
            ValueError: A task is unknown, a loss is not a scalar, has no graph, depends on a
                parameter that the optimizer does not hold or on none of the trunk, or the trunk has
                task-specific normalization, or the weighting computes losses again (`FAMO()`); or
                `features` does not separate the losses from the trunk, or does not go with the
                method (`GradDrop` on many ranks), `update=False` or `backward=`.
            TypeError: `losses` is not a mapping, or a loss or a feature not a tensor.
            RuntimeError: The schedule is in Phase 1, which takes a forward pass per task; or the
                last update was neither used by the optimizer nor set to zero; or a CUDA graph is
                captured around it; or gradients of `update=False` wait and there are features; or
                another rank has failed or makes another call.

        """
        if features is None:
            return steps.backward(self._engine, losses, update=update)
        return steps.backward_at_features(self._engine, losses, features, update=update)

    def capture(
        self,
        closure: Closure | Iterable[Closure],
        tasks: Iterable[str] | None = None,
        *,
        warmup: int = 3,
    ) -> CapturedStep:
        """A step to be captured in CUDA graphs: `captured()` is `step(closure, tasks)`.

        A small network on a GPU waits for the host, which launches its kernels one by one; a CUDA
        graph launches all kernels of a step at once. There is a graph for each phase: its first
        `warmup` steps are made as by `step`, the next one is captured, and later ones replay it. On
        the CPU there are no graphs, and every call is `step(closure, tasks)`.

        A replay runs no Python. The closure reads its batch from tensors that are refilled in
        place; what it computes on the host, and numbers of the network such as a dropout rate, stay
        those of the capture. After parameters, buffers, states or numbers in `param_groups` have
        been replaced, a step is captured again. So give a learning rate that changes in every step
        as a tensor on the device, which schedulers write in place.

        Args:
            closure: As in `step`.
            tasks: As in `step`.
            warmup: Steps before the capture, at least 1: they allocate memory and find the layers.

        Raises:
            ValueError: Replays would go wrong: an optimizer without `capturable=True` where it has
                that option, a scaler with an optimizer that is not fused, `backward=`, batch
                normalization with momentum=None, a method or weighting whose state cannot be
                captured, parameters on several devices; or `tasks` or `warmup` does not fit.
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

        """
        return CapturedStep(self._engine, closure, tasks, warmup)

    def trace(self, closure: Closure | Mapping[str, Tensor]) -> Coverage:
        """Finds mistakes and the prioritized layers without a step.

        With a closure, there is one forward pass per task. Running statistics are restored; random
        numbers are consumed as by any forward pass. With losses, as for `backward`, the passes
        through their graph are checked, as `check_passes` says; the graph and `.grad` stay. After
        `fully_shard`, all ranks have to call it.

        Args:
            closure: As in `step`; or the losses of `backward`.

        Returns:
            `coverage()`.

        Raises:
            ValueError: A loss depends on a parameter that the optimizer does not hold, or on none
                of the trunk.
            RuntimeError: A backward pass through the graph of the losses cannot be repeated.

        """
        if isinstance(closure, Mapping):
            trace_losses(self._engine, closure)
        else:
            trace(self._engine, closure)
        return self.coverage()

    def coverage(self) -> Coverage:
        """Which shared parameters are prioritized, which get the plain sum, and why.

        Raises:
            RuntimeError: No forward pass has been seen yet.

        """
        return self._engine.trunk.coverage()

    def priority(self) -> dict[str, Tensor]:
        """The top-priority task of every output channel, from the current weights and statistics.

        After `fully_shard`, all ranks have to call it.

        Returns:
            By name of the layer, int64 [O]: an index into `tasks`. As `coverage`, it raises before
            the first pass.

        """
        return self._engine.trunk.priority(self._engine.ranks.gradients.priorities)

    def report(self) -> Report:
        """What the last step did: losses, task weights, cosines, channel groups, conflicts.

        It is made from numbers that the step has kept anyway, without a host synchronization;
        `report.scalars()`, for a logger, and `print(report)` wait for the device, once. In a hook
        of the torch optimizer and in `observe` of a weighting, it still describes the step before.
        It is the same on all ranks, except for the time.

        Raises:
            RuntimeError: No step has been made yet, or none since `load_state_dict`.

        """
        return self._engine.monitor.report(self.method, self.weighting)

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
                method does not keep per-task gradients.

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
            cosines below 0, over all steps and pairs of tasks
              weight  5 of 5, 100.0 %
              bias    5 of 5, 100.0 %

        """
        self._engine.monitor.count(threshold, self._engine.ranks.gradients, self.method)

    def conflicts(self) -> Conflicts:
        """The cosines of the last joint step and the counts since `count_conflicts`, by parameter.

        Steps of Phase 1 have no joint gradients and are not counted. Asking does not wait for the
        device; reading a number does. It raises if `count_conflicts` was not called.
        """
        return self._engine.monitor.counted().conflicts()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs besides the network's and the torch optimizer's.

        It has no gradients that wait for their update (`backward` with `update=False`). On many
        ranks it is the same on all, and can be loaded on another number of them; for
        torch.distributed.checkpoint, hand over the MultiTaskOptimizer itself.
        """
        return state_of(self._engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`; gradients that wait for their update are dropped.

        If conflicts are counted, the counts continue from the state's, or from 0 if it has none.
        Otherwise, the state's counts are ignored.

        Raises:
            ValueError: The state has other tasks, another trunk, method or weighting, conflicts
                counted with another threshold, or missing entries. The current state is kept.

        """
        load_state(self._engine, state)
