"""From a task's loss to its gradients: the check of its graph, its weight, its backward pass."""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from cs_kernels.engine.pass_checks import PassChecks
from cs_kernels.engine.task_weights import OnePass, at_leaves, find_one_pass
from cs_kernels.errors import described, first_of
from cs_kernels.ranks.strategy import Ranks
from cs_kernels.step import Step
from cs_kernels.torch_internals.autograd import (
    has_early_hooks,
    has_hooks,
    hooked,
    reached_parameters,
)
from cs_kernels.torch_internals.fsdp import (
    all_sharded_modules,
    is_sharded,
    modules_that_shard,
    sharded_parameters,
)
from cs_kernels.torch_internals.memory import is_in_foreign_memory
from cs_kernels.trunk.trunk import Trunk
from cs_kernels.weightings import Weighting

Backward = Callable[..., object]

_CHECKED_EVERY = 32
"""The number of steps between two checks of graphs. `backward` does not see the modules that made
its losses, so only the graph shows that such a module was unfrozen."""


class LossGraph:
    """Checks the graph of a loss, applies the loss's weight, and runs the backward pass.

    Args:
        trunk: The shared module.
        ranks: The processes, each of which has a share of the loss.
        scaler: Scales losses, if there is one.
        backward: Runs backward passes in place of `loss.backward()`, if it is given.
        pass_checks: Watches the first pass of every task.

    """

    def __init__(
        self,
        trunk: Trunk,
        ranks: Ranks,
        scaler: torch.amp.GradScaler | None,
        backward: Backward | None,
        pass_checks: PassChecks,
    ) -> None:
        self._trunk = trunk
        self._of_trunk = set(trunk.module.parameters())
        self._modules = [*trunk.module.modules(), *modules_that_shard(trunk.shared)]
        self._ranks = ranks
        self.scaler = scaler
        self.backward = backward
        self._pass_checks = pass_checks
        self._checked: set[str] = set()
        """The tasks whose graph was checked."""
        self._known: set[str] = set()
        """The tasks that have ever reached the trunk, even if it is frozen now."""
        self._in_foreign_memory: set[nn.Parameter] = set()
        """The parameters whose gradients a later pass may overwrite."""
        self._looks_at_memory = False
        """Whether every pass is followed by a slow search for gradients in foreign memory."""
        self._hides_leaves = False
        """Whether a function may compute gradients of leaves that a checked graph does not show."""
        self._refuses_batches = False
        """Whether a batched pass has failed since the graphs were checked."""
        self.version = 0
        """Increases whenever graphs must be checked again."""

    def begin_step(self, steps: int) -> None:
        """Schedules new checks of all graphs every `_CHECKED_EVERY` steps."""
        if steps % _CHECKED_EVERY == 0:
            self.forget()

    def forget(self) -> None:
        """Schedules a new check of every task's graph, with its next loss."""
        self._checked.clear()
        self._hides_leaves = self._refuses_batches = False
        self.version += 1

    def known_scale(self) -> Tensor | None:
        """The scaler's factor, if it is known before a pass; with `backward=`, it is not."""
        if self.backward is not None or self.scaler is None or not self.scaler.is_enabled():
            return None
        return self.scaler.scale(torch.ones((), device=self._trunk.device))

    def check(
        self, task: str, loss: Tensor, *, shows_reach: bool = False, alone: bool = False
    ) -> None:
        """Checks the graph of a task's loss, unless an earlier graph of the task was checked.

        Args:
            task: The task.
            loss: Its loss.
            shows_reach: Whether only the graph shows which parameters the task reaches.
            alone: Whether the pass is for this task alone, so that hooks may compute gradients.

        Raises:
            ValueError: The loss depends on a parameter that the optimizer does not hold, or on no
                parameter of the trunk.

        """
        if task not in self._checked:
            parameters = reached_parameters(loss)
            reached = self.checked_held(task, parameters.found)
            if parameters.hidden:
                self._hides_leaves = True
                return
            if self._of_trunk.isdisjoint(reached):
                if parameters.hooked:
                    if alone:
                        return
                    raise _made_by_hook(task)
                trains = any(p.requires_grad for p in self._of_trunk)
                if trains and task not in self._known:
                    raise self._trunk.not_reached(task)
            self._known.add(task)
            if shows_reach:
                self._trunk.reach.note_graph(task, reached)

    def passed(self, *tasks: str) -> None:
        """Notes that passes of tasks with checked graphs have succeeded."""
        self._checked.update(tasks)

    def checked_held(self, task: str, reached: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters of a task's graph; for `fully_shard`, the sharded ones.

        Raises:
            ValueError: The optimizer does not hold one of them.

        """
        held, watcher = self._trunk.held(), self._trunk.watcher
        sharded = self.sharded()
        reached = [sharded.get(parameter, parameter) for parameter in reached]
        unheld = list(set(reached) - set(held))
        if unheld and any(map(is_sharded, held)):  # Heads may be unwatched.
            self._modules += [m for m in all_sharded_modules() if m not in self._modules]
            sharded = sharded_parameters(self._modules)
            reached = [sharded.get(parameter, parameter) for parameter in reached]
            unheld = list(set(reached) - set(held))
        if unheld:
            names = sorted(watcher.names_of(unheld))
            raise ValueError(
                "optimizer must hold every parameter that a loss depends on, but lacks"
                f" {first_of(names)}, on which the loss of {task!r} depends:"
                " freeze them with requires_grad_(False) if this loss only reads them, like a"
                " discriminator in the step of its generator; else add them to the optimizer"
            )
        return reached

    def sharded(self) -> dict[Tensor, nn.Parameter]:
        """Maps each unsharded parameter in a graph to the torch optimizer's sharded one."""
        return sharded_parameters((*self._modules, *self._trunk.watcher.outside))

    def weigh(self, task: str, loss: Tensor, step: Step, weighting: Weighting) -> Tensor:
        """Weights and records a loss; returns the weighted loss times this rank's share.

        Raises:
            ValueError: The weighting returned a loss without a graph.

        """
        weighted = weighting.weigh(task, loss, step)
        if not isinstance(weighted, Tensor) or not weighted.requires_grad:
            raise ValueError(
                f"weighting must return a weighted loss with a graph, got {weighted!r} from"
                f" {weighting!r} for {task!r}"
            )
        first = task not in step.losses
        step.add_loss(task, loss, weighted)
        regularizer = weighting.regularizer(task) if first else None
        weighted = weighted if regularizer is None else weighted + regularizer
        share = self._ranks.share(task)
        return weighted if share == 1 else weighted * share

    def scaled(self, weighted: Tensor) -> Tensor:
        """The loss times the scaler's factor."""
        return weighted if self.scaler is None else self.scaler.scale(weighted)

    def run_backward(
        self,
        losses: Mapping[str, Tensor],
        step: Step,
        *,
        last: bool,
        retain_graph: bool = False,
        apart: bool = False,
    ) -> None:
        """Runs one backward pass of these losses into `.grad`, or one per loss.

        Args:
            losses: By task; their gradients add up.
            step: The step of the losses.
            last: Whether this is the last pass of these tasks.
            retain_graph: Whether a pass of another task through the same graph follows.
            apart: Whether each loss gets its own pass with cached task weights, because a single
                pass would be wrong on some rank.

        """
        ends = [*losses][-1] if last else None
        self._looks_at_memory = not self._checked.issuperset(losses)
        as_made = step.kept is None and self.backward is None
        with self._pass_checks.watching(losses, as_made=as_made):
            self._backward(losses, step, ends, retain_graph, apart)

    def run_batched(
        self,
        losses: Mapping[str, Tensor],
        collect: Callable[[Sequence[str], Sequence[Tensor | None]], None],
    ) -> bool:
        """Runs the backward passes of several losses at once, with vmap.

        The first passes of a task are made one by one, because they are checked.

        Args:
            losses: By task.
            collect: Called with the tasks, and for each shared parameter with a [K, ...] tensor of
                their gradients, or None.

        Returns:
            Whether the passes were made; if not, nothing has changed.

        """
        shared = self._trunk.shared
        known = self._checked.issuperset(losses) and self._in_foreign_memory.isdisjoint(shared)
        if not known or self._refuses_batches:
            return False
        held = self._trunk.held()
        # Hooks expect one call per task, and may be unable to read a batched gradient.
        if any(map(has_hooks, held)):
            return False
        if self._hides_leaves:
            self._refuse_batches("a function in the graph may hide parameters")
            return False
        trained = [i for i, p in enumerate(shared) if p.requires_grad]
        scaled = [*map(self.scaled, losses.values())]
        of_shared: list[Tensor | None] = [None] * len(shared)
        with torch.enable_grad():
            stacked = torch.stack(scaled)
        try:
            # `torch.vmap` would be wrong for torch.cdist, and slower.
            grads = torch.autograd.grad(
                stacked,
                [shared[i] for i in trained],
                torch.eye(len(scaled), dtype=stacked.dtype, device=stacked.device),
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
        except RuntimeError as error:
            self._refuse_batches(f"a backward pass cannot run under torch.vmap: {error}")
            return False
        for i, grad in zip(trained, grads, strict=True):
            of_shared[i] = grad
        del grads
        missing = {i for i in trained if of_shared[i] is None}
        if any(missing.difference(self._trunk.reach.last_unreached(task)) for task in losses):
            return False  # The graph has changed, and may hide parameters.
        in_trunk = set(shared)
        own = [p for p in held if p.requires_grad and p not in in_trunk]
        if own:
            stacked.sum().backward(inputs=own)  # type: ignore[no-untyped-call]
            self._own_memory()
        collect([*losses], of_shared)
        return True

    def _refuse_batches(self, reason: str) -> None:
        warnings.warn(f"batched=True has no effect, because {reason}", stacklevel=7)
        self._refuses_batches = True

    def _backward(
        self,
        losses: Mapping[str, Tensor],
        step: Step,
        ends: str | None,
        retain_graph: bool,
        apart: bool,
    ) -> None:
        kept = step.kept
        if kept is None or kept.layers:  # The method applies layer weights to separate gradients.
            self._pass([*losses.values()], step, ends, retain_graph)
            return
        weights = dict(zip(kept.tasks, kept.weights.to(self._trunk.device), strict=True))
        found = None if apart or len(losses) == 1 else self._find_one_pass(losses)
        if found is not None:
            with hooked(found.hooks(weights)):
                self._pass(found.terms(losses, weights), step, ends)
            return
        shared = self._in_graph(self._trunk.combined())
        for n, (task, loss) in enumerate(losses.items(), 1):
            more, arrived = n < len(losses), set[Tensor]()
            with (
                self._all_weighted(task, arrived),
                hooked(at_leaves(shared, weights[task], arrived)),
            ):
                self._pass([loss], step, None if more else ends, retain_graph or more)

    @contextlib.contextmanager
    def _all_weighted(self, task: str, arrived: Set[Tensor]) -> Iterator[None]:
        """Wraps a pass with cached task weights.

        Raises:
            RuntimeError: A gradient has reached `.grad` unweighted, because no hook saw it.

        """
        parameters = [] if self._ranks.is_distributed else self._trunk.combined()
        before = [(p.grad, None if p.grad is None else p.grad._version) for p in parameters]
        yield
        # `_own_memory` copies gradients in foreign memory after every pass.
        explained = arrived | self._in_foreign_memory
        for p, (grad, version) in zip(parameters, before, strict=True):
            now = p.grad
            same = now is grad and (now is None or now._version == version)
            if not same and p not in explained:
                names: dict[Tensor, str]
                names = dict(zip(self._trunk.shared, self._trunk.names, strict=True))
                raise RuntimeError(
                    f"update_every must be 1 because a function in the backward pass of {task!r}"
                    f" writes the gradient of {names[p]} into .grad itself, where kept task weights"
                    " cannot weight it: return it from the function's backward, or use"
                    " update_every=1"
                )

    def passes(self, losses: Mapping[str, Tensor]) -> int:
        """The number of backward passes that these losses need with kept task weights."""
        return 1 if len(losses) < 2 or self._find_one_pass(losses) is not None else len(losses)

    def _find_one_pass(self, losses: Mapping[str, Tensor]) -> OnePass | None:
        combined = self._trunk.combined()
        # Leaves out shared parameters that no task has ever reached: no graph hides them.
        held = (set(self._trunk.held()) - set(self._trunk.shared)) | set(combined)
        return find_one_pass(
            losses,
            self._in_graph(combined),
            self._in_graph(held),
            trusts_functions=not self._pass_checks.enabled,
        )

    def _pass(
        self, terms: Sequence[Tensor], step: Step, ends: str | None, retain_graph: bool = False
    ) -> None:
        """Runs one backward pass of the sum of `terms`: the last pass of task `ends`, if given."""
        weighted = terms[0]
        if len(terms) > 1:
            with torch.enable_grad():
                weighted = sum(terms[1:], weighted)
        if ends is not None:
            self._ranks.last_backward(ends)
        self._ranks.before_backward(retains=retain_graph)
        if self.backward is None:
            self.scaled(weighted).backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph
            )
            self._own_memory()
            return
        # A custom `backward` may scale the loss: the probe's gradient is then the factor.
        probe = torch.zeros((), device=weighted.device, requires_grad=True)
        weighted = weighted + probe
        loss = self.scaled(weighted)
        # The probe's hook runs before any layer's backward pass.
        if step.loss_scale is None:
            probe.register_hook(  # type: ignore[no-untyped-call]
                lambda factor: setattr(step, "loss_scale", factor)
            )
        self.backward(loss, **({"retain_graph": True} if retain_graph else {}))
        self._own_memory()

    def _own_memory(self) -> None:
        """Copies gradients that a later pass may overwrite; `Ranks` does so in distributed runs."""
        if self._ranks.is_distributed:
            return
        if self._looks_at_memory:
            grads = ((p, p.grad) for p in self._trunk.held())
            found = {p for p, grad in grads if grad is not None and is_in_foreign_memory(grad)}
            self._in_foreign_memory |= found
        for parameter in self._in_foreign_memory:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _in_graph(self, parameters: Collection[nn.Parameter]) -> set[Tensor]:
        """Parameters as they appear in graphs: unsharded instead of sharded."""
        if not any(map(is_sharded, parameters)):
            return set(parameters)
        whole = {shard: p for p, shard in self.sharded().items()}
        return {whole.get(p, p) for p in parameters}


def checked_loss(
    loss: object,
    task: str,
    source: str = "closure must return",
    without: str = "pass only the others: step(closure, tasks=[...])",
) -> Tensor:
    """Checks that a loss is one floating-point number with a graph; returns it as a scalar.

    Args:
        loss: The loss.
        task: Its task.
        source: The beginning of an error message.
        without: The message's advice for a batch without labels.

    """
    if not isinstance(loss, Tensor):
        inner = ": take its .loss" if isinstance(getattr(loss, "loss", None), Tensor) else ""
        raise TypeError(f"{source} a tensor, got {type(loss).__name__} for {task!r}{inner}")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"{source} a floating-point scalar, got a {loss.dtype} tensor of shape"
            f" {tuple(loss.shape)} for {task!r}"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{source} a loss with a graph, got {loss} for {task!r}: this loss was detached or"
            f" computed without gradients. If the batch has no labels for the task, {without}"
        )
    return loss if loss.dim() == 0 else loss.reshape(())


def checked_losses(losses: object) -> dict[str, Tensor]:
    """Checks the argument `losses`, and returns the loss of each task."""
    if not isinstance(losses, Mapping):
        hint = ": with a closure, call step(closure)" if callable(losses) else ""
        raise TypeError(f"losses must be a mapping {{task: loss}}, got {described(losses)}{hint}")
    checked = {
        task: checked_loss(loss, task, "losses must hold", "leave it out")
        for task, loss in losses.items()
    }
    for task, loss in checked.items():
        if loss.is_leaf and has_early_hooks(loss):
            raise _made_by_hook(task)
    return checked


def _made_by_hook(task: str) -> ValueError:
    return ValueError(
        f"losses must have a graph to the trunk, but the loss of {task!r} gets its gradient from a"
        " hook on a leaf, as cached contrastive losses do: use step(closure), which makes a pass"
        " per task"
    )
