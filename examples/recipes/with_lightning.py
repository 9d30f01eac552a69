"""Lightning with manual optimization: precision, checkpoints, and training for a number of batches.

Resumed or not, parameters and running statistics match those of a plain loop: in float64 to within
1e-12, and in mixed precision, with the same autocast, to within 1e-6.
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor
from toy import TASKS, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


class Module(lightning.LightningModule):
    """The network and its MultiTaskOptimizer, for a given number of training batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches = batches
        self.automatic_optimization = False
        self.network = make_network()
        cs.nn.convert_task_batchnorm(self.network.trunk, TASKS)
        self.opt_state, self.history = None, []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=1e-2)

    def on_train_start(self) -> None:
        # Lightning's optimizer and backward pass handle the precision. With the torch optimizer of
        # configure_optimizers, Lightning would count no steps, and so write no checkpoints.
        given = self.network.trunk, self.optimizers(), TASKS, None, cs.Switch(2)
        self.opt = cs.MultiTaskOptimizer(*given, backward=self.manual_backward)
        if self.opt_state is not None:
            self.opt.load_state_dict(self.opt_state)

    def on_train_epoch_start(self) -> None:
        self.opt.start_epoch(self.current_epoch)

    def training_step(self, batch: Any, number: int) -> None:
        images, targets = batch

        def loss(task: str) -> Tensor:
            return loss_of(task, self.network(images, task), targets[task])

        self.history.append(self.opt.step(loss))

    def on_train_batch_end(self, *_: Any) -> None:
        # Trainer(max_steps=...) would count the torch optimizer's steps, in Phase 1 one per task.
        if self.trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.batches:  # Over all epochs.
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["opt"] = self.opt.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.opt_state = checkpoint["opt"]  # The optimizer does not exist yet.


def train(batches: int = 12, resume: str | None = None, **options: Any) -> tuple[Module, Any]:
    """Trains two epochs of Phase 1, with a torch optimizer step per task, then Phase 2."""
    module = Module(batches)
    loader = torch.utils.data.DataLoader(make_batches(), batch_size=None)
    trainer = lightning.Trainer(max_epochs=-1, **options)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="32-true")
    options = {**vars(parser.parse_args()), "logger": False, "enable_checkpointing": False}
    for losses in train(**options)[0].history:
        print(numbers(losses))
