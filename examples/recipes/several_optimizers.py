"""Several torch optimizers: Muon for the trunk's matrices, AdamW for all other parameters.

In float64, parameters and running statistics match those of a plain loop to within 1e-12, whether
or not the run was resumed.
"""

import argparse
from pathlib import Path

import torch
from atomic import atomic_write
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from toy import TASKS, loss_of, make_batches, numbers

import cs_kernels as cs

EPOCHS = 4


class Network(nn.Module):
    """A trunk of linear layers, and a head per task."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for size in (3 * 12 * 12, 16):
            layers += [nn.Linear(size, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({task: nn.Linear(16, 12 * 12) for task in TASKS})

    def forward(self, images: Tensor, task: str) -> Tensor:
        """The prediction of one task, with the size of the images."""
        return self.heads[task](self.trunk(images)).view(-1, 1, 12, 12)


def make_optimizers(network: Network) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    """Distributes the parameters over two optimizers; torch's Muon accepts only matrices."""
    matrices = [p for p in network.trunk.parameters() if p.ndim == 2]
    of_muon = set(matrices)
    others = [p for p in network.parameters() if p not in of_muon]
    muon = torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(others, lr=1e-2)


def train(epochs: int = EPOCHS, checkpoint: Path | None = None) -> tuple[Network, list]:
    """Trains up to an epoch; resumes from the checkpoint, if there is one, and writes it."""
    torch.manual_seed(0)
    network = Network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    muon, adamw = make_optimizers(network)
    schedule = cs.Mixed(epochs=EPOCHS, seed=0, draw="step")
    opt = cs.MultiTaskOptimizer(network.trunk, [muon, adamw], TASKS, schedule=schedule)
    rates = {"cosine": CosineAnnealingLR(muon, EPOCHS), "linear": LinearLR(adamw, 1.0, 0.1, EPOCHS)}
    parts = {"network": network, "muon": muon, "adamw": adamw, "opt": opt, **rates}
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])

    history = []
    for epoch in range(rates["cosine"].last_epoch, epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
        for rate in rates.values():
            rate.step()
        if checkpoint is not None:
            with atomic_write(checkpoint) as file:
                torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    for losses in train(checkpoint=parser.parse_args().checkpoint)[1]:
        print(numbers(losses))
