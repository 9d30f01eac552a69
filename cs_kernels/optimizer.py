"""MultiTaskOptimizer: the body of a multi-task training loop.

One step is one straight walk: losses -> gradients of every task -> one operator call -> `.grad` ->
`optimizer.step()`; or, in Phase 1, a plain step a task.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from cs_kernels.checks import check_optimizer, check_overrides, check_trunk, checked_loss
from cs_kernels.gradients import TaskGradients
from cs_kernels.layout import (
    Coverage,
    Followers,
    Layout,
    epsilons,
    find_layout,
    gammas,
    running_vars,
    shared_parameters,
)
from cs_kernels.methods import ConnectionStrength, Method
from cs_kernels.nn import active, check_tasks, task_norms
from cs_kernels.schedules import Joint, Phase, Schedule
from cs_kernels.statistics import RunningStatistics
from cs_kernels.weightings import EqualWeights, Weighting

Closure = Callable[[str], Tensor]


class MultiTaskOptimizer:
    """Steps a torch optimizer with the gradients of several tasks.

    Args:
        trunk: The shared module. Its parameters outside task-specific normalization are the shared
            ones; all else that the optimizer holds belongs to tasks and is left to autograd.
        optimizer: Any torch optimizer with the parameters of the trunk, and of the heads.
        tasks: The names of the tasks, in the order of Phase 1 and of ties in priority.
        method: What becomes of the gradients in Phase 2. Default: `ConnectionStrength()`.
        schedule: When to update tasks in turn and when jointly. Default: `Joint()`.
        weighting: Of the losses. Default: `EqualWeights()`.
        layers: Overrides what a watched forward pass tells: by name of a layer in the trunk, the
            task-specific normalization to take its channels' priority from, or None for the sum.
        scaler: A `torch.amp.GradScaler`: losses are scaled, and it steps the optimizer and updates.

    Raises:
        ValueError: An argument does not fit; the message names it and quotes the value.
        TypeError: An argument is of the wrong kind.

    Example:
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
        optimizer: torch.optim.Optimizer,
        tasks: Sequence[str],
        method: Method | None = None,
        schedule: Schedule | None = None,
        weighting: Weighting | None = None,
        *,
        layers: Mapping[str, str | None] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.trunk = trunk
        self.optimizer = optimizer
        self.tasks = check_tasks(tasks)
        self.method = ConnectionStrength() if method is None else method
        self.schedule = Joint() if schedule is None else schedule
        self.weighting = EqualWeights() if weighting is None else weighting
        self.scaler = scaler
        self.weighting.check(self.tasks)
        self.method.check(self.tasks)

        self._norms = task_norms(trunk)
        shared = shared_parameters(trunk)
        check_trunk(trunk, self.tasks, self.method)
        check_overrides(trunk, layers or {})
        check_optimizer(trunk, shared, optimizer, self.weighting)

        self._gradients = TaskGradients(shared, len(self.tasks))
        self._statistics = RunningStatistics(trunk)
        self._overrides = dict(layers or {})
        self._followers = Followers(trunk)
        self._watched: set[str] = set()
        self._layout: Layout | None = None
        self._epoch: int | None = None
        self._steps = 0

    @property
    def phase(self) -> Phase:
        """1 or 2: the phase of the next step.

        Raises:
            RuntimeError: The schedule depends on the epoch and `start_epoch` was not called.

        """
        return self.schedule.phase(self._epoch, self._steps)

    def start_epoch(self, epoch: int) -> None:
        """Tells the schedule which epoch begins, from 0; starting one again draws the same phase.

        Raises:
            ValueError: The epoch is negative.

        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        self._epoch = epoch
        self.weighting.start_epoch(epoch)

    def step(
        self, closure: Closure | Sequence[Closure], tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """One training step: Phase 1, an optimizer step a task; Phase 2, one for all.

        The gradients of all parameters in the optimizer are set to None first, so what belongs to
        a task that takes no part is not touched, by momentum or weight decay either.

        Args:
            closure: Called with a task, which is active in the trunk meanwhile; runs the network on
                a batch and returns the loss, a scalar. Or a sequence of closures, one for each
                micro-batch: their losses and gradients add up (divide by their number for a mean).
            tasks: Those that this batch has labels for; all by default. The order of Phase 1.

        Returns:
            The loss of each task, detached and unweighted.

        Raises:
            ValueError: `tasks` does not fit, the loss is not a scalar or has no graph, or a trunk
                without a prioritized layer meets a method that needs one.
            TypeError: The closure did not return a tensor.

            Whatever is raised, also by the closure: parameters, gradients and running statistics
            are as they were before the step, or in Phase 1 before the update of that task.

        """
        closures = [closure] if callable(closure) else list(closure)
        if not closures:
            raise ValueError("closure must be a function or a sequence of them, got none")
        chosen = self._chosen(tasks)
        losses: dict[str, Tensor] = {}
        with record_function("cs_kernels.step"):
            if self.phase == 1:
                for task in chosen:
                    with self._restored_on_error([task]):
                        losses[task] = self._backward(task, closures)
                    self._optimizer_step()
            else:
                with self._restored_on_error(chosen):
                    for task in chosen:
                        losses[task] = self._backward(task, closures)
                        self._collect(task, losses[task])
                    self._combine()
                self._optimizer_step()
        self._steps += 1
        self.weighting.observe(losses)
        return losses

    def backward(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The joint update of losses that come from one forward pass, into `.grad`.

        For networks without task-specific normalization: one forward pass for all tasks, a backward
        pass a task, of which the last frees the graph. The trunk's `.grad` is then the update, a
        head's the gradient of its own loss; the torch optimizer (or the scaler) makes the step. All
        gradients in the optimizer are set to None first. Beside the graph, memory holds the K
        gradients of the shared parameters and one update.

        Args:
            losses: A scalar with a graph for each task, or for those that this batch has labels
                for.

        Returns:
            The losses, detached.

        Raises:
            ValueError: A task is unknown, a loss is not a scalar or has no graph, or the method
                needs task-specific normalization.
            TypeError: A loss is not a tensor.
            RuntimeError: The schedule is in Phase 1, which takes a forward pass a task.

            Whatever is raised: gradients are as they were before.

        """
        chosen = self._chosen(list(losses))
        for task in chosen:
            checked_loss(losses[task], task)
        if self.method.prioritizes:
            raise ValueError(
                f"method must work without task-specific normalization for backward, got"
                f" {self.method!r}: use step"
            )
        if self.phase == 1:
            raise RuntimeError(
                f"backward makes joint updates, but {self.schedule!r} is in Phase 1: use step"
            )
        with record_function("cs_kernels.backward"), self._restored_on_error(chosen):
            weighted = {task: self._weighted(task, losses[task]) for task in chosen}
            if self.method.separate_gradients:
                for task in chosen:
                    weighted[task].backward(  # type: ignore[no-untyped-call]
                        retain_graph=task != chosen[-1]
                    )
                    self._collect(task, losses[task])
            else:
                torch.autograd.backward(list(weighted.values()))
            self._combine()
        self._steps += 1
        detached = {task: losses[task].detach() for task in chosen}
        self.weighting.observe(detached)
        return detached

    def trace(self, closure: Closure) -> Coverage:
        """Finds the prioritized layers without a step, from one forward pass a task.

        Running statistics are restored; random numbers are consumed as by any forward pass.

        Args:
            closure: As in `step`; only the forward pass counts.

        Returns:
            `coverage()`.

        """
        with self._statistics.restored(self.tasks), torch.no_grad():
            for task in self.tasks:
                with active(self._norms, task), self._followers.watch():
                    closure(task)
                self._watched.add(task)
        self._layout = None
        return self.coverage()

    def coverage(self) -> Coverage:
        """Which shared parameters are prioritized, which get the plain sum, and why.

        Raises:
            RuntimeError: No forward pass has been seen yet.

        """
        self._check_watched()
        return self._current_layout().coverage

    def priority(self) -> dict[str, Tensor]:
        """The top-priority task of every output channel, from the present weights and statistics.

        Returns:
            By name of the layer, int64 [O]: an index into `tasks`.

        Raises:
            RuntimeError: No forward pass has been seen yet.

        """
        self._check_watched()
        with torch.no_grad():
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

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the states of the network and of the torch optimizer."""
        return {
            "tasks": list(self.tasks),
            "epoch": self._epoch,
            "steps": self._steps,
            "method": self.method.state_dict(),
            "weighting": self.weighting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`.

        Raises:
            ValueError: It is of other tasks.

        """
        if list(state["tasks"]) != list(self.tasks):
            raise ValueError(f"state must be of tasks {list(self.tasks)}, got {state['tasks']}")
        self._epoch = state["epoch"]
        self._steps = state["steps"]
        self.method.load_state_dict(state["method"])
        self.weighting.load_state_dict(state["weighting"])

    def _chosen(self, tasks: Sequence[str] | None) -> tuple[str, ...]:
        if tasks is None:
            return self.tasks
        chosen = check_tasks(tasks)
        for task in chosen:
            if task not in self.tasks:
                raise ValueError(f"tasks must be among {list(self.tasks)}, got {task!r}")
        return chosen

    def _backward(self, task: str, closures: Sequence[Closure]) -> Tensor:
        """The forward and backward passes of one task; its gradients are in `.grad` then."""
        total: Tensor | None = None
        # Active in the backward pass too: a checkpointed trunk runs again there.
        with active(self._norms, task):
            for closure in closures:
                loss = self._forward(task, closure)
                self._weighted(task, loss).backward()  # type: ignore[no-untyped-call]
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _weighted(self, task: str, loss: Tensor) -> Tensor:
        weighted = self.weighting.weigh(task, loss)
        return weighted if self.scaler is None else self.scaler.scale(weighted)

    def _collect(self, task: str, loss: Tensor) -> None:
        """The gradients of one task, out of `.grad`."""
        if self.method.separate_gradients:
            with record_function("cs_kernels.collect"), torch.no_grad():
                weighted = self.weighting.weigh(task, loss)
                self._gradients.collect(self.tasks.index(task), weighted)

    def _combine(self) -> None:
        """The update, into `.grad`."""
        with record_function("cs_kernels.surgery"), torch.no_grad():
            if self.scaler is not None and self.scaler.is_enabled():
                self._gradients.loss_scale = self.scaler.scale(
                    torch.ones((), device=self._device())
                )
            self.method.combine(self._gradients, self._current_layout())

    def _device(self) -> torch.device:
        return self._gradients.parameters[0].device

    def _forward(self, task: str, closure: Closure) -> Tensor:
        if task in self._watched:
            return checked_loss(closure(task), task)
        # The first pass of each task also shows which normalization follows which layer.
        with self._followers.watch():
            loss = checked_loss(closure(task), task)
        self._watched.add(task)
        self._layout = None
        if self.method.prioritizes:
            self._check_covered()
        return loss

    def _check_watched(self) -> None:
        if not self._watched:
            raise RuntimeError(
                "which layers are prioritized is seen in a forward pass: call step or trace first"
            )

    def _current_layout(self) -> Layout:
        if self._layout is None:
            self._layout = find_layout(
                self.trunk, self.tasks, self._followers.norms, self._overrides
            )
        return self._layout

    def _check_covered(self) -> None:
        layout = self._current_layout()
        if not layout.layers:
            self._watched.clear()
            raise ValueError(
                f"trunk must have a layer whose output goes to a task-specific normalization for"
                f" {self.method!r}; {layout.coverage}"
            )

    @contextlib.contextmanager
    def _restored_on_error(self, tasks: Sequence[str]) -> Iterator[None]:
        """Begins with every gradient None; if anything is raised, all is as it was before."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [parameter.grad for parameter in parameters]
        with self._statistics.restored_on_error(tasks):
            try:
                for parameter in parameters:
                    parameter.grad = None
                yield
            except BaseException:
                self._gradients.clear()
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = grad
                raise

    def _optimizer_step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
