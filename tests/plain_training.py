"""A training loop in plain torch, without the package; recipes are compared with it.

Each task has its own network, with torch's batch normalizations. The networks share all other
parameters.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from layers import Kind
from plain import projected_rows, strength
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Batch = tuple[Tensor, dict[str, Tensor]]
Loss = Callable[[nn.Module, Batch, str], Tensor]
Gradients = dict[nn.Parameter, Tensor]


@contextmanager
def in_float64() -> Iterator[None]:
    """Creates tensors and parameters in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _added(grads: Sequence[Gradients]) -> Gradients:
    total: Gradients = {}
    for of_one in grads:
        total |= {p: total[p] + grad if p in total else grad for p, grad in of_one.items()}
    return total


class PlainTraining:
    """Training with one network per task, in Phases 1 and 2.

    `prioritized` selects the update in Phase 2: a dict from layers to their normalizations for
    connection strength, an empty dict for PCGrad, None for the sum.
    """

    def __init__(
        self,
        network: nn.Module,
        tasks: Sequence[str],
        loss: Loss,
        optimizer: Callable[..., torch.optim.Optimizer],
        prioritized: dict[str, str] | None,
        scaler: torch.amp.GradScaler | None = None,
        reduction: str = "sum",
        **options: Any,
    ) -> None:
        self.networks = {tasks[0]: network}
        self.norms = [name for name, m in network.named_modules() if isinstance(m, _BatchNorm)]
        for task in tasks[1:]:
            self.add_task(task, tasks[0])
        self.loss = loss
        self.prioritized = prioritized
        self.scaler = scaler
        self.reduction = reduction
        self.conflicts = 0
        """The number of Phase 2 updates that a projection changed; per layer, except for PCGrad."""
        unique = {p: None for of_task in self.networks.values() for p in of_task.parameters()}
        self.optimizer = optimizer(unique, **options)

    def add_task(self, task: str, like: str) -> list[nn.Parameter]:
        """Adds a network with its own normalizations, and returns their parameters."""
        source = self.networks[like]
        network = self.networks[task] = copy.deepcopy(source)
        new = []
        for name, module in network.named_modules():
            if name in self.norms:
                new += module.parameters()
            else:
                module._parameters.update(source.get_submodule(name)._parameters)
        return new

    def gradients(self, task: str, micro_batches: Sequence[Batch]) -> Gradients:
        """Gradients of the summed losses, for the parameters that the losses depend on."""
        parameters = [*self.networks[task].parameters()]
        found = []
        for batch in micro_batches:
            loss = self.loss(self.networks[task], batch, task)
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            grads = torch.autograd.grad(scaled, parameters, allow_unused=True)
            pairs = zip(parameters, grads, strict=True)
            found.append({p: grad for p, grad in pairs if grad is not None})
        return _added(found)

    def step(
        self, phase: int, micro_batches: Sequence[Batch], tasks: Sequence[str] | None = None
    ) -> None:
        """Makes a step of Phase 1 or 2, for some tasks or for all."""
        tasks = list(self.networks if tasks is None else tasks)
        if phase == 1:
            for task in tasks:
                self._apply(self.gradients(task, micro_batches))
        else:
            self._apply(self._joint([self.gradients(task, micro_batches) for task in tasks], tasks))

    def _apply(self, update: Gradients) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = update.get(p)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _joint(self, grads: list[Gradients], tasks: list[str]) -> Gradients:
        update = _added(grads)
        if len(tasks) == 1 or self.prioritized is None:
            return update
        if not self.prioritized:
            shared = [p for p in update if all(p in of_task for of_task in grads)]
            return update | self._pcgrad(shared, *grads)
        for layer, norm in self.prioritized.items():
            weight = self.networks[tasks[0]].get_parameter(layer)
            is_transposed = isinstance(
                self.networks[tasks[0]].get_submodule(layer.rpartition(".")[0]), nn.ConvTranspose2d
            )
            kind = Kind(layer, tuple(weight.shape), int(is_transposed))
            of_tasks = [self.networks[task].get_submodule(norm) for task in tasks]
            strengths = strength(
                weight.detach(),
                torch.stack([m.weight.detach() for m in of_tasks]),
                torch.stack([m.running_var for m in of_tasks]),
                [m.eps for m in of_tasks],
                kind,
            )
            priority = (strengths / strengths.sum(1, keepdim=True)).argmax(0)
            stacked = torch.stack([of_task[weight] for of_task in grads])
            outermost = weight.movedim(kind.out_channel_dim, 0)
            projected = projected_rows(stacked, priority, kind).view(outermost.shape)
            projected = projected.movedim(0, kind.out_channel_dim)
            self.conflicts += not torch.allclose(projected, update[weight], rtol=1e-3)
            update[weight] = projected
        return update

    def _pcgrad(self, shared: list[nn.Parameter], *grads: Gradients) -> Gradients:
        """PCGrad for two tasks, where the order does not matter."""
        one, other = (torch.cat([g[p].flatten() for p in shared]) for g in grads)
        dot = (one @ other).clamp(max=0)
        self.conflicts += bool(dot < 0)
        merged = one + other - dot / (other @ other) * other - dot / (one @ one) * one
        if self.reduction == "mean":
            merged = merged / 2
        pieces = merged.split([p.numel() for p in shared])
        return {p: piece.view_as(p) for p, piece in zip(shared, pieces, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """The state dict of the converted network."""
        state = {}
        for task, network in self.networks.items():
            for name, value in network.state_dict().items():
                path, _, leaf = name.rpartition(".")
                state[f"{path}.{task}.{leaf}" if path in self.norms else name] = value
        return state


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference between two state dicts, which must have the same entries."""
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)
