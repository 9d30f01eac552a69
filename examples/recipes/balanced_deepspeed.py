"""DeepSpeed's engine (ZeRO stages 0 to 2) with task weights; its loop does not change.

Start it with deepspeed --num_gpus=2 balanced_deepspeed.py, or with torchrun. Parameters agree to
1e-6 with those of a single process that trains on whole batches without DeepSpeed.
"""

import deepspeed
import torch
import torch.distributed as dist
from toy import TASKS, loss_of, make_batches, make_network

import cs_kernels as cs

BATCH = 4  # Over all ranks.


def train(epochs: int = 4, stage: int = 2) -> tuple[torch.nn.Module, list]:
    """Makes a forward and a backward pass per task; the last `engine.step` updates parameters."""
    deepspeed.init_distributed()
    rank, size = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // size,
        "gradient_accumulation_steps": len(TASKS),  # Passes per update.
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    network = make_network(normalized=False)
    sgd = torch.optim.SGD(network.parameters(), lr=1e-2)
    engine, optimizer, _, _ = deepspeed.initialize(model=network, optimizer=sgd, config=config)
    balancer = cs.GradientBalancer(network.trunk.parameters(), TASKS, optimizer=optimizer)
    history = []
    for _ in range(epochs):
        for images, targets in make_batches(size=BATCH):
            for task in TASKS:
                target = targets[task].chunk(size)[rank].to(engine.device)
                part = images.chunk(size)[rank].to(engine.device)
                with balancer.task(task):
                    loss = loss_of(task, engine(part, task), target)
                    # Otherwise, the engine divides every loss by the number of passes.
                    engine.backward(loss, scale_wrt_gas=False)
                engine.step()
            history.append(balancer.report().scalars())
    return network, history


if __name__ == "__main__":
    for scalars in train()[1]:
        print({name: round(value, 4) for name, value in scalars.items()})
