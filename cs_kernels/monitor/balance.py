"""The report of a GradientBalancer."""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from cs_kernels.monitor.conflicts import cosines_of


@dataclass(frozen=True, repr=False, eq=False)
class BalanceReport:
    """The tasks' gradients as a GradientBalancer sees them, made by `GradientBalancer.report`.

    The gradients' dot products are estimated from sketches. K is the number of tasks. With
    groups="layer", L is the number of modules; otherwise, tensors lack this dimension. Tensors are
    copies on the gradients' device: reading one synchronizes with the device.
    """

    step: int
    """The number of finished steps."""
    method: str
    """The method's `repr`."""
    tasks: tuple[str, ...]
    """The tasks, in the order of rows and columns."""
    layers: tuple[str, ...]
    """The modules, with groups="layer"."""
    gramian: Tensor
    """Float64 [K, K] or [L, K, K]; the gradients' dot products, from each task's last norm and each
    pair's last cosine; 0 for pairs of tasks that never had gradients in the same step."""
    weights: Tensor
    """[K] or [L, K]; the task weights of the next step, 1 for a task without a gradient so far."""
    together: Tensor
    """Bool, shaped like `gramian`; whether both tasks had gradients in the same step at least once.
    The gradients of all other pairs are assumed to be orthogonal."""
    finite_tasks: Tensor
    """Bool [K]; whether each task's gradient in the last step that solves was finite; False for all
    tasks if a `with` block raised."""
    counts: Tensor
    """Int64 [K, K]; the number of steps that were read in which two tasks' gradients, over all
    modules together, were in conflict."""
    steps: Tensor
    """Int64 [K, K]; the number of steps that were read in which both tasks had a gradient."""
    _variance: Tensor

    @cached_property
    def finite(self) -> Tensor:
        """Bool scalar; `finite_tasks.all()`. If False, the step kept the products and weights."""
        return self.finite_tasks.all()

    @cached_property
    def gradient_norms(self) -> Tensor:
        """Float64 [K] or [L, K]; the norms of the gradients."""
        return self.gramian.diagonal(dim1=-2, dim2=-1).sqrt()

    @cached_property
    def cosines(self) -> Tensor:
        """Float64, shaped like `gramian`; the gradients' cosines, 0 where `together` is False."""
        return cosines_of(self.gramian)

    @cached_property
    def cosine_errors(self) -> Tensor:
        """Shaped like `cosines`; the standard errors of the cosines, 0 where sketches are exact."""
        variance = self._variance if self.layers else self._variance[0]
        return (1 - self.cosines.square()) * variance.sqrt().reshape(-1, 1, 1).squeeze(0)

    @cached_property
    def conflict_share(self) -> Tensor:
        """Float64 [K, K]; the share of steps with a conflict, `counts / steps`; NaN for 0 / 0."""
        return self.counts / self.steps.double()

    def scalars(self) -> dict[str, float]:
        """Numbers by name, for a logger; synchronizes with the device.

        "task_weight/TASK" (with groups="layer", the mean over the modules), "gradient_norm/TASK",
        "finite/TASK" (1 or 0) and, for pairs of tasks that both had a gradient in one step,
        "cosine/TASK,TASK", "cosine_error/TASK,TASK" and "conflict_share/TASK,TASK". Norms and
        cosines are over all modules.
        """
        whole = self._whole
        weights = self.weights.reshape(-1, len(self.tasks)).mean(0).tolist()
        norms, cosines, errors = (
            x.tolist() for x in (whole.gradient_norms, whole.cosines, whole.cosine_errors)
        )
        shares, together = self.conflict_share.tolist(), whole.together.tolist()
        found = {f"task_weight/{task}": weights[i] for i, task in enumerate(self.tasks)}
        found |= {f"gradient_norm/{task}": norms[i] for i, task in enumerate(self.tasks)}
        finite = self.finite_tasks.tolist()
        found |= {f"finite/{task}": float(finite[i]) for i, task in enumerate(self.tasks)}
        for j, other in enumerate(self.tasks):
            for i, task in enumerate(self.tasks[:j]):
                if together[i][j]:
                    pair = f"{task},{other}"
                    found[f"cosine/{pair}"] = cosines[i][j]
                    found[f"cosine_error/{pair}"] = errors[i][j]
                    found[f"conflict_share/{pair}"] = shares[i][j]
        return found

    @property
    def _whole(self) -> "BalanceReport":
        """A report that treats all modules as one vector, for norms and cosines."""
        if not self.layers:
            return self
        energies = self.gramian.diagonal(dim1=-2, dim2=-1)
        total = energies.sum(0)
        # The modules' variances add up; <x, y>^2 is at most the product of the energies.
        share = (energies.square().sum(-1) * self._variance).sum() / total.square().sum()
        return replace(
            self,
            layers=(),
            gramian=self.gramian.sum(0),
            weights=self.weights.mean(0),
            together=self.together.any(0),
            _variance=share.nan_to_num(0.0).reshape(1),
        )

    def __str__(self) -> str:
        """One line per task and per pair; synchronizes with the device."""
        numbers = self.scalars()
        lines = [f"step {self.step}, {self.method}"]
        failed = [task for task in self.tasks if not numbers[f"finite/{task}"]]
        if len(failed) == len(self.tasks):
            lines[0] += ", weights kept: gradients were not finite, or a pass raised"
        elif failed:
            lines[0] += f", weights kept: gradients of {', '.join(failed)} were not finite"
        width = max(map(len, self.tasks))
        for j, task in enumerate(self.tasks):
            norm, weight = numbers[f"gradient_norm/{task}"], numbers[f"task_weight/{task}"]
            lines.append(f"  {task:{width}}  gradient norm {norm:.4g}, task weight {weight:.4g}")
            for other in self.tasks[:j]:
                pair = f"{other},{task}"
                if f"cosine/{pair}" not in numbers:
                    lines.append(f"  {'':{width}}  never together with {other}")
                    continue
                cosine, error = numbers[f"cosine/{pair}"], numbers[f"cosine_error/{pair}"]
                share = numbers[f"conflict_share/{pair}"]
                lines.append(
                    f"  {'':{width}}  cosine with {other} {cosine:.3f} ± {error:.3f},"
                    f" in conflict in {100 * share:.0f} % of steps"
                )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"BalanceReport(step={self.step}, tasks={list(self.tasks)})"
