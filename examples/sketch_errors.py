"""The error of updates whose task weights come from sketches, for docs/balancer.md.

    python examples/sketch_errors.py

For each untrained network, number K of tasks and sketch size, every Gramian method computes task
weights from exact products and from sketches. The error is the norm of the difference between both
updates, relative to the exact update.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision_operators
from torch import Tensor, nn

import cs_kernels as cs

SIZES = 16_384, 65_536, 262_144
TASKS = 2, 4, 8
SEEDS = 3
METHODS = [
    cs.GradVac(target=0.0) if method is cs.GradVac else method()
    for method in cs.GramianMethod.__subclasses__()
    if method.__name__ in cs.__all__ and method not in (cs.Clipped, cs.Protect)
]


class Transformer(nn.Module):
    """Four layers of width 192."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(96, 192)
        layer = nn.TransformerEncoderLayer(192, 4, 768, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Token indices [batch, length] -> [batch, 192]."""
        y: Tensor = self.layers(self.words(x)).mean(1)
        return y


def networks() -> Iterator[tuple[str, nn.Module, int, Tensor]]:
    """Yields names, trunks, output sizes and batches."""
    torchvision_operators.define()
    from torchvision.models import resnet18

    torch.manual_seed(0)
    resnet = resnet18(weights=None)
    resnet.fc = nn.Identity()
    yield "ResNet-18", resnet, 512, torch.randn(8, 3, 64, 64)
    yield "transformer", Transformer(), 192, torch.randint(96, (8, 64))


def balanced(
    trunk: nn.Module, losses: dict[str, Tensor], method: cs.Method, size: int, seed: int
) -> cs.GradientBalancer:
    """Makes a balancer, and one step with it."""
    balancer = cs.GradientBalancer(trunk.parameters(), losses, method, sketch=size, seed=seed)
    for task, loss in losses.items():
        with balancer.task(task, loss):
            loss.backward(retain_graph=True)
    balancer.update()
    balancer.close()
    return balancer


def errors(trunk: nn.Module, losses: dict[str, Tensor], size: int) -> list[float]:
    """The errors of all methods and seeds."""
    exact = torch.stack(
        [
            torch.cat(
                [
                    grad.flatten()
                    for grad in torch.autograd.grad(loss, [*trunk.parameters()], retain_graph=True)
                ]
            )
            for loss in losses.values()
        ]
    ).double()
    gramian = exact @ exact.T
    detached = {task: loss.detach() for task, loss in losses.items()}
    step = cs.Step(0, tuple(losses), detached, detached)
    found = []
    for seed in range(SEEDS):
        products = balanced(trunk, losses, cs.Sum(), size, seed).gramian
        for method in METHODS:
            right = method.weights(gramian, step)
            difference = method.weights(products, step) - right
            squared = difference @ gramian @ difference / (right @ gramian @ right)
            found.append(float(squared.clamp(min=0).sqrt()))
    return found


def main() -> None:
    """Writes the table's rows."""
    rows = []
    for name, trunk, width, x in networks():
        numel = sum(p.numel() for p in trunk.parameters())
        for tasks in TASKS:
            torch.manual_seed(1)
            z = trunk(x)
            losses = {
                f"task {n}": nn.functional.cross_entropy(
                    nn.Linear(width, 10)(z), torch.randint(10, (len(z),))
                )
                for n in range(tasks)
            }
            cells = []
            for size in SIZES:
                found = [100 * error for error in errors(trunk, losses, size)]
                cells.append(f"{statistics.median(found):.2f}, {max(found):.2f}")
            rows.append(f"| {name}, {numel / 1e6:.1f} M | {tasks} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    path = Path(__file__).parent / "results" / "sketch_errors.md"
    head = f"| network, parameters | K | {' | '.join(f'{size:,}' for size in SIZES)} |"
    path.write_text("\n".join([head, "| --- " * (2 + len(SIZES)) + "|", *rows, ""]))


if __name__ == "__main__":
    main()
