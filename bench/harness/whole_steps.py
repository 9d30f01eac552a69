"""Whole training steps of a trunk with one linear head per task: plain, ours and peers'.

A step sets gradients to None, makes a forward pass, computes the losses and, by its own method, the
gradients, and ends with the step of a torch optimizer without state. TorchJD computes the same
update as our UPGrad, with its faster option: the Gramian without the whole matrix.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import cs_kernels as cs
from harness.counting import GradientMemory
from harness.peers import textbook
from harness.problems import assert_close
from harness.training import Setting, Training, timm_model

Losses = Mapping[str, Tensor]


def _small() -> nn.Module:
    """A fast trunk, for checking that everything runs."""
    layers = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten())


def _mlp() -> nn.Module:
    layers = [module for _ in range(4) for module in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers)


class _LSTM(nn.Module):
    """Two LSTM layers; returns the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, length, 64] -> [B, 256]."""
        output: Tensor = self.lstm(x)[0][:, -1]
        return output


class _Mixture(nn.Module):
    """Two layers of 8 experts, weighted by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(128, 8) for _ in range(2))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)) for _ in range(8)
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, 128] -> [B, 128]."""
        for gate, experts in zip(self.gates, self.experts, strict=True):
            shares = gate(x).softmax(-1).unsqueeze(-1)
            x = x + (torch.stack([expert(x) for expert in experts], 1) * shares).sum(1)  # type: ignore[union-attr]
        return x


PICTURES = 8, (3, 64, 64)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int, tuple[int, ...]]] = {
    "small": (_small, 8, *PICTURES),
    "resnet18": (partial(timm_model, "resnet18", num_classes=0), 512, *PICTURES),
    "resnet50": (partial(timm_model, "resnet50", num_classes=0), 2048, *PICTURES),
    "vit": (
        partial(timm_model, "vit_tiny_patch16_224", num_classes=0, img_size=64, depth=6),
        192,
        *PICTURES,
    ),
    "mlp": (_mlp, 512, 64, (512,)),
    "lstm": (_LSTM, 256, 16, (32, 64)),
    "experts": (_Mixture, 128, 64, (128,)),
}
"""Trunk, number of features, batch size, and shape of a sample; vit has 6 blocks."""


def setting_of(network: str, tasks: int) -> Setting:
    """The setting of a network, with a linear head of 10 outputs per task."""
    trunk, width, batch, shape = NETWORKS[network]
    return Setting(
        name=network,
        trunk=trunk,
        head=partial(nn.Linear, width),
        channels={str(task): 10 for task in range(tasks)},
        batch=batch,
        shape=shape,
    )


class WholeStep(Training):
    """The plain step: one backward pass of the summed loss.

    Args:
        network: A name in `NETWORKS`.
        tasks: The number of tasks.
        method: The method of our step.
        batch: The number of samples; None for the number in `NETWORKS`.
        options: As in `Training`.

    """

    def __init__(
        self,
        network: str,
        tasks: int,
        method: cs.Method | None = None,
        batch: int | None = None,
        **options: Any,
    ) -> None:
        setting = setting_of(network, tasks)
        setting = replace(setting, batch=batch or setting.batch)
        super().__init__(setting, method or cs.Sum(), **{"convert": False, **options})
        self.shared, self.own = [*self.trunk.parameters()], [*self.heads.parameters()]

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Makes a forward pass; returns the features and the losses."""
        self.optimizer.zero_grad()
        z = self.trunk(self.x)
        return z, self.losses(dict.fromkeys(self.heads, z))

    def backward(self, z: Tensor, losses: Losses) -> None:
        """Computes the update in `.grad`."""
        del z
        _total(losses).backward()

    def step(self) -> None:
        self.backward(*self.forward())
        self.optimizer.step()

    def peak(self) -> int:
        """The peak memory of a step's gradients, including gradients of activations.

        It counts all tensors that are allocated after the forward pass.
        """
        graph = self.forward()
        kept = [*self.parameters, *self.trunk.buffers()]
        with GradientMemory(kept, everything=True) as memory:
            self.backward(*graph)
            self.optimizer.step()
        return memory.peak

    def rows(self, *, at_features: bool = False) -> Tensor:
        """The K gradients of the shared parameters, or of the features, in float64."""
        z, losses = self.forward()
        at = [z] if at_features else self.shared
        grads = (torch.autograd.grad(loss, at, retain_graph=True) for loss in losses.values())
        return torch.stack([_flat(of_task) for of_task in grads])

    def weights(self, method: Any, rows: Tensor) -> Tensor:
        """The reference's task weights for these gradients in a method's first step."""
        with cs.use_backend("reference"):
            weights: Tensor = method.weights(rows @ rows.T, cs.Step(tasks=tuple(self.heads)))
        return weights

    def found(self) -> Tensor:
        """The update of the shared parameters; checks that heads get the plain gradients."""
        z, losses = self.forward()
        heads = torch.autograd.grad(_total(losses), self.own, retain_graph=True)
        self.backward(z, losses)
        assert_close([_flat(p.grad for p in self.own)], [_flat(heads)], 1e-4)
        return _flat(p.grad for p in self.shared)


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """Concatenates gradients, because some of them, as for key biases, are only rounding errors."""
    return torch.cat([t.flatten().double() for t in tensors if t is not None])


