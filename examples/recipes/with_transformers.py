"""The Trainer of transformers with gradients from MultiTaskOptimizer.

Parameters match those of a plain loop: in float64 to within 1e-12, and in mixed precision, with SGD
and the same autocast, to within 1e-6. A resumed run is bit-equal to an uninterrupted one.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertPreTrainedModel, Trainer, TrainingArguments

import cs_kernels as cs

TASKS = ["topic", "order"]  # A class per text, and a class per word.


class Network(BertPreTrainedModel):
    """BERT and a head per task; returns the losses, and their sum for the Trainer's evaluation."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.topic, self.order = nn.Linear(config.hidden_size, 3), nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: Tensor, topic_labels: Tensor, order_labels: Tensor) -> dict:
        words = self.bert(input_ids).last_hidden_state
        topic = nn.functional.cross_entropy(self.topic(words[:, 0]), topic_labels)
        order = nn.functional.cross_entropy(self.order(words).mT, order_labels)
        return {"topic": topic, "order": order, "loss": topic + order}


class MultiTaskTrainer(Trainer):
    """Keeps the Trainer's clipping, optimizer steps, schedule, checkpoints and evaluation."""

    def _prepare_for_training(self, steps: int, loader: Any, checkpoint: str | None) -> Any:
        # The Trainer creates its optimizer here and, on several ranks, wraps the network.
        model, loader = super()._prepare_for_training(steps, loader, checkpoint)
        given = model, self.optimizer, TASKS, cs.PCGrad()
        self.opt = cs.MultiTaskOptimizer(*given, backward=self.accelerator.backward)
        if checkpoint is not None:
            self.opt.load_state_dict(torch.load(f"{checkpoint}/opt.pt"))
        return model, loader

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.opt.state_dict(), f"{output_dir}/opt.pt")

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch: Any = None):
        outputs = model.train()(**self._prepare_inputs(inputs))
        losses = {task: outputs[task] / self.current_gradient_accumulation_steps for task in TASKS}
        return sum(self.opt.backward(losses, update=self.accelerator.sync_gradients).values())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Logs of evaluations and of the end of training have no "loss".
        super().log(logs | (self.opt.report().scalars() if "loss" in logs else {}), start_time)


def train(folder: str, resume: str | None = None, dropout: float = 0.1, **options: Any) -> Trainer:
    """Trains three epochs of two updates: with two batches, and with the remaining one."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=24, intermediate_size=48, num_hidden_layers=2)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    texts = [  # Words are numbers; the order label marks increases.
        {"input_ids": x, "topic_labels": x[0] // 10, "order_labels": (x > x.roll(1)).long()}
        for x in torch.randint(30, (20, 8))
    ]
    options = {"learning_rate": 1e-2, "logging_steps": 1} | options
    arguments = TrainingArguments(folder, gradient_accumulation_steps=2, **options)
    trainer = MultiTaskTrainer(Network(config), arguments, train_dataset=texts)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
