"""The same training twice: with PCGrad written by hand, and with cs_kernels instead.

With two tasks, PCGrad's random order has no effect: in float64, parameters of the two loops agree
to within 1e-12.
"""

import torch
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train_by_hand(epochs: int = 4) -> tuple[Network, list]:
    """A backward pass per task, flat gradients, projections, and a copy back into `.grad`."""
    network = make_network(normalized=False)
    shared = list(network.trunk.parameters())
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)

    history = []
    for _ in range(epochs):
        for images, targets in make_batches():
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            adam.zero_grad()
            flat = []
            for loss in losses.values():
                for p in shared:
                    p.grad = None
                loss.backward(retain_graph=True)
                flat.append(torch.cat([p.grad.flatten() for p in shared]))
            projected = []
            for i, gradient in enumerate(flat):
                kept = gradient.clone()
                for j in torch.randperm(len(flat)).tolist():
                    dot = kept @ flat[j]
                    if j != i and dot < 0:
                        kept -= dot / flat[j].square().sum() * flat[j]
                projected.append(kept)
            pieces = sum(projected).split([p.numel() for p in shared])
            for p, piece in zip(shared, pieces, strict=True):
                p.grad = piece.view_as(p).clone()
            adam.step()
            history.append({task: loss.detach() for task, loss in losses.items()})
    return network, history


def train(epochs: int = 4) -> tuple[Network, list]:
    """The same training with `backward`, which frees the graph and makes no flat copies."""
    network = make_network(normalized=False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    opt = cs.MultiTaskOptimizer(network.trunk, adam, TASKS, cs.PCGrad())

    history = []
    for _ in range(epochs):
        for images, targets in make_batches():
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            history.append(opt.backward(losses))
            adam.step()
    return network, history


if __name__ == "__main__":
    for theirs, ours in zip(train_by_hand()[1], train()[1], strict=True):
        print("by hand", numbers(theirs), "cs_kernels", numbers(ours))
