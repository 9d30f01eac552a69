"""Task weights on several processes, with DistributedDataParallel or fully_shard.

Start it with torchrun --nproc-per-node=2 balanced_ranks.py [--sharded]. Parameters match those of
one process on whole batches to within 1e-4, and the task weights of all ranks are bit-equal.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from toy import TASKS, loss_of, make_batches, make_network

import cs_kernels as cs

BATCH = 4  # Over all ranks.


def make_loader() -> DataLoader:
    """Loads this rank's parts of the batches."""
    samples = [
        (images[n], {task: target[n] for task, target in targets.items()})
        for images, targets in make_batches(size=BATCH)
        for n in range(len(images))
    ]
    sampler = DistributedSampler(samples, shuffle=False)
    return DataLoader(samples, BATCH // dist.get_world_size(), sampler=sampler)


def train(epochs: int = 4, *, sharded: bool = False) -> tuple[torch.nn.Module, list]:
    """Makes a pass per task; ranks exchange gradients in the last pass of a step."""
    network = make_network(normalized=False)
    if sharded:
        for module in (network.trunk, network):
            fully_shard(module)
    else:
        # A pass reaches only its own task's head.
        network = DistributedDataParallel(network, find_unused_parameters=True)
    plain = network if sharded else network.module
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    balancer = cs.GradientBalancer(plain.trunk.parameters(), TASKS, optimizer=adam)
    history = []
    for _ in range(epochs):
        for images, targets in make_loader():
            for task in TASKS:
                is_last = task == TASKS[-1]
                if sharded:
                    network.set_requires_gradient_sync(is_last)
                alone = nullcontext() if sharded or is_last else network.no_sync()
                with alone, balancer.task(task):
                    loss_of(task, network(images, task), targets[task]).backward()
            adam.step()
            adam.zero_grad()
            history.append(balancer.report().scalars())
    return plain, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    # On GPUs, use "nccl", and put the network and the batches on device LOCAL_RANK.
    dist.init_process_group("gloo")
    history = train(sharded=options.sharded)[1]
    if dist.get_rank() == 0:
        for scalars in history:
            print({name: round(value, 4) for name, value in scalars.items()})
    dist.destroy_process_group()
