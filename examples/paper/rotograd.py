"""RotoGrad: Gradient Homogenization in Multitask Learning (Javaloy and Valera, ICLR 2022)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from paper.network import Network, narrowed
from paper.segnet import SegNet, heads
from paper.tasks import Task

SIZE = 1024
"""Rows of a rotation at width 1; two rotations take 8 MiB, as in the paper's table."""


class Rotation(nn.Module):
    """A learned rotation, at first the identity."""

    matrix: Tensor
    """[size, size], the matrix exponential of a skew-symmetric matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(size))
        orthogonal(self, "matrix", "matrix_exp")


def _rotated(maps: Tensor, matrix: Tensor) -> Tensor:
    """Rotates the first entries of each flattened sample: [B, ...] -> the same shape."""
    flat = maps.flatten(1)
    size = len(matrix)
    rotated = torch.cat([flat[:, :size] @ matrix.T, flat[:, size:]], 1)
    return rotated.view_as(maps)


class RotoGrad(Network):
    """A network that rotates the shared feature z for each task: its head sees R_k z.

    `backward` computes the gradients of one step of the paper's algorithm. Let G_k be the gradient
    of task k's loss with respect to z for the whole batch, and G_k^0 its value in the first step.

    - Scale: the trunk gets C sum_k U_k with U_k = G_k / ||G_k||. Here C = sum_k alpha_k ||G_k||,
      and alpha_k is the convergence ratio ||G_k|| / ||G_k^0|| over the sum of these ratios.
    - Rotate: R_k minimizes - sum_n <R_k^T g_nk, v_n>, where g_nk is the gradient of sample n with
      respect to R_k z, and v_n = 1/K sum_k u_nk. Both are constants of the current step, computed
      before any parameter changes.

    Heads get the unscaled gradients of their own losses. The authors' library differs in two
    points: it updates the norms ||G_k^0|| after 20 steps, and rotations minimize the batch mean of
    ||R_k w_n - g_nk||^2, where w_n is v_n at the scale of the mean gradient. As R_k is orthogonal,
    this gives the same gradient up to a factor.

    Args:
        trunk: Returns the shared feature, a tensor [B, ...].
        heads: By task.
        size: The number of entries of a sample's flattened feature that are rotated.

    """

    initial_norms: Tensor
    """||G_k^0|| by task, NaN before the first step; in the state dict, so runs can resume."""

    def __init__(self, trunk: nn.Module, heads: Mapping[str, nn.Module], size: int) -> None:
        super().__init__(trunk, heads)
        self.rotation = nn.ModuleDict({task: Rotation(size) for task in heads})
        self.register_buffer("initial_norms", torch.full((len(heads),), torch.nan))

    def predict(self, shared: Tensor, task: str, size: Sequence[int]) -> list[Tensor]:
        """The predictions of one task from the rotated shared feature."""
        matrix: Tensor = self.rotation[task].matrix
        return super().predict(_rotated(shared, matrix.detach()), task, size)

    def backward(
        self, picture: Tensor, loss_of: Callable[[str, list[Tensor]], Tensor]
    ) -> dict[str, Tensor]:
        """Sets `.grad` of trunk, heads and rotations for one optimizer step.

        Previous gradients are discarded.

        Args:
            picture: [B, 3, H, W].
            loss_of: Called with a task and its predictions; returns the loss, a scalar.

        Returns:
            The loss of each task, detached.

        """
        for parameter in self.parameters():
            parameter.grad = None
        shared: Tensor = self.run_trunk(picture)
        losses: dict[str, Tensor] = {}
        matrices, rotated_gradients, gradients = [], [], []
        for task, rotation in self.rotation.items():
            matrix: Tensor = rotation.matrix
            rotated = _rotated(shared.detach(), matrix.detach()).requires_grad_()
            loss = loss_of(task, super().predict(rotated, task, picture.shape[-2:]))
            loss.backward()
            losses[task] = loss.detach()
            matrices.append(matrix)
            rotated_gradients.append(rotated.grad)
            gradients.append(_rotated(rotated.grad, matrix.detach().T))
        unit, scale = self._scaled(gradients)
        shared.backward(scale * sum(unit))
        target = sum(unit).flatten(1) / len(unit)
        for matrix, gradient in zip(matrices, rotated_gradients, strict=True):
            size = len(matrix)
            follower = gradient.flatten(1)[:, :size] * (target[:, :size] @ matrix.T)
            (-follower.sum()).backward()
        return losses

    @torch.no_grad()
    def _scaled(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """U_k of each task, and C."""
        norms = torch.stack([gradient.norm() for gradient in gradients])
        norms = norms.clamp_min(torch.finfo(norms.dtype).tiny)
        first = self.initial_norms.isnan()
        self.initial_norms.copy_(torch.where(first, norms, self.initial_norms))
        ratios = norms / self.initial_norms
        scale = (ratios / ratios.sum() * norms).sum()
        return [gradient / norm for gradient, norm in zip(gradients, norms, strict=True)], scale


def make_rotograd(tasks: Mapping[str, Task], width: float = 1.0) -> RotoGrad:
    """SegNet with rotations of the first `SIZE * width` entries, at least 16."""
    trunk = SegNet(width)
    return RotoGrad(trunk, heads(trunk.channels, tasks), max(16, narrowed(SIZE, width)))
