"""A timm backbone with an exponential moving average of its weights and a timm scheduler.

In float64, parameters, running statistics and their averages match a plain loop's to within 1e-12.
"""

import timm
import torch
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from toy import TASKS, loss_of, make_batches, numbers

import cs_kernels as cs


class Network(nn.Module):
    """The first stage of a small backbone, and a head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = timm.create_model("test_resnet", features_only=True, out_indices=(1,))
        channels = self.trunk.feature_info.channels()[-1]
        self.heads = nn.ModuleDict({task: nn.Conv2d(channels, 1, 1) for task in TASKS})

    def forward(self, images: Tensor, task: str) -> Tensor:
        """The prediction of one task, with the size of the images."""
        (features,) = self.trunk(images)
        return nn.functional.interpolate(self.heads[task](features), images.shape[-2:])


def train(epochs: int = 4) -> tuple[Network, list, Network]:
    """Trains two epochs of Phase 1, then Phase 2; also returns the averaged network."""
    torch.manual_seed(0)
    network = Network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)  # Before the copy for the average.
    ema = ModelEmaV3(network, decay=0.9)
    adamw = torch.optim.AdamW(network.parameters(), lr=1e-2)
    scheduler = CosineLRScheduler(adamw, t_initial=epochs, warmup_t=1, warmup_lr_init=1e-3)
    opt = cs.MultiTaskOptimizer(network.trunk, adamw, TASKS, schedule=cs.Switch(2))

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches(2):
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            ema.update(network)
            history.append(losses)
        scheduler.step(epoch + 1)
    return network, history, ema.module


@torch.no_grad()
def predict(network: Network, images: Tensor, task: str) -> Tensor:
    """Predicts a task; each network, and so the average, has its own active task."""
    network.eval()
    with cs.nn.active_task(network.trunk, task):
        return network(images, task)


if __name__ == "__main__":
    _, history, averaged = train()
    for losses in history:
        print(numbers(losses))
    images = make_batches()[0][0]
    print({task: tuple(predict(averaged, images, task).shape) for task in TASKS})
