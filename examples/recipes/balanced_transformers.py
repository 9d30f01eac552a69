"""The Trainer of transformers with task weights: wraps one method, and replaces no step.

In float64, parameters agree to 1e-7 with those of a loop that multiplies each task's exact gradient
of the trunk by the previous step's weights. A resumed run is bit-equal to an uninterrupted one.
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments

import cs_kernels as cs

TASKS = ["topic", "order"]  # A class per text, and a class per word.


class Network(nn.Module):
    """BERT and a head per task; returns one task's loss."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.topic, self.order = nn.Linear(config.hidden_size, 3), nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids: Tensor, labels: Tensor, task: str) -> dict[str, Tensor]:
        words = self.bert(input_ids).last_hidden_state
        outputs = self.topic(words[:, 0]) if task == "topic" else self.order(words).mT
        return {"loss": nn.functional.cross_entropy(outputs, labels)}


class BalancedTrainer(Trainer):
    """Keeps the Trainer's own steps; a batch has the texts of one task."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any) -> Tensor:
        with self.balancer.task(inputs["task"]):
            return super().training_step(model, inputs, *others)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | self.balancer.report().scalars(), start_time)


class SaveBalancer(TrainerCallback):
    """Saves the balancer's state in the Trainer's checkpoints."""

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        folder = f"{arguments.output_dir}/checkpoint-{state.global_step}"
        if arguments.should_save:
            torch.save(self.balancer.state_dict(), f"{folder}/balancer.pt")


def train(folder: str, resume: str | None = None, dropout: float = 0.1, **options: Any) -> Trainer:
    """Trains three epochs of three steps: two with three batches, one with the remaining two."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, hidden_size=24, intermediate_size=48, num_hidden_layers=2)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    batches = []  # One task per batch; words are numbers, and labels of "order" mark increases.
    for x in torch.randint(30, (4, 8, 8)):
        batches.append({"input_ids": x, "labels": x[:, 0] // 10, "task": "topic"})
        batches.append({"input_ids": x, "labels": (x > x.roll(1, 1)).long(), "task": "order"})
    options = {"gradient_accumulation_steps": 3, "logging_steps": 1} | options
    arguments = TrainingArguments(folder, per_device_train_batch_size=1, **options)
    network = Network(config).to(arguments.device)
    adam = torch.optim.AdamW(network.parameters(), lr=1e-2)
    balancer = cs.GradientBalancer(network.bert.parameters(), TASKS, optimizer=adam)
    if resume is not None:
        balancer.load_state_dict(torch.load(f"{resume}/balancer.pt"))
    # Here, a sample of the Trainer is a whole batch.
    given = network, arguments, lambda samples: samples[0], batches
    callback = SaveBalancer()
    trainer = BalancedTrainer(*given, callbacks=[callback], optimizers=(adam, None))
    callback.balancer = trainer.balancer = balancer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(folder)
