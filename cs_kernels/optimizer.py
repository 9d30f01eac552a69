"""MultiTaskOptimizer: the public interface of the training loop; `engine` makes the steps.

A joint step: losses -> gradients of every task -> one operator call -> `.grad` ->
`optimizer.step()`. In Phase 1, each task gets a plain optimizer step.
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
            and the heads; or several optimizers that divide them (Muon for matrices, AdamW for the
            rest).
        tasks: The names of the tasks. Phase 1 updates them in this order; ties in priority go to
            the first task.
        method: Makes the update from the gradients in Phase 2. Default: `ConnectionStrength()`.
        schedule: When to update tasks in turn and when jointly. Default: `Joint()`.
        weighting: Weighs the losses. Default: `EqualWeights()`.
        layers: Overrides the normalizations that forward passes have found for layers: maps the
            name of a layer in the trunk to the name of the task-specific normalization from which
            its channels get their priority, or to None for the plain sum. Invalid with methods that
            treat all layers alike.
        scaler: A `torch.amp.GradScaler` that scales the losses. `step` steps the optimizer with it,
            and updates it.
        backward: Called with a loss instead of `loss.backward()`, for frameworks that must run the
            backward pass: `accelerator.backward`, `fabric.backward`, Lightning's
            `self.manual_backward`. It may multiply the loss by a factor, and must accept
            `retain_graph=True` if `MultiTaskOptimizer.backward` is used.
        process_group: The ranks that train the same network, each on its own batches, such as
            `torch.distributed.group.WORLD`. A task's gradient is then the gradient of its mean loss
            over the ranks. Default: the group of `trunk`, if it is a DistributedDataParallel. If
            DistributedDataParallel wraps both the trunk and the heads, pass the wrapped network as
            `trunk`. After `fully_shard`, the ranks are found from the trunk's parameters; if a rank
            fails, all other ranks then wait in a collective until their group's timeout.
        check_passes: Whether to check every task's first backward pass, and its first backward pass
            after parameters were frozen or unfrozen: gradients must arrive in `.grad`, and
            parameters must not change. If `backward` makes several passes through one graph, they
            must also be repeatable: for each new combination of tasks, one pass is repeated three
            times, once with a zero gradient. After `fully_shard` and with reentrant checkpointing,
            passes are not repeated.

    Raises:
        ValueError: An argument does not fit; the message names it and quotes the value.
        TypeError: An argument has the wrong type.

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
            # The current method has replaced another one, and rejects `layers`.
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
        """The phase of the next step, 1 or 2; some schedules need `start_epoch` first."""
        return self._engine.phase

    @property
    def due_tasks(self) -> tuple[str, ...]:
        """The tasks whose gradients the next step computes.

        All tasks, unless the method keeps gradients (`Protect` with `refresh_every`): a protected
        task with a kept gradient is not due. `step` does not call the closure for such a task,
        unless no other task takes part; `backward` needs neither its batch nor its loss.
        """
        return self._engine.due_tasks

    def start_epoch(self, epoch: int) -> None:
        """Starts an epoch (an integer, counted from 0).

        An epoch that is started again, as in a resumed run, draws the same phase.
        """
        self._engine.start_epoch(epoch)

    def step(
        self, closure: Closure | Iterable[Closure], tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """One training step: an optimizer step per task in Phase 1, one for all tasks in Phase 2.

        The gradients of all parameters in the optimizer are set to None first, so the parameters of
        tasks that take no part do not change, not even by momentum or weight decay.

        After any exception, including the closure's, parameters and running statistics are as
        before the step (in Phase 1: before that task's update), and gradients are None. Changes
        that torch optimizers make before one of them raises are not undone. The statistics are
        restored in the trunk, and in the modules that ran in the first step of each task. The
        parameters that a loss depends on are checked in the task's first step, every 32 steps, and
        after parameters were frozen or unfrozen.

        Args:
            closure: Called with the name of a task, which is active in the trunk during the call;
                runs the network on a batch and returns the loss, a scalar. Or a sequence of
                closures, one per micro-batch, whose losses and gradients add up (divide by their
                number for a mean).
            tasks: The tasks that the batch has labels for, in the order of Phase 1. Default: all.
                On several ranks, each rank names its own tasks, or none; a task's gradient is the
                mean over the ranks that name it. After `fully_shard`, every rank runs the tasks
                that any rank names, and needs a loss with finite gradients for them, such as
                `0 * output.sum()`.

        Returns:
            The loss of each task that had a pass (`due_tasks`), detached and unweighted; the mean
            over the ranks that name it.

        Raises:
            ValueError: `tasks` is invalid; or a loss is not a scalar, has no graph, or depends on a
                parameter that the optimizer does not hold or on none of the trunk; or the method
                needs a prioritized layer and the trunk has none.
            TypeError: A closure is not a function, or did not return a tensor.
            RuntimeError: Gradients or an update of `backward` have not been used yet; or the step
                is inside the capture of a CUDA graph; or another rank has failed or makes another
                step.

        """
        return steps.step(self._engine, closure, tasks)

    def step_together(
        self, forward: Forward, tasks: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """`step` with one forward and one backward pass for all tasks in Phase 2.

        The trunk runs once on K copies of the batch, one per task, and each copy is normalized by
        its task's modules. Updates equal `step`'s up to rounding, and are made during the backward
        pass, a few layers at a time. Memory holds the activations of K passes at once, but only the
        K gradients of the largest layer and one update, instead of K + 1 gradients of all layers.

            losses = opt.step_together(
                lambda run: {task: loss_of[task](heads[task](z)) for task, z in run(x).items()}
            )

        Phase 1 is the same as in `step`: `run` then returns the output for one task only, so
        `forward` must take the tasks from the result of `run`, as above. Compiled modules run
        eagerly. The batch must be dimension 0 of the trunk's tensors, and only task-specific
        normalization may compute over it. Three extra forward passes verify this in the first step,
        and in the first step after parameters were frozen or unfrozen.

        Args:
            forward: Called with `run`, which takes the trunk's arguments, runs the trunk for all
                tasks of the step, and returns each task's output. `forward` returns the loss of
                each task, which must depend on that task's outputs only.
            tasks: As in `step`.

        Returns:
            As in `step`.

        Raises:
            ValueError: As in `step`; or `step` is needed, for one of these reasons: the method is
                neither `ConnectionStrength()` nor `Sum()` nor a Gramian method with groups="layer";
                the trunk has plain batch normalization in training, or changes other buffers; a
                prioritized weight (with groups="layer", any trainable shared parameter) is used in
                several layers or outside its layer; a loss depends on another task's outputs; the
                weighting computes losses again; there is a process group; or conflicts are counted.
            TypeError: A loss is not a tensor, or `forward` is not a function.
            RuntimeError: As in `step`.

        """
        return step_together(self._engine, forward, tasks, self.trunk, self._known_passes)

    def backward(
        self,
        losses: Mapping[str, Tensor],
        *,
        update: bool = True,
        features: Tensor | Iterable[Tensor] | None = None,
        batched: bool = False,
    ) -> dict[str, Tensor]:
        """Writes the joint update for losses that come from one forward pass to `.grad`.

        This is for networks without task-specific normalization. There is one forward pass for all
        tasks, and a backward pass per task, the last of which frees the graph. The trunk's `.grad`
        is then the update, and a head's is the gradient of its own loss; you step the torch
        optimizer (or the scaler). All gradients in the optimizer are set to None first. Besides the
        graph, memory holds the K gradients of the shared parameters.

        In calls with `update=False` (micro-batches), the gradients of every task add up; the next
        call with `update=True` makes one update. In between, `optimizer.zero_grad()` drops these
        gradients. An exception in `backward` drops them too: all gradients are None, and the next
        call warns and begins a new update.

        With `features`, the outputs of the trunk that all heads read, the method combines the
        losses' gradients with respect to the features. This takes K backward passes of the heads,
        one of the trunk, and memory for K gradients of the features (MGDA-UB, Sener and Koltun
        2018):

            z = trunk(x)
            opt.backward({task: loss_of(heads[task](z)) for task in tasks}, features=z)

        Args:
            losses: A scalar with a graph for each task that the batch has labels for. Losses of
                micro-batches add up: divide by their number for a mean.
            update: Whether to make the update now.
            features: A tensor that the trunk returned in the forward pass of the losses, or a
                sequence of such tensors. Every loss must depend on at least one feature, and on
                the part of the trunk before the features only through them. A shared parameter may
                come after the features if only one loss reaches it. Each rank passes the features
                of its own batch, the same number on all; a rank without losses may pass
                placeholder tensors.
            batched: Whether to make all backward passes at once, with vmap. This is faster for
                transformers and MLPs with few samples, and slower for convolutions; gradients of
                activations take K times the memory. The update differs only by rounding, unless a
                hook on an activation changes gradients: the hook sees all tasks' gradients in one
                batch. Leaves that the optimizer does not hold get no gradient. Passes are made one
                by one if they are a task's first, if a parameter has hooks, or if the graph has a
                `torch.autograd.Function` or a function that cannot be batched.

        Returns:
            The losses, detached.

        Raises:
            ValueError: A task is unknown; a loss is not a scalar, has no graph, or depends on a
                parameter that the optimizer does not hold or on none of the trunk; the trunk has
                task-specific normalization; the weighting computes losses again (`FAMO()`); or
                `features` does not separate the losses from the trunk, or is not supported with the
                method (`ConnectionStrength`; `GradDrop` with a process group), `update=False` or
                `backward=`; or `batched` is not supported with a process group, `backward=` or
                `features`.
            TypeError: `losses` is not a mapping, or a loss or a feature is not a tensor.
            RuntimeError: The schedule is in Phase 1, which takes a forward pass per task; or the
                last update was neither used by the optimizer nor dropped by `zero_grad()`; or the
                call is inside the capture of a CUDA graph; or there are `features`, although
                gradients of `update=False` wait for their update; or another rank has failed or
                makes another call.

        """
        if features is None:
            return steps.backward(self._engine, losses, update=update, batched=batched)
        if batched:
            raise ValueError(
                f"batched must be False with features, where trunk has one pass, got {batched!r}"
            )
        return steps.backward_at_features(self._engine, losses, features, update=update)

    def capture(
        self,
        closure: Closure | Iterable[Closure],
        tasks: Iterable[str] | None = None,
        *,
        warmup: int = 3,
    ) -> CapturedStep:
        """Returns a callable that makes the step of `step(closure, tasks)` with CUDA graphs.

        A small network on a GPU waits for the host, which launches its kernels one by one. A CUDA
        graph launches all kernels of a step at once. Each phase has its own graph: the phase's
        first `warmup` steps are eager, the next one is captured, and later steps replay it. On the
        CPU there are no graphs, and every call is `step(closure, tasks)`.

        A replay runs no Python. The closure must read its batch from tensors that are refilled in
        place. Values that the closure computes on the host, and numbers in the network such as a
        dropout rate, keep their values from the capture. After parameters, buffers, states or
        numbers in `param_groups` have been replaced, the step is captured again. A learning rate
        that changes in every step should therefore be a tensor on the device, which schedulers
        write in place.

        Args:
            closure: As in `step`.
            tasks: As in `step`.
            warmup: The number of eager steps before the capture, at least 1. They allocate memory
                and find the prioritized layers.

        Raises:
            ValueError: Replays would go wrong, because of: an optimizer that has the option
                `capturable` but not `capturable=True`, a scaler with an optimizer that is not
                fused, `backward=`, batch normalization with momentum=None, `update_every` above 1,
                a weighting that computes losses again, a method or weighting whose state cannot be
                captured, kept gradients (`Protect` with `refresh_every`), a process group, or
                parameters on several devices; or `tasks` or `warmup` is invalid.
            TypeError: A closure is not a function, or `warmup` is not an integer.
            RuntimeError: Gradients or an update of `backward` have not been used yet.

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
        """Checks the closure or losses, and finds the prioritized layers, without making a step.

        With a closure, there is one forward pass per task. Running statistics are restored; random
        numbers are consumed as by any forward pass. With losses, as for `backward`, the passes
        through their graph are checked as described for `check_passes`; the graph is not freed, and
        `.grad` is unchanged. After `fully_shard`, all ranks have to call it.

        Args:
            closure: As in `step`; or losses, as in `backward`.

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
            RuntimeError: The trunk is converted, and there has been no forward pass yet.

        """
        return self._engine.trunk.coverage()

    def priority(self) -> dict[str, Tensor]:
        """The top-priority task of every output channel, from the current weights and statistics.

        After `fully_shard`, all ranks have to call it.

        Returns:
            For each layer, by name: int64 [O], indices into `tasks`.

        Raises:
            RuntimeError: There has been no forward pass yet.

        """
        return self._engine.trunk.priority(self._engine.ranks.gradients.priorities)

    def report(self) -> Report:
        """What the last step did: losses, task weights, cosines, channel groups, conflicts.

        The report uses only tensors that the step has stored anyway, and making it does not
        synchronize with the device; `report.scalars()`, for a logger, and `print(report)`
        synchronize once. In a hook of the torch optimizer and in a weighting's `observe`, it still
        describes the previous step. It is the same on all ranks, except for the time.

        Raises:
            RuntimeError: There has been no step yet, or none since `load_state_dict`.

        """
        return self._engine.monitor.report(self.method, self.weighting)

    def count_conflicts(self, threshold: float | None = 0.0) -> None:
        """Counts, from the next joint step on, in which parameters the tasks' gradients conflict.

        Each joint step then reads the gradients once more, without a host synchronization; updates
        stay the same, bit for bit. A second call starts again from zero, with the new threshold.
        The counts are part of `state_dict`: a resumed run calls this first, then `load_state_dict`.
        On several ranks, all have to call it.

        Args:
            threshold: Two gradients are in conflict if their cosine is below this number, in
                [-1, 1]; None stops counting and discards the counts.

        Raises:
            ValueError: The threshold is outside [-1, 1], there are more than 64 tasks, or the
                method does not keep the tasks' gradients separate.

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

        Steps of Phase 1 are not counted. This call does not synchronize with the device; reading a
        number does.

        Raises:
            RuntimeError: Conflicts are not counted: `count_conflicts` has not been called.

        """
        return self._engine.monitor.counted().conflicts()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs besides the network's and the torch optimizer's.

        It does not include gradients that wait for their update (`backward` with `update=False`).
        It is the same on all ranks, and can be loaded on a different number of ranks. For
        torch.distributed.checkpoint, pass the MultiTaskOptimizer itself.
        """
        return state_of(self._engine)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`; gradients that wait for their update are dropped.

        If conflicts are counted, the counts continue from the state's, or from 0 if it has none.
        Otherwise, the state's counts are ignored.

        Raises:
            ValueError: The state has other tasks, another trunk, method or weighting, or conflicts
                counted with another threshold, or lacks entries. The current state is unchanged.

        """
        load_state(self._engine, state)
