"""The recipes' small problem with two tasks: data, network, losses."""

import torch
from torch import Tensor, nn

TASKS = ["depth", "edges"]

Batch = tuple[Tensor, dict[str, Tensor]]


def make_batches(count: int = 3, size: int = 4) -> list[Batch]:
    """Images and each task's targets, always the same."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        images = torch.randn(size, 3, 12, 12, generator=generator)
        brightness = images.mean(1, keepdim=True)
        edges = (brightness.abs() > 0.4).to(images)
        batches.append((images, {"depth": 2 * brightness + 1, "edges": edges}))
    return batches


def make_task_batches(count: int = 3) -> list[tuple[str, Tensor, Tensor]]:
    """The same data, for one task at a time: its name, images and targets."""
    batches = make_batches(count)
    return [(task, images, targets[task]) for images, targets in batches for task in TASKS]


class Network(nn.Module):
    """A shared trunk, and a head per task."""

    def __init__(self, tasks: list[str], *, normalized: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, 8):
            layers.append(nn.Conv2d(channels, 8, 3, padding=1, bias=not normalized))
            layers.append(nn.BatchNorm2d(8) if normalized else nn.Identity())
            layers.append(nn.ReLU())
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({task: nn.Conv2d(8, 1, 1) for task in tasks})

    def forward(self, images: Tensor, task: str) -> Tensor:
        """The prediction of one task."""
        return self.heads[task](self.trunk(images))


def make_network(*, normalized: bool = True) -> Network:
    """A new network, always with the same parameters."""
    torch.manual_seed(0)
    return Network(TASKS, normalized=normalized)


def loss_of(task: str, prediction: Tensor, target: Tensor) -> Tensor:
    """The absolute error of depth, the cross-entropy of edges."""
    if task == "edges":
        return nn.functional.binary_cross_entropy_with_logits(prediction, target)
    return (prediction - target).abs().mean()


def numbers(losses: dict[str, Tensor]) -> dict[str, float]:
    """Losses as numbers, for printing."""
    return {task: round(loss.item(), 4) for task, loss in losses.items()}
