"""Task weights in Lightning's own loop, with automatic optimization.

In float64, resumed or not, parameters agree to 1e-7 with those of a plain loop that multiplies each
task's exact gradient of the trunk by the previous step's weights.
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from toy import TASKS, loss_of, make_network, make_task_batches

import cs_kernels as cs


class Module(lightning.LightningModule):
    """The network and its GradientBalancer. A batch belongs to one task, and names it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network(normalized=False)
        self.balancer_state = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(self.network.parameters(), lr=1e-2)
        shared = self.network.trunk.named_parameters()
        if hasattr(self, "balancer"):  # Every `fit` calls this method.
            self.balancer_state = self.balancer.state_dict()
            self.balancer.close()
        self.balancer = cs.GradientBalancer(shared, TASKS, optimizer=adam)
        if self.balancer_state is not None:
            self.balancer.load_state_dict(self.balancer_state)
        return adam

    def training_step(self, batch: Any, number: int) -> Tensor:
        self.task, images, target = batch
        return loss_of(self.task, self.network(images, self.task), target)

    def backward(self, loss: Tensor, *others: Any, **options: Any) -> None:
        with self.balancer.task(self.task):
            super().backward(loss, *others, **options)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.balancer.report().scalars())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["balancer"] = self.balancer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.balancer_state = checkpoint["balancer"]  # The optimizer does not exist yet.


def train(epochs: int = 4, resume: str | None = None, **options: Any) -> tuple[Module, Any]:
    """Makes two steps per epoch: with four batches, and with the remaining two."""
    module = Module()
    loader = torch.utils.data.DataLoader(make_task_batches(), batch_size=None)
    trainer = lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=4, **options)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


if __name__ == "__main__":
    module, _ = train(logger=False, enable_checkpointing=False)
    print(module.balancer.report())
