"""GradientBalancer: task weights for your own training loop, with plain training's memory."""

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs_kernels.balancing.arguments import (
    check_agreement,
    checked_method,
    checked_parameters,
    checked_size,
    groups_of,
    torch_optimizer,
)
from cs_kernels.balancing.arrivals import Arrivals, Blocks, StepEnd, release
from cs_kernels.balancing.one_graph import OneGraph
from cs_kernels.balancing.products import Products
from cs_kernels.balancing.sketches import Sketches
from cs_kernels.balancing.weighting import factors, update_of, weigh
from cs_kernels.engine.loss_graph import checked_losses
from cs_kernels.methods import Method, Sum
from cs_kernels.monitor.balance import BalanceReport
from cs_kernels.ops.random import splitmix64
from cs_kernels.options import check_scaler, checked_integer, checked_seed, checked_tasks
from cs_kernels.stateful import check_names
from cs_kernels.step import Step

_open: "weakref.WeakSet[GradientBalancer]" = weakref.WeakSet()
"""All balancers that are not closed."""


class GradientBalancer:
    """Multiplies each task's gradients by a task weight as they arrive in `.grad`.

    A method computes the weights from the gradients of the previous step; the first step is the
    plain sum. The method sees dot products that are estimated from sketches, so no gradient is
    stored: memory and communication are plain training's, plus K sketches. You keep your loop, your
    backward passes and your optimizer:

        balancer = cs.GradientBalancer(trunk.parameters(), tasks, cs.UPGrad(), adam)
        for task, batch in micro_batches:
            with balancer.task(task):
                loss_of(task, batch).backward()
        adam.step()

    Use `MultiTaskOptimizer` for weights from the same step's gradients, exact products, connection
    strength and Phase 1.

    Args:
        parameters: The shared parameters, or pairs of names and parameters. Gradients of all other
            parameters are unchanged.
        tasks: The names of the tasks, without dots.
        method: A Gramian method, or `Sum()`, which changes no gradient but makes reports possible.
            With groups="layer", each module has its own products and weights, and `parameters`
            needs names. Default: `UPGrad()`.
        optimizer: The optimizer whose `step` ends a step of the balancer; Accelerate's or
            Lightning's wrapper works too. Without one, call `update`.
        sketch: The number of elements of a sketch, a power of two in [256, 2^30]. A cosine's
            standard error is about 1 / sqrt(sketch).
        every: One step in `every` makes sketches and solves for weights. Its place in the interval
            is random, but the same on all ranks and in a resumed run.
        process_group: The ranks that train the same parameters, each on its own batches. Default:
            the mesh of the parameters after `fully_shard`; otherwise all ranks, as for
            DistributedDataParallel.
        scaler: The `torch.amp.GradScaler` that scales the losses, if any. If you call `update`,
            call it before `scaler.update()`.
        seed: The seed of the sketches' signs and bins, in [0, 2^63).
        check_passes: Whether `backward` checks, for each new combination of tasks, that passes
            through one graph are repeatable.

    Raises:
        ValueError: An argument does not fit; the message names it and quotes the value.
        TypeError: An argument has the wrong type.

    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter | tuple[str, nn.Parameter]],
        tasks: Iterable[str],
        method: Method | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sketch: int = 65536,
        every: int = 1,
        process_group: "dist.ProcessGroup | None" = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        check_passes: bool = True,
    ) -> None:
        self.tasks = checked_tasks(tasks)
        self._method, self._weights_of = checked_method(method, self.tasks)
        self.every = checked_integer("every", every, 1)
        check_scaler(scaler)
        self.scaler = scaler
        inner = torch_optimizer(optimizer)
        by_layer = self._weights_of.groups == "layer"
        self._named = checked_parameters(parameters, needs_names=by_layer)
        self._parameters = [p for _, p in self._named]
        self._check_free()
        size = checked_size(sketch)
        self._groups, self._ranks = groups_of(self._parameters, process_group)
        shapes = [tuple(p.shape) for p in self._parameters]
        check_agreement(self._groups, (self.tasks, repr(self.method), every, size, seed, shapes))
        self._arguments = {
            "sketch": size,
            "every": every,
            "scaler": scaler,
            "seed": seed,
            "check_passes": check_passes,
        }
        self._one_graph = OneGraph(self._named, optimizer, checks=check_passes)
        self.optimizer = optimizer
        modules = [name.rpartition(".")[0] if by_layer else "" for name, _ in self._named]
        numbers = {module: n for n, module in enumerate(dict.fromkeys(modules))}
        self._module_of = [numbers[module] for module in modules]
        self._layers = tuple(numbers) if by_layer else ()
        device = self._parameters[0].device
        real = [(*p.shape, 2) if p.is_complex() else tuple(p.shape) for p in self._parameters]
        self._reached: set[int] = set()
        """The indices of the parameters that tasks have reached in this step."""
        self._sketches = Sketches(
            len(self.tasks), real, self._module_of, size, device, checked_seed(seed), self._reached
        )
        self._products = Products(len(self._sketches.sizes), len(self.tasks), device)
        self._use_weights(None)
        self._steps = 0
        self._active: int | None = None
        """The index of the task whose `with` block is open."""
        self._factors: Sequence[Tensor | float] = ()
        """The active task's weights, by module; empty before the first solve."""
        self._sketching = False
        """Whether the open `with` block adds its gradients to the sketches."""
        self._arrived = False
        """Whether a gradient has arrived in the open `with` block."""
        self._warned: set[str] = set()
        self._blocks = Blocks()
        self._kept: dict[int, nn.Parameter] = {}
        """The reached parameters whose `.grad` was not None after a `with` block, by index."""
        self._with_loss: set[str] = set()
        """The tasks whose last `with` block on this rank was given a loss."""
        self._hooks = Arrivals(self._parameters, self, GradientBalancer._take, self._sketches)
        end = StepEnd(weakref.WeakMethod(self._end_step))
        handle = None if inner is None else inner.register_step_post_hook(end)
        self._release = weakref.finalize(self, release, self._hooks, handle)
        _open.add(self)

    # --- a step ---

    @contextlib.contextmanager
    def task(self, task: str, loss: Tensor | None = None) -> Iterator[None]:
        """Wraps the backward passes of one task, and optionally its forward passes.

        The gradients of several `with` blocks, such as one per micro-batch, add up. Gradients that
        arrive outside any block have the weight 1. If a block raises, this step does not change the
        task weights.

        Args:
            task: The task.
            loss: Its loss, for methods that read it, such as `DBMTL`.

        Raises:
            ValueError: The task is unknown.
            RuntimeError: Another `with` block of a task is open, or the balancer is closed.

        """
        if task not in self.tasks:
            raise ValueError(f"task must be one of {list(self.tasks)}, got {task!r}")
        if self._active is not None:
            raise RuntimeError(
                f"task({task!r}) must not be inside task({self.tasks[self._active]!r})"
            )
        self._check_open()
        self._hooks.connect()
        self._blocks.open()
        index = self.tasks.index(task)
        self._factors = self._factors_of[index]
        self._sketching = self._solves
        if self._sketching:
            self._sketches.open(index)
        self._active, self._arrived = index, False
        try:
            yield
            if loss is None:
                self._with_loss.discard(task)
            elif self._solves:
                self._sketches.add_loss(self._active, loss)
                self._with_loss.add(task)
        except BaseException:
            if self._arrived:  # Otherwise, the block has left nothing in `.grad`.
                self._sketches.spoil()
            raise
        finally:
            self._active = None
            self._sketches.close_hooks()
            self._kept.update(self._hooks.left_in_grad(self._reached))
        if not self._arrived and task not in self._warned:
            self._warned.add(task)
            if any(p.requires_grad for p in self._parameters):
                warnings.warn(
                    f"no gradient of the parameters has arrived for task {task!r}: its backward"
                    " pass must run inside the task's with block or in backward(losses), and reach"
                    " parameters of the balancer; if they were replaced since it was built, build a"
                    " new one",
                    stacklevel=3,
                )

    def backward(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the backward passes of losses that come from one forward pass.

        Steps that solve for weights make one pass per task. With `every` above 1, the steps in
        between make a single weighted pass if it gives the same gradients.

        Args:
            losses: A scalar with a graph for each task that the batch has labels for.

        Returns:
            The losses, detached.

        Raises:
            ValueError: A task is unknown, or a loss is not a scalar with a graph.
            RuntimeError: There is more than one rank, where each task needs its own forward pass; a
                pass is not repeatable; a `with` block of a task is open; or the balancer is closed.

        """
        given = checked_losses(losses)
        if not given:
            raise ValueError("losses must hold the loss of at least one task, got {}")
        for task in given:
            if task not in self.tasks:
                raise ValueError(f"losses must only have keys of {list(self.tasks)}, got {task!r}")
        self._check_open()
        if self._active is not None:
            raise RuntimeError(
                f"backward(losses) must not be inside task({self.tasks[self._active]!r})"
            )
        if self._ranks > 1:
            raise RuntimeError(
                f"backward(losses) must run in one process, got {self._ranks} ranks: use a forward"
                " pass and task(...) per task, with no_sync() for all but a step's last task"
            )
        self._one_graph.check(given)
        between = not (self._solves or self._layers) and len(given) > 1
        if between and self._one_graph.one_pass(given, self.weights):
            self._blocks.open()
            return {task: loss.detach() for task, loss in given.items()}
        *_, last = given
        for task, loss in given.items():
            with self.task(task, loss):
                loss.backward(retain_graph=task != last)  # type: ignore[no-untyped-call]
        return {task: loss.detach() for task, loss in given.items()}

    def update(self) -> None:
        """Ends a step of a balancer without `optimizer`; call this on all ranks.

        In steps that `every` selects, it solves for the task weights of the next step.

        Raises:
            RuntimeError: The balancer has an optimizer, whose `step` ends the step; a `with` block
                of a task is open; or the balancer is closed.
            ValueError: The method reads losses, and `task` was not given them.

        """
        if self.optimizer is not None:
            raise RuntimeError(
                "update() must not be called with optimizer=, got"
                f" {type(self.optimizer).__name__}: its step ends the balancer's step"
            )
        self._end_step()

    # --- results and state ---

    @property
    def method(self) -> Method:
        """The method; to use another one, build another balancer."""
        return self._method

    @property
    def weights(self) -> dict[str, Tensor]:
        """The next step's task weights, by task: scalars, or [modules] with groups="layer"."""
        rows = self._all_weights().unbind(-1)
        return {
            task: row.clone() if self._layers else row[0].clone()
            for task, row in zip(self.tasks, rows, strict=True)
        }

    @property
    def gramian(self) -> Tensor:
        """The estimated dot products, float64 [K, K] or [modules, K, K]: `report().gramian`."""
        return self.report().gramian

    def report(self) -> BalanceReport:
        """The norms, cosines and conflicts of the tasks' gradients, and the weights."""
        products = self._products

        def shown(tensor: Tensor) -> Tensor:
            return tensor.clone() if self._layers else tensor[0].clone()

        return BalanceReport(
            step=self._steps,
            method=repr(self.method),
            tasks=self.tasks,
            layers=self._layers,
            gramian=shown(products.gramian),
            weights=shown(self._all_weights()),
            together=shown(products.together),
            finite_tasks=products.finite.clone(),
            counts=products.counts.clone(),
            steps=products.steps.clone(),
            _variance=self._sketches.variances(),
        )

    def close(self) -> None:
        """Removes all hooks; from then on, gradients arrive unweighted."""
        self._release()
        _open.discard(self)

    def state_dict(self) -> dict[str, Any]:
        """The weights, the products and the method's state; call this between two steps."""
        return {
            "tasks": self.tasks,
            "layers": self._layers,
            "steps": self._steps,
            "weights": None if self._weights is None else self._weights.clone(),
            "products": self._products.state_dict(),
            "method": {"name": type(self.method).__name__, "state": self.method.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`; an invalid state changes nothing.

        Raises:
            ValueError: The state has other tasks or modules, another method, or invalid tensors.

        """
        try:
            self._check_state(state)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"state must be a state_dict with valid values, but reading it raised {error!r}"
            ) from error
        self.method.load_state_dict(state["method"]["state"])
        self._products.load_state_dict(state["products"])
        weights, device = state["weights"], self._products.gramian.device
        self._use_weights(None if weights is None else weights.clone().to(device, torch.float64))
        self._with_loss = {
            task
            for task, loss in zip(self.tasks, self._products.losses, strict=True)
            if loss == loss
        }
        self._steps = int(state["steps"])
        self._restart()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_names(state, self.state_dict())
        check_names(state["method"], ("name", "state"))
        for name, own in (("tasks", self.tasks), ("layers", self._layers)):
            if tuple(state[name]) != own:
                raise ValueError(f"state must have {name} {list(own)}, got {list(state[name])}")
        method, found = type(self.method).__name__, state["method"]["name"]
        if found != method:
            raise ValueError(f"state must be for method {method}, got one for {found}")
        checked_integer("steps", state["steps"], 0, 1 << 63)
        weights = state["weights"]
        shape = tuple(self._products.gramian.shape[:2])
        if weights is not None and (weights.shape != shape or not weights.isfinite().all()):
            raise ValueError(
                f"state must have finite weights of shape (modules, tasks) = {shape}, got {weights}"
            )
        self.method.check_state(state["method"]["state"], self.tasks)
        self._products.check_state(state["products"])

    def __getstate__(self) -> dict[str, Any]:
        """The arguments and the state, for copies and pickles.

        Raises:
            TypeError: There is more than one rank.

        """
        if self._ranks > 1:
            raise TypeError(
                f"GradientBalancer must be in one process to be copied or pickled, got"
                f" {self._ranks} ranks: save its state_dict()"
            )
        given = self._named, self.tasks, self.method, self.optimizer
        return {"given": given, "options": self._arguments, "state": self.state_dict()}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Builds the copy from the copied parameters and optimizer."""
        GradientBalancer.__init__(self, *saved["given"], **saved["options"])
        self.load_state_dict(saved["state"])

    def __repr__(self) -> str:
        numel = sum(p.numel() for p in self._parameters)
        return (
            f"GradientBalancer({len(self._parameters)} parameters of {numel} elements,"
            f" tasks={list(self.tasks)}, method={self.method!r}, every={self.every})"
        )

    # --- internals ---

    @property
    def _solves(self) -> bool:
        """Whether this step solves for weights; all steps do until each task has had a gradient.

        From then on, one step in `every` does. Its place in the interval is random, so that tasks
        which take turns, with any period, are all read.
        """
        interval, place = divmod(self._steps, self.every)
        return place == splitmix64(interval) * self.every >> 64 or not self._products.all_known

    def _end_step(self) -> None:
        """Ends a step, and solves for the next one's task weights if this step reads gradients."""
        if self._active is not None:
            raise RuntimeError(
                f"the end of a step must not be inside task({self.tasks[self._active]!r}): call the"
                " optimizer's step, or update(), after the with block"
            )
        self._check_open()
        if self._solves:
            self._sketches.average(self._groups, self._ranks)
        try:
            if self._solves:
                self._solve()
        finally:
            self._steps += 1
            self._restart()
            self._blocks.end_step()

    def _restart(self) -> None:
        """Drops the sketches of this step, and begins new ones."""
        self._reached.clear()
        self._kept.clear()
        self._sketches.begin(self._steps)

    def _notice_drop(self, kept: Iterable[nn.Parameter]) -> None:
        """If the loop has set one of these `.grad` to None, the step's earlier passes are gone."""
        if any(p.grad is None for p in kept):
            self._restart()
            self._blocks.drop(sum(p._version for p in self._parameters))

    def _check_free(self) -> None:
        """Raises ValueError if another open balancer has one of the parameters."""
        own = {p: name for name, p in self._named}
        for other in _open:
            taken = [own[p] for p in other._parameters if p in own]
            if taken:
                raise ValueError(
                    f"parameters must have no other GradientBalancer, got parameter {taken[0]} of"
                    f" {other!r}: close() the other balancer first"
                )

    def _check_open(self) -> None:
        if not self._release.alive:
            raise RuntimeError("this GradientBalancer is closed: build a new one")

    def _use_weights(self, weights: Tensor | None) -> None:
        """Sets the task weights.

        Args:
            weights: Float64 [modules, K]; None, for weights of 1, before the first solve and with
                `Sum()`.

        """
        self._weights = weights
        self._factors_of = [()] * len(self.tasks) if weights is None else factors(weights)

    def _all_weights(self) -> Tensor:
        like = self._products.gramian
        return like.new_ones(like.shape[:2]) if self._weights is None else self._weights

    def _take(
        self, parameter: int, grads: tuple[Tensor | None, ...], leaf: Tensor
    ) -> tuple[Tensor | None] | None:
        """Sketches a gradient on its way to `.grad` and weights it; see `Take`."""
        # Until `update_of` has counted the gradient's references, no variable may hold one.
        if grads[0] is None:
            return None
        if self._active is None:
            self._notice_drop([self._kept[parameter]] if parameter in self._kept else [])
            return None
        if not self._arrived:
            self._arrived = True
            self._notice_drop(self._kept.values())
            if self._sketching:
                self._sketches.open_hooks(self._factors)
        self._reached.add(parameter)
        factor = self._factors[self._module_of[parameter]] if self._factors else None
        update, adds = None, False
        # With `create_graph=True`, the graph needs the unweighted gradient.
        if factor is not None and type(grads[0]) is Tensor and not torch.is_grad_enabled():
            update, adds = update_of(grads, leaf)
        grad = grads[0]
        if self._sketching:
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"gradients of the parameters must be dense, got {grad.layout} for parameter"
                    f" {self._named[parameter][0]}: leave this parameter out"
                )
            weight = 1.0 if factor is None else factor
            if self._sketches.add(parameter, grad, update, weight, adds=adds):
                return (None,) if adds else None
        if factor is None:
            return None
        result = weigh(grad, factor, update, adds=adds)
        return (None if adds else result,)

    def _solve(self) -> None:
        products, losses = self._sketches.products(), self._sketches.losses
        if self.scaler is not None and self.scaler.is_enabled():
            scale = self.scaler.scale(torch.ones((), device=products.device))
            products, losses = products / scale.double() ** 2, losses / scale
        gramian = self._products.add(products, losses)
        known = self._products.known()
        if isinstance(self.method, Sum) or not known:
            return
        tasks = tuple(self.tasks[i] for i in known)
        all_known = len(known) == len(self.tasks)  # Indexing would synchronize with a GPU.
        chosen = gramian if all_known else gramian[:, known][:, :, known]
        solved = self._solved(chosen if self._layers else chosen[0], tasks)
        before = self._all_weights()
        weights = solved.to(before).reshape(-1, len(known))
        if not all_known:
            weights, chosen_weights = before.clone(), weights
            weights[:, known] = chosen_weights
        solved_for = self._products.usable & weights.isfinite().all()
        self._use_weights(torch.where(solved_for, weights, before))

    def _solved(self, gramian: Tensor, tasks: tuple[str, ...]) -> Tensor:
        """The method's task weights; `step.losses` has only the tasks in `_with_loss`."""
        rows = {task: self._products.losses[self.tasks.index(task)] for task in tasks}
        losses = {task: loss for task, loss in rows.items() if task in self._with_loss}
        step = Step(self._steps, tasks, losses, losses, layers=self._layers)
        try:
            return self._weights_of.weights(gramian, step)
        except KeyError as error:  # Another rank may have had the loss.
            missing = [task for task in tasks if task not in losses]
            if self._ranks > 1:
                missing = [task for task in missing if bool(rows[task].isnan())]
            if missing:
                raise ValueError(
                    f"{self.method!r} needs the losses, but {missing} have none: call"
                    " task(name, loss)"
                ) from error
            self._with_loss.update(tasks)
            step = Step(self._steps, tasks, rows, rows, layers=self._layers)
            return self._weights_of.weights(gramian, step)
