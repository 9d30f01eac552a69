"""Training on several processes, each with its part of every batch.

Start it with torchrun --nproc-per-node=2 on_many_ranks.py. In float64, parameters and running
statistics agree to 1e-12 with those of a plain loop that runs every part separately and averages
the gradients. All ranks end with the same parameters and statistics.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

BATCH = 4  # Over all ranks.


def make_loader() -> DataLoader:
    """Loads this rank's parts of the batches."""
    batches = make_batches(size=BATCH)
    samples = [
        (images[n], {task: target[n] for task, target in targets.items()})
        for images, targets in batches
        for n in range(len(images))
    ]
    sampler = DistributedSampler(samples, shuffle=False)
    return DataLoader(samples, BATCH // dist.get_world_size(), sampler=sampler)


def train(epochs: int = 4) -> tuple[Network, list]:
    """Trains as in a single process, except that there is a process group."""
    network = make_network()  # From the same seed on all ranks, or from a checkpoint.
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    given = network.trunk, adam, TASKS
    opt = cs.MultiTaskOptimizer(*given, schedule=cs.Switch(2), process_group=dist.group.WORLD)
    loader = make_loader()
    history = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        opt.start_epoch(epoch)
        for images, targets in loader:
            # The returned losses are means over the ranks.
            losses = opt.step(lambda task: loss_of(task, network(images, task), targets[task]))
            history.append(losses)
    return network, history


if __name__ == "__main__":
    # On GPUs, use "nccl", and put the network and the batches on device LOCAL_RANK.
    dist.init_process_group("gloo")
    trained, history = train()
    if dist.get_rank() == 0:
        for losses in history:
            print(numbers(losses))
    dist.destroy_process_group()
