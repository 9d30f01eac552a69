"""The gradients of the shared parameters, K x N, collected from `.grad`.

If `.grad` is None, autograd puts its own buffer there, so a task's row takes the tensors that the
backward pass has left in `.grad`: nothing is copied or added. An elementwise operator overwrites a
task's gradient with the update, which becomes `.grad`, so a step holds only K gradients. Other
updates are written into buffers that are reused in every step. Methods see a complex gradient as
pairs of real numbers, so that dot products are real inner products.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from cs_kernels.ops.aliases import Grads
from cs_kernels.ops.operands import misfits
from cs_kernels.trunk.layers import LayerLists
from cs_kernels.trunk.reach import Reach


def as_real(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as pairs of real numbers, [..., 2]; other tensors unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def owned(grad: Tensor) -> Tensor:
    """The gradient, or a copy if it is a view, which would keep a larger tensor in memory."""
    return grad if grad._base is None else grad.clone()


def moved(tensor: Tensor, device: str | None) -> Tensor:
    """The tensor, or a page-locked host copy if `device` is given and differs from the tensor's."""
    if device is None or tensor.device.type == device:
        return tensor
    kept = torch.empty_like(tensor, device=device, pin_memory=True)
    return kept.copy_(tensor)


class Storage:
    """The buffers of the updates, and the methods' computations, in a single process.

    The strategies for several ranks, each with a shard of every gradient, inherit from it.

    Args:
        parameters: The parameters, in the order of the rows.

    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._updates: list[Tensor | None] = [None] * len(parameters)
        """The buffer of each parameter's update; None until it is needed."""
        self._reuses_updates = True
        """Whether the buffers are reused in the next step."""

    # --- the update ---

    def update_shards(self, parameters: Sequence[int], over: Grads | None = None) -> list[Tensor]:
        """The buffers for this process's shards of these parameters' updates.

        Args:
            parameters: The indices of the parameters.
            over: A gradient per parameter that its update may overwrite, or None.

        """
        likes = [*map(self.parameters.__getitem__, parameters)]
        updates = [*(map(self._updates.__getitem__, parameters) if over is None else over)]
        # Replaces a buffer if it is missing, or if its parameter or `.grad` was moved or cast.
        for n in misfits(updates, likes):
            updates[n] = torch.empty_like(likes[n], requires_grad=False)
        for i, update in zip(parameters, updates, strict=True):
            self._updates[i] = update
        self._reuses_updates = over is None
        return cast("list[Tensor]", updates)

    def free_updates(self) -> None:
        """Frees the buffers of the updates."""
        self._updates = [None] * len(self.parameters)

    def release_own(self, gradients: "TaskGradients") -> None:
        """Moves the gradients of every task's own parameters from the rows to `.grad`."""
        for i, task in gradients.reach.owners().items():
            row = gradients.row_of(task)
            grad = row[i]
            if grad is not None:
                self.parameters[i].grad, row[i] = owned(grad), None

    def assign(self, parameters: Sequence[int]) -> None:
        """Assigns these parameters' written updates to their `.grad`, now or in `publish`."""
        for i in parameters:
            update = self._updates[i]
            if update is not None and update._base is not None:  # Saves a call per gradient.
                update = owned(update)
            self.parameters[i].grad = update
            if not self._reuses_updates:
                self._updates[i] = None

    def publish(self) -> None:
        """Ends the update; all ranks call it together."""
        if not self._reuses_updates:
            self.free_updates()

    def lend(self, parameter: int, grad: Tensor) -> Tensor:
        """A tensor for a parameter's `.grad` while its gradients wait in the rows."""
        del parameter
        return grad

    # --- gradients that are kept between steps ---

    def keep(
        self, task: str, row: Sequence[Tensor | None], device: str | None
    ) -> list[Tensor | None]:
        """A row to keep for later steps: whole gradients, or this rank's shards (`fully_shard`).

        All ranks call this together.

        Args:
            task: The task.
            row: Its row.
            device: "cpu" for page-locked host memory; None for the gradients' device.

        """
        del task
        return [None if grad is None else moved(owned(grad), device) for grad in row]

    def anchor(self, kept: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Converts a kept row to the parameters' devices and dtypes; None for frozen ones."""
        return [
            grad.to(parameter.device, parameter.dtype, non_blocking=True)
            if grad is not None and parameter.requires_grad
            else None
            for grad, parameter in zip(kept, self.parameters, strict=True)
        ]

    def saved(self, parameter: int, kept: Tensor | None) -> Tensor:
        """A parameter's kept gradient for a checkpoint; zeros if there is none."""
        like = self.parameters[parameter]
        return torch.zeros_like(like, requires_grad=False) if kept is None else kept

    def loaded(self, parameter: int, saved: Tensor, device: str | None) -> Tensor:
        """A parameter's kept gradient from a checkpoint."""
        like = self.parameters[parameter]
        return moved(torch.empty_like(like, requires_grad=False).copy_(saved), device)

    # --- computations of methods ---

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the shards, bitwise equal on all ranks."""
        return tensor

    def offsets(self, parameters: Sequence[int]) -> list[int] | None:
        """The index of each shard's first element among all elements; None for whole gradients."""
        del parameters
        return None

    def priorities(self, lists: LayerLists) -> list[Tensor]:
        """Int64 [O] per layer: the top-priority task of each output channel."""
        return [
            torch.ops.cs_kernels.task_priority(
                torch.ops.cs_kernels.connection_strength(
                    layer.weight,
                    torch.stack(of_layer.gammas()),
                    torch.stack(of_layer.running_vars()),
                    of_layer.epsilons(),
                    True,
                    layer.out_channel_dim,
                    layer.groups,
                )
            )
            for layer, of_layer in ((layer, LayerLists.of([layer])) for layer in lists.layers)
        ]

    def phase2(
        self,
        gradients: "TaskGradients",
        lists: LayerLists,
        parameters: Sequence[int],
        tasks: Sequence[str],
    ) -> tuple[Tensor, Tensor]:
        """Implements `TaskGradients.phase2` with one operator call."""
        del tasks
        updates, number = gradients.updates(parameters), len(gradients.rows)
        products = updates[0].new_empty((len(lists.layers), number, number), dtype=torch.float64)
        none = [updates[0].new_empty(0)]
        priorities = torch.ops.cs_kernels.phase2_update_(
            updates,
            gradients.of(parameters),
            lists.weights,
            torch.cat(lists.gammas() or none),
            torch.cat(lists.running_vars() or none),
            lists.epsilons(),
            lists.out_channel_dims,
            lists.groups,
            number,
            products,
        )
        return priorities, products


class TaskGradients:
    """K rows of gradients; a row has a tensor or None for every shared parameter.

    A parameter is a task's own if several tasks have had a pass, but only that task has reached the
    parameter. An own parameter gets its task's gradient unchanged, and methods do not see it.

    Args:
        parameters: The shared parameters, by name.
        tasks: The names of all tasks.
        reach: Records which task reaches which parameter. Default: an empty record.
        storage: The buffers of the updates, whole or sharded. Default: a single process's storage.

    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tasks: Sequence[str],
        reach: Reach | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.tasks = tuple(tasks)
        self.reach = Reach(parameters, tasks) if reach is None else reach
        self._has_complex = any(p.is_complex() for p in self.parameters)
        self.rows: list[list[Tensor | None]] = []
        """One row per task, in order: a gradient or None for every parameter."""
        self.anchors: list[list[Tensor | None]] = []
        """Rows of earlier steps that constrain the update (`Step.anchors`)."""
        self._storage = Storage(self.parameters) if storage is None else storage
        self.modules: tuple[str, ...] = ()
        """All modules of the step if its gradients arrive a few modules at a time; else empty."""
        self.collected: set[str] = set()
        """The tasks whose gradients are in the rows."""
        self.kept: frozenset[str] = frozenset()
        """The tasks whose gradients are needed after the update."""
        self.clear()

    def name_of(self, parameter: nn.Parameter) -> str:
        """For errors: the name of a shared parameter, or the shape of any other parameter."""
        names = dict(zip(self.parameters, self.names, strict=True))
        return names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")

    # --- rows ---

    def clear(self) -> None:
        """Drops the gradients, but not the buffers of the updates."""
        self.rows = [[None] * len(self.parameters) for _ in self.tasks]
        self.anchors, self.kept = [], frozenset()
        self.collected.clear()

    def collect(self, task: str) -> bool:
        """Moves every shared `.grad` into a task's row, or adds it to the gradient there.

        Returns:
            Whether there was any gradient.

        Raises:
            ValueError: A gradient is sparse.

        """
        row: list[Tensor | None] = [None] * len(self.parameters)
        unreached, strided = [], torch.strided
        for i, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None:
                unreached.append(i)
                continue
            if grad.layout is not strided:
                raise ValueError(
                    f"gradients of trunk must be dense, but the gradient of {self.names[i]} has"
                    f" layout {grad.layout}: use sparse=False, or, to keep it sparse, Sum() or"
                    " backward(losses, features=z) with an output z of trunk"
                )
            # A view may lie in a bucket of DistributedDataParallel, which the next pass reuses.
            row[i] = grad if grad._base is None else owned(grad)  # Saves a call per gradient.
            parameter.grad = None
        return self.put(task, row, unreached)

    def put_one(self, task: str, index: int, grad: Tensor) -> None:
        """Puts the gradient of one parameter into a task's row."""
        self.row_of(task)[index] = grad

    def row_of(self, task: str) -> list[Tensor | None]:
        """The row of a task."""
        return self.rows[self.tasks.index(task)]

    def put(self, task: str, row: list[Tensor | None], unreached: list[int]) -> bool:
        """Assigns a task's row, or adds to it; returns whether there is any gradient."""
        n = self.tasks.index(task)
        for i, before in enumerate(self.rows[n] if task in self.collected else ()):
            grad = row[i]
            if before is not None:
                row[i] = before if grad is None else before.add_(grad)
        self.rows[n] = row
        self.collected.add(task)
        self.reach.note(task, unreached)
        return len(unreached) < len(self.parameters)

    def reached(self) -> list[int]:
        """The indices of the parameters for which at least one row has a gradient."""
        return [
            i
            for i, of_tasks in enumerate(zip(*self.rows, *self.anchors, strict=True))
            if of_tasks[0] is not None or any(grad is not None for grad in of_tasks)
        ]

    def first(self) -> tuple[int, Tensor] | None:
        """The index of the first parameter with a gradient, and the gradient; None without one."""
        of_parameters = enumerate(zip(*self.rows, strict=True))
        return next(((i, g) for i, grads in of_parameters for g in grads if g is not None), None)

    def of(
        self, parameters: Sequence[int], tasks: Sequence[str] | None = None
    ) -> list[Tensor | None]:
        """The gradients of these parameters: for each, one per task, then one per anchor.

        Args:
            parameters: The indices of the parameters.
            tasks: The names of the tasks; None for all.

        """
        rows = self.rows if tasks is None else [self.row_of(task) for task in tasks]
        # `map` and `zip` loop in C: a large trunk has thousands of gradients.
        columns = zip(
            *(map(row.__getitem__, parameters) for row in (*rows, *self.anchors)), strict=True
        )
        grads = [*chain.from_iterable(columns)]
        return [g if g is None else as_real(g) for g in grads] if self._has_complex else grads

    def layers(self, parameters: Sequence[int]) -> tuple[list[int], tuple[str, ...]]:
        """The index of each parameter's module, and the names of the modules.

        The names cover the modules of the given parameters, or all modules of the step if its
        gradients arrive a few modules at a time.
        """
        modules = [self.names[i].rpartition(".")[0] for i in parameters]
        numbers = {module: n for n, module in enumerate(self.modules or dict.fromkeys(modules))}
        return [numbers[module] for module in modules], tuple(numbers)

    # --- the update ---

    def release_own(self) -> None:
        """Moves the gradients of every task's own parameters from the rows to `.grad`."""
        self._storage.release_own(self)

    def updates(self, parameters: Sequence[int], *, in_place: bool = False) -> list[Tensor]:
        """The buffers for these parameters' updates; complex ones as pairs of real numbers.

        Args:
            parameters: The indices of the parameters.
            in_place: Whether an update may be written over a gradient. The operator must then read
                an element of every gradient before it writes that element of the update.

        """
        over = self._overwritable(parameters) if in_place else None
        updates = self._storage.update_shards(parameters, over)
        return list(map(as_real, updates)) if self._has_complex else updates

    def _overwritable(self, parameters: Sequence[int]) -> list[Tensor | None]:
        """Each parameter's first gradient that nothing needs after the update."""
        of_tasks = zip(self.tasks, self.rows, strict=True)
        rows = [row for task, row in of_tasks if task not in self.kept]
        if self._has_complex:  # `as_real` would copy a conjugate.
            rows = [[None if g is None or g.is_conj() else g for g in row] for row in rows]
        first, *others = rows or [[None] * len(self.parameters)]
        found = [*map(first.__getitem__, parameters)]
        for n, i in enumerate(parameters):
            if found[n] is None:
                found[n] = next((row[i] for row in others if row[i] is not None), None)
        return found

    def assign(self, parameters: Sequence[int]) -> None:
        """Assigns the updates of these parameters to their `.grad`, and drops the rows."""
        self.clear()
        self._storage.assign(parameters)

    def publish(self) -> None:
        """Assigns the updates to `.grad`, with the shards of other ranks."""
        self._storage.publish()

    def lend(self) -> tuple[int, Tensor] | None:
        """The index of the first parameter with a gradient, and a tensor for its `.grad`."""
        first = self.first()
        return None if first is None else (first[0], self._storage.lend(*first))

    # --- computations of methods, over all ranks; each may have a shard of every gradient ---

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the shards of gradients."""
        return self._storage.sum_over_shards(tensor)

    def offsets(self, parameters: Sequence[int]) -> list[int] | None:
        """The index of each shard's first element among all elements of the parameters."""
        return self._storage.offsets(parameters)

    def priorities(self, lists: LayerLists) -> list[Tensor]:
        """Int64 [O] per layer: the top-priority task of each output channel."""
        return self._storage.priorities(lists)

    def phase2(
        self, lists: LayerLists, parameters: Sequence[int], tasks: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        """Projects conflicts in the prioritized layers, and writes the updates.

        Args:
            lists: The prioritized layers.
            parameters: The indices of these layers' weights, then of any other parameters.
            tasks: The tasks that take part in the step.

        Returns:
            The priorities, int64, each layer's [O] concatenated, and the products of the channel
            groups, float64 [layers, K, K].

        """
        return self._storage.phase2(self, lists, parameters, tasks)
