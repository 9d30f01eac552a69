"""The Trainer of transformers learns a new text, with the loss on an old text protected.

Every fourth update makes a forward and a backward pass of the old text, in its last micro-batch.
The whole decoder is the trunk, so that its head is protected, too. In float64, parameters match
those of a plain loop to within 1e-12. A resumed run is bit-equal to an uninterrupted one.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cs_kernels as cs

TASKS = ["old", "new"]


class ProtectingTrainer(Trainer):
    """Keeps the Trainer's mean over tokens, clipping, schedule, checkpoints and evaluation."""

    old: Tensor
    """Batches of the old text, one per update."""

    def _prepare_for_training(self, steps: int, loader: Any, checkpoint: str | None) -> Any:
        # The Trainer creates its optimizer here.
        model, loader = super()._prepare_for_training(steps, loader, checkpoint)
        given = model, self.optimizer, TASKS, cs.Protect("old", refresh_every=4)
        self.opt = cs.MultiTaskOptimizer(*given, backward=self.accelerator.backward)
        if checkpoint is not None:
            self.opt.load_state_dict(torch.load(f"{checkpoint}/opt.pt"))
        return model, loader

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.opt.state_dict(), f"{output_dir}/opt.pt")

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: Any = None):
        model.train()
        inputs, last = self._prepare_inputs(inputs), self.accelerator.sync_gradients
        # The model divides by the number of labels in all micro-batches of the update.
        new = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        losses = {"new": new}
        if last and "old" in self.opt.due_tasks:
            ids = self.old[self.state.global_step % len(self.old)]
            old = self._prepare_inputs({"input_ids": ids, "labels": ids})
            losses["old"] = model(**old).loss
        return self.opt.backward(losses, update=last)["new"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Logs of evaluations and of the end of training have no "loss".
        super().log(logs | (self.opt.report().scalars() if "loss" in logs else {}), start_time)


def texts(count: int, direction: int) -> Tensor:
    """Token ids, [count, 16]: the old text counts up, the new one down."""
    starts = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(count))
    return (starts + direction * torch.arange(16)) % 32


def train(folder: str, resume: str | None = None, **options: Any) -> Trainer:
    """Trains two epochs of six updates, each with two batches of four texts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    samples = [{"input_ids": x, "labels": x} for x in texts(48, -1)]
    options = {"learning_rate": 1e-2, "logging_steps": 1, "num_train_epochs": 2} | options
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | options
    arguments = TrainingArguments(folder, **options)
    trainer = ProtectingTrainer(LlamaForCausalLM(config), arguments, train_dataset=samples)
    trainer.old = texts(20, 1).view(5, 4, 16)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
