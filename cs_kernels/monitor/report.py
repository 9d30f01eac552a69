"""Reports on single training steps, for people who watch a training run.

A step stores the few tensors from which its method made the update. A report computes everything
else on request and on the device, without host synchronization until a number is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cs_kernels.elapsed import Elapsed
from cs_kernels.methods import Method
from cs_kernels.monitor.conflicts import cosines_of
from cs_kernels.schedules import Phase
from cs_kernels.step import Step
from cs_kernels.weightings import EqualWeights, Weighting


class Done(NamedTuple):
    """A finished step."""

    step: Step
    number: int
    epoch: int | None
    phase: Phase


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """A report on one step, made by `MultiTaskOptimizer.report`.

    Gradients are computed from the weighted losses, without the loss scale of a scaler or of
    `backward=`; on several ranks, they are means over the ranks. L is the number of layers, K the
    number of `rows`. Tensors stay on the gradients' device: reading one synchronizes with the
    device, but making the report does not.
    """

    step: int
    """The number of steps made before this one, in both phases."""
    epoch: int | None
    phase: Phase
    """1: one optimizer step per task, without a method; 2: one step for all tasks."""
    method: str
    """The method's `repr`."""
    tasks: tuple[str, ...]
    """The tasks that took part."""
    losses: Mapping[str, Tensor]
    """By task, detached scalars before weighting."""
    weighted_losses: Mapping[str, Tensor]
    """By task, after weighting; empty without a weighting."""
    rows: tuple[str, ...] = ()
    """The tasks, in the order of the rows of all tensors below, followed by the kept gradients. The
    newest kept gradient of a task that took no part has the task's name; any other one is named
    like "task@12", after the step that computed it."""
    kept_from: Mapping[str, int] = field(default_factory=dict)
    """`Protect` with kept gradients: for each protected task that took no part, the step that
    computed its newest gradient, counted like `step`."""
    layers: tuple[str, ...] = ()
    """The layers of the tensors below: the prioritized layers for `ConnectionStrength`, the modules
    for groups="layer"; empty if the tensors describe the whole trunk."""
    gramian: Tensor | None = None
    """Gramian methods: float64 [K, K] or [L, K, K]; the dot products of the gradients."""
    task_weights: Tensor | None = None
    """Gramian methods: [K] or [L, K]; the weights of the gradients in the update."""
    weights_from: int | None = None
    """Gramian methods: the step, counted like `step`, that solved for the task weights. With
    `update_every` above 1, it may be an earlier step; this report then has no Gramian."""
    priorities: tuple[Tensor, ...] = ()
    """`ConnectionStrength`: int64 [O] per layer; the top-priority task of each channel."""
    products: Tensor | None = None
    """`ConnectionStrength`: float64 [L, K, K]; d_ij = <G_i, g_j> over the channel group CG_i."""
    _elapsed: Elapsed | None = None
    """The time from the gradients to the update."""

    @cached_property
    def cosines(self) -> Tensor | None:
        """Gramian methods: float64, shaped like `gramian`; the cosines, 0 for a zero gradient."""
        return None if self.gramian is None else cosines_of(self.gramian)

    @cached_property
    def gradient_norms(self) -> Tensor | None:
        """Gramian methods: float64 [K] or [L, K]; the norms of the gradients."""
        return None if self.gramian is None else self.gramian.diagonal(dim1=-2, dim2=-1).sqrt()

    @cached_property
    def update_norm(self) -> Tensor | None:
        """Gramian methods: float64 scalar or [L]; the norm of the update.

        The norm is computed from the Gramian: if gradients cancel, the error is up to 1e-8 times
        their norms.
        """
        if self.gramian is None or self.task_weights is None:
            return None
        weights = self.task_weights.to(self.gramian)
        squared = (weights.unsqueeze(-2) @ self.gramian @ weights.unsqueeze(-1))[..., 0, 0]
        # Rounding may make the square negative; NaN stays NaN.
        return torch.where(squared < 0, 0.0, squared).sqrt()

    @cached_property
    def channels(self) -> Tensor | None:
        """`ConnectionStrength`: int64 [L, K]; the number of channels per channel group."""
        if self.products is None:
            return None
        tasks = torch.arange(len(self.rows), device=self.products.device)
        counts = [(priority == tasks[:, None]).sum(1) for priority in self.priorities]
        return torch.stack(counts) if counts else self.products.new_zeros((0, len(tasks))).long()

    @cached_property
    def conflicts(self) -> Tensor | None:
        """Bool; entry [i, j] is True if task j's gradient conflicts with task i's.

        `ConnectionStrength`: [L, K, K], over the channel group CG_i of each layer, because only
        conflicts there cause projections. Gramian methods: `gramian < 0`.
        """
        if self.products is not None:
            return (self.products < 0) & (self._reference_energies > 0)
        return None if self.gramian is None else self.gramian < 0

    @cached_property
    def removed(self) -> Tensor | None:
        """`ConnectionStrength`: float64 [L, K, K]; the energy that projections removed.

        If task j's gradient is in conflict with the reference gradient G_i, entry [i, j] is
        d_ij^2 / d_ii, the squared norm of the gradient's component along G_i; otherwise, it is 0.
        """
        if self.products is None:
            return None
        unchanged = (self.products >= 0) | (self._reference_energies == 0)  # False for NaN.
        return torch.where(unchanged, 0.0, self.products.square() / self._reference_energies)

    @property
    def _reference_energies(self) -> Tensor:
        """Float64 [L, K, 1]: d_ii."""
        assert self.products is not None
        return self.products.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)

    def scalars(self) -> dict[str, float]:
        """Numbers of the whole trunk by name, for a logger; synchronizes with the device once.

        Always: "phase", "loss/TASK", and with a weighting "weighted_loss/TASK".

        Gramian methods: "task_weight/TASK" (with groups="layer", the mean over the layers); and, in
        steps that solve for the weights, "gradient_norm/TASK", "cosine/TASK,TASK", "update_norm".

        `ConnectionStrength`: "channel_share/TASK", the fraction of the prioritized channels whose
        top-priority task is TASK. For the tasks that take part: "conflict_share", the fraction of
        conflicts among all pairs of a channel group and another task; "removed_norm/TASK", the norm
        of the components that projections removed from the task's gradient.

        `Protect` with kept gradients: "kept_age/TASK", the number of steps since the gradient of a
        task that took no part was computed.

        Joint steps: "surgery_ms", the milliseconds from the gradients to the update (on a GPU, only
        after the first report).
        """
        tensors: dict[str, Tensor] = {f"loss/{task}": x for task, x in self.losses.items()}
        tensors |= {f"weighted_loss/{task}": x for task, x in self.weighted_losses.items()}
        tensors |= self._gramian_scalars() | self._channel_group_scalars()
        numbers: list[float] = []
        if tensors:
            device = next(iter(tensors.values())).device
            numbers = torch.stack([x.to(device, torch.float64) for x in tensors.values()]).tolist()
        ages = {f"kept_age/{t}": float(self.step - n) for t, n in self.kept_from.items()}
        scalars = {"phase": float(self.phase)} | ages | dict(zip(tensors, numbers, strict=True))
        elapsed = None if self._elapsed is None else self._elapsed.milliseconds()
        return scalars if elapsed is None else scalars | {"surgery_ms": elapsed}

    def _gramian_scalars(self) -> dict[str, Tensor]:
        if self.task_weights is None:
            return {}
        weights = self.task_weights.reshape(-1, len(self.rows)).mean(0)
        if self.gramian is None or self.update_norm is None:  # Weights of an earlier step.
            return {f"task_weight/{task}": weights[i] for i, task in enumerate(self.rows)}
        whole = replace(self, gramian=self.gramian.reshape(-1, *self.gramian.shape[-2:]).sum(0))
        norms, cosines = whole.gradient_norms, whole.cosines
        assert norms is not None
        assert cosines is not None
        scalars = {"update_norm": self.update_norm.square().sum().sqrt()}
        for i, task in enumerate(self.rows):
            scalars[f"gradient_norm/{task}"] = norms[i]
            scalars[f"task_weight/{task}"] = weights[i]
            for j in range(i):
                scalars[f"cosine/{self.rows[j]},{task}"] = cosines[j, i]
        return scalars

    def _channel_group_scalars(self) -> dict[str, Tensor]:
        if self.channels is None or self.removed is None or self.conflicts is None:
            return {}
        if not self.layers:  # All prioritized layers are frozen.
            return {}
        channels = self.channels.double()
        share = channels.sum(0) / channels.sum()
        removed = self.removed.sum((0, 1)).sqrt()
        present = [i for i, task in enumerate(self.rows) if task in self.tasks]
        scalars = {f"channel_share/{task}": share[i] for i, task in enumerate(self.rows)}
        scalars |= {f"removed_norm/{self.rows[i]}": removed[i] for i in present}
        if len(present) > 1:
            pairs = (channels[:, present] > 0).double().sum() * (len(present) - 1)
            scalars["conflict_share"] = self.conflicts.double().sum() / pairs
        return scalars

    def __str__(self) -> str:
        """The numbers of `scalars`, with one line per task; synchronizes with the device."""
        scalars = self.scalars()
        epoch = "" if self.epoch is None else f"epoch {self.epoch}, "
        head = [f"step {self.step}, {epoch}phase {self.phase}"]
        if self.phase == 2:
            head.append(self.method)
        names = self.rows or self.tasks
        lines: dict[str, list[str]] = {task: [] for task in names}
        for name, value in scalars.items():
            kind, _, task = name.partition("/")
            label = f"{kind.replace('_', ' ')} {value:.4g}"
            if task in lines:
                lines[task].append(label)
            elif not task and kind != "phase":
                head.append(label)
        for i, task in enumerate(self.rows):
            for other in self.rows[:i]:
                if (name := f"cosine/{other},{task}") in scalars:
                    lines[task].append(f"cosine with {other} {scalars[name]:.4g}")
        width = max(map(len, names), default=0)
        task_lines = [f"  {task:{width}}  {', '.join(labels)}" for task, labels in lines.items()]
        return "\n".join([", ".join(head), *task_lines])

    def __repr__(self) -> str:
        kinds = [name for name in ("gramian", "products") if getattr(self, name) is not None]
        return f"Report(step={self.step}, phase={self.phase}, tasks={list(self.tasks)}, of={kinds})"