def _total(losses: Losses) -> Tensor:
    return torch.stack([*losses.values()]).sum()


class Ours(WholeStep):
    """`backward(losses)`: K passes, or one pass in a step that reuses task weights."""

    def backward(self, z: Tensor, losses: Losses) -> None:
        del z
        self.opt.backward(losses)


class OursBatched(WholeStep):
    """`backward(losses, batched=True)`: K passes at once."""

    def backward(self, z: Tensor, losses: Losses) -> None:
        del z
        self.opt.backward(losses, batched=True)


class OursAtFeatures(WholeStep):
    """`backward(losses, features=z)`: K passes through the heads, one through the trunk."""

    def backward(self, z: Tensor, losses: Losses) -> None:
        self.opt.backward(losses, features=z)


class OursPerTask(WholeStep):
    """`step`: a forward and a backward pass per task, with task-specific normalization."""

    def step(self) -> None:
        Training.step(self)


class TorchJD(WholeStep):
    """`torchjd.autojac.backward`, which fills the `.jac` of all parameters, then `jac_to_grad`.

    Args:
        network: A name in `NETWORKS`.
        tasks: The number of tasks.
        chunk: The number of losses per backward pass; None for all at once, with `torch.vmap`.

    """

    def __init__(self, network: str, tasks: int, chunk: int | None = None) -> None:
        super().__init__(network, tasks)
        from torchjd import aggregation

        self.method, self.sum, self.chunk = aggregation.UPGrad(), aggregation.Sum(), chunk

    def backward(self, z: Tensor, losses: Losses) -> None:
        from torchjd import autojac

        del z
        autojac.backward([*losses.values()], parallel_chunk_size=self.chunk)
        self.jac_to_grad()
        autojac.jac_to_grad(self.own, self.sum)

    def jac_to_grad(self) -> None:
        """Makes the update of the shared parameters."""
        from torchjd import autojac

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autojac.jac_to_grad(self.shared, self.method, optimize_gramian_computation=True)


class TorchJDAtFeatures(TorchJD):
    """`torchjd.autojac.mtl_backward`: heads get plain gradients, the trunk K gradients at once."""

    def backward(self, z: Tensor, losses: Losses) -> None:
        from torchjd import autojac

        autojac.mtl_backward([*losses.values()], features=z, parallel_chunk_size=self.chunk)
        self.jac_to_grad()


class TorchJDEngine(WholeStep):
    """`torchjd.autogram.Engine`: the Gramian layer by layer, then a weighted backward pass.

    Batch normalization makes samples depend on each other, so the engine gets no batch dimension.
    """

    def __init__(self, network: str, tasks: int) -> None:
        super().__init__(network, tasks)
        from torchjd import aggregation, autogram

        self.weighting = aggregation.UPGradWeighting()
        self.engine = autogram.Engine(self.trunk, batch_dim=None)

    def backward(self, z: Tensor, losses: Losses) -> None:
        del z
        stacked = torch.stack([*losses.values()])
        weights = self.weighting(self.engine.compute_gramian(stacked))
        stacked.sum().backward(inputs=self.own, retain_graph=True)
        stacked.backward(weights, inputs=self.shared)


class Textbook(WholeStep):
    """The copied loop of PCGrad: K backward passes, clones, flat vectors and projections."""

    def backward(self, z: Tensor, losses: Losses) -> None:
        del z
        rows = []
        for loss in losses.values():
            for p in self.shared:
                p.grad = None
            loss.backward(retain_graph=True)
            rows.append([p.grad.clone() for p in self.shared if p.grad is not None])
        for p, update in zip(self.shared, textbook("PCGrad", rows), strict=True):
            p.grad = update


class OneMatrix(WholeStep):
    """PCGrad as LibMTL describes it, with a K x N matrix of gradients and one of projections.

    Heads get their gradients in the same K passes.
    """

    def backward(self, z: Tensor, losses: Losses) -> None:
        del z
        sizes = [p.numel() for p in self.shared]
        matrix = torch.zeros(len(losses), sum(sizes), device=self.x.device)
        for row, (task, loss) in zip(matrix, losses.items(), strict=True):
            own = [*self.heads[task].parameters()]
            grads = torch.autograd.grad(loss, [*self.shared, *own], retain_graph=True)
            row.copy_(torch.cat([g.flatten() for g in grads[: len(sizes)]]))
            for p, grad in zip(own, grads[len(sizes) :], strict=True):
                p.grad = grad
        projected = matrix.clone()
        for g_i in projected:
            for j in random.sample(range(len(matrix)), len(matrix)):
                dot = g_i @ matrix[j]
                if dot < 0:
                    g_i -= dot / (matrix[j].norm() ** 2 + 1e-8) * matrix[j]
        for p, update in zip(self.shared, projected.sum(0).split(sizes), strict=True):
            p.grad = update.view_as(p)
