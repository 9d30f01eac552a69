"""A template for training on several processes: replicated or sharded, with checkpoints.

    torchrun --standalone --nproc-per-node=2 examples/ranks.py [--sharded] [--steps N]
        [--checkpoint FOLDER] [--fixed-statistics]

A checkpoint is written every ten steps and at the end. Training resumes from the last one in
FOLDER, on any number of ranks, and with or without --sharded. The batches do not depend on the
number of ranks; with fixed statistics, losses differ only by rounding.
"""

import argparse
import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import cs_kernels as cs

TASKS = ["sum", "product"]
BATCH = 32  # Over all ranks.
SAVE_EVERY = 10


def make_data() -> TensorDataset:
    """Pictures of two channels, and means over pixels of the channels' sum and product."""
    x = torch.randn(256, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1).mean((1, 2)), x.prod(1).mean((1, 2)))


def make_network(device: torch.device, *, sharded: bool) -> nn.ModuleDict:
    """A trunk and a head for each task."""
    torch.manual_seed(0)  # All ranks begin with the same values.
    trunk = nn.Sequential(
        *(nn.Conv2d(2, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
    )
    cs.nn.convert_task_batchnorm(trunk, TASKS)  # Makes new parameters, so before fully_shard.
    heads = nn.ModuleDict({t: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)) for t in TASKS})
    network = nn.ModuleDict({"trunk": trunk, "heads": heads}).to(device)
    if sharded:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (trunk[0], trunk[3], trunk, *heads.values()):
            fully_shard(module, mesh=mesh)
    return network


def parts(
    network: nn.Module, adam: torch.optim.Optimizer, opt: cs.MultiTaskOptimizer
) -> dict[str, Any]:
    """The parts of a checkpoint, under names that do not depend on the ranks."""
    model, optimizer = get_state_dict(network, adam)
    return {"model": model, "adam": optimizer, "opt": opt}


def main() -> None:
    """Trains, and prints the losses on the first rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sharded", action="store_true", help="use fully_shard")
    parser.add_argument("--steps", type=int, default=40, help="in all, before and after resuming")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all ranks can access")
    parser.add_argument(
        "--fixed-statistics", action="store_true", help="do not normalize by a rank's own batch"
    )
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        raise ValueError(f"the number of ranks must divide the batch of {BATCH}, got {ranks}")

    network = make_network(device, sharded=options.sharded)
    trunk, heads = network["trunk"], network["heads"]
    trunk.train(not options.fixed_statistics)
    # Together, the ranks' parts form one batch, which is the same for any number of ranks.
    sampler = DistributedSampler(data := make_data(), seed=0)
    loader = DataLoader(data, BATCH // ranks, sampler=sampler)
    adam = torch.optim.Adam(network.parameters(), lr=3e-3)
    schedule = cs.Mixed(epochs=-(-options.steps // len(loader)), draw="step")
    opt = cs.MultiTaskOptimizer(
        *(trunk, adam, TASKS, cs.ConnectionStrength(), schedule),
        process_group=None if options.sharded else dist.group.WORLD,
    )

    def loss(x: Tensor, targets: dict[str, Tensor], task: str) -> Tensor:
        return (heads[task](trunk(x))[:, 0] - targets[task]).square().mean()

    step, folder = 0, options.checkpoint
    if folder is not None:
        # Metadata are written last, so a folder without them is from an interrupted write.
        step = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
    if step:
        state = parts(network, adam, opt)
        dcp.load(state, checkpoint_id=folder / str(step))
        set_state_dict(
            network, adam, model_state_dict=state["model"], optim_state_dict=state["adam"]
        )
    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        opt.start_epoch(epoch)
        for batch in islice(loader, done, done + options.steps - step):
            x, *targets = (tensor.to(device) for tensor in batch)
            phase = opt.phase
            losses = opt.step(partial(loss, x, dict(zip(TASKS, targets, strict=True))))
            if rank == 0:
                values = ", ".join(f"{task} {mean.item():.9f}" for task, mean in losses.items())
                print(f"step {step}: phase {phase}, {values}", flush=True)
            step += 1
            if folder is not None and (step % SAVE_EVERY == 0 or step == options.steps):
                dcp.save(parts(network, adam, opt), checkpoint_id=folder / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
