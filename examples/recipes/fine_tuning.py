"""A complete fine-tuning loop that protects the loss on an old text.

The loop has two micro-batches per update, autocast, clipping, a cosine schedule, a log of
conflicts, and checkpoints; it skips updates with a non-finite loss. In float64, parameters match
those of a plain loop to within 1e-12, whether or not the run was resumed.
"""

from pathlib import Path

import torch
from atomic import atomic_write
from torch import Tensor, nn

import cs_kernels as cs

TASKS, UPDATES, MICRO_BATCHES = ["old", "new"], 12, 2


def make_network() -> nn.Module:
    """A small language model; as the trunk, it is protected together with its head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))


def make_batch(task: str, number: int) -> Tensor:
    """Token ids, [4, 16]: the old text counts up, the new one down."""
    starts = torch.randint(32, (4, 1), generator=torch.Generator().manual_seed(number))
    return (starts + (1 if task == "old" else -1) * torch.arange(16)) % 32


def loss_of(network: nn.Module, ids: Tensor, autocast: bool = True) -> Tensor:
    """The mean cross-entropy of the next token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = network(ids[:, :-1])
    labels = ids[:, 1:].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1).to(network[-1].weight), labels)


def train(
    updates: int = UPDATES, checkpoint: Path | None = None, autocast: bool = True
) -> tuple[nn.Module, list]:
    """Trains up to an update; resumes from the checkpoint, if there is one, and writes it."""
    network = make_network()
    adamw = torch.optim.AdamW(network.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, UPDATES)
    opt = cs.MultiTaskOptimizer(network, adamw, TASKS, cs.Protect("old"))
    parts, first = {"network": network, "adamw": adamw, "cosine": cosine, "opt": opt}, 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["update"]

    history = []
    for update in range(first, updates):
        finite = True
        for n in range(MICRO_BATCHES):
            batches = {task: make_batch(task, MICRO_BATCHES * update + n) for task in TASKS}
            losses = {
                t: loss_of(network, ids, autocast) / MICRO_BATCHES for t, ids in batches.items()
            }
            finite = finite and all(loss.isfinite() for loss in losses.values())
            opt.backward(losses, update=n == MICRO_BATCHES - 1)
        if finite:  # Synchronizes with the device.
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            adamw.step()
        else:
            adamw.zero_grad()  # Marks this update as dropped.
        cosine.step()
        history.append(opt.report().scalars())  # To W&B or TensorBoard; not in every update.
    if checkpoint is not None:
        with atomic_write(checkpoint) as file:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**states, "update": updates}, file)
    return network, history


if __name__ == "__main__":
    for scalars in train()[1]:
        print({name: round(value, 4) for name, value in scalars.items() if "cosine" in name})
