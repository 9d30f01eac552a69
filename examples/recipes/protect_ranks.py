"""Protects an old objective on several processes; fully_shard shards its gradient, too.

Start it with torchrun --nproc-per-node=2 protect_ranks.py. In float64, parameters match those of
one process on whole batches to within 1e-12.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from toy import loss_of, make_batches, make_network, numbers

import cs_kernels as cs

OLD, NEW = TASKS = ["depth", "edges"]


def train(epochs: int = 4) -> tuple[torch.nn.Module, list]:
    """Trains; every fourth step makes a forward and a backward pass of the old objective."""
    network = make_network(normalized=False)
    for module in (network.trunk, network):
        fully_shard(module)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    method = cs.Protect(OLD, refresh_every=4)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, method)
    rank, size = dist.get_rank(), dist.get_world_size()
    history = []
    for _ in range(epochs):
        for images, targets in make_batches(size=4):
            part = images.chunk(size)[rank]

            def loss(task: str) -> torch.Tensor:
                target = targets[task].chunk(size)[rank]
                return loss_of(task, network(part, task), target)

            history.append(opt.step(loss))
    return network, history


if __name__ == "__main__":
    # On GPUs, use "nccl", and put the network and the batches on device LOCAL_RANK.
    dist.init_process_group("gloo")
    history = train()[1]
    if dist.get_rank() == 0:
        for losses in history:
            print(numbers(losses))
    dist.destroy_process_group()