def report_of(done: Done, method: Method, weighting: Weighting) -> Report:
    """The report of a step; tensors are copied, because CUDA graph replays overwrite them."""
    step = done.step
    surgery, scale = step.surgery, step.loss_scale
    solver_step = done.number if step.kept is None else step.kept.number
    weighted = {} if isinstance(weighting, EqualWeights) else step.weighted_losses
    products, priorities = surgery.products, tuple[Tensor, ...]()
    layers = surgery.layers
    if surgery.prioritized is not None and surgery.priorities is not None:
        layers = tuple(layer.name for layer in surgery.prioritized.layers)
        priorities = torch.split(surgery.priorities.clone(), surgery.prioritized.channels)
    if products is not None:
        products = products / (1.0 if scale is None else scale.double() ** 2)
    return Report(
        step=done.number,
        epoch=done.epoch,
        phase=done.phase,
        method=repr(method),
        tasks=step.tasks,
        losses={task: loss.clone() for task, loss in step.losses.items()},
        weighted_losses={task: loss.clone() for task, loss in weighted.items()},
        rows=surgery.rows,
        kept_from={
            task: max(number for other, number in step.anchors if other == task)
            for task, _ in step.anchors
            if task not in step.tasks
        },
        layers=layers,
        gramian=None if surgery.gramian is None else surgery.gramian.clone(),
        task_weights=None if surgery.task_weights is None else surgery.task_weights.clone(),
        weights_from=None if surgery.task_weights is None else solver_step,
        priorities=priorities,
        products=products,
        _elapsed=step.elapsed,
    )
