"""The same training twice: with TorchJD, and with cs_kernels instead.

TorchJD adds a small number (reg_eps, 1e-4) to the diagonal of the normalized Gramian; cs_kernels
does not. In float64, parameters of both loops agree to 1e-3, or to 1e-10 with reg_eps=1e-12.
"""

import torch
from torchjd.aggregation import Aggregator, UPGrad
from torchjd.autojac import jac_to_grad, mtl_backward
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train_torchjd(epochs: int = 4, aggregator: Aggregator | None = None) -> tuple[Network, list]:
    """Computes the trunk's Jacobians in `.jac`, from which UPGrad computes `.grad`."""
    network = make_network(normalized=False)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    aggregator = UPGrad() if aggregator is None else aggregator

    history = []
    for _ in range(epochs):
        for images, targets in make_batches():
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            sgd.zero_grad()
            mtl_backward(list(losses.values()), features=features)
            jac_to_grad(network.trunk.parameters(), aggregator)
            sgd.step()
            history.append({task: loss.detach() for task, loss in losses.items()})
    return network, history


def train(epochs: int = 4) -> tuple[Network, list]:
    """`backward` does everything: zero_grad, the backward passes, and the aggregation."""
    network = make_network(normalized=False)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, cs.UPGrad())

    history = []
    for _ in range(epochs):
        for images, targets in make_batches():
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            history.append(opt.backward(losses))
            sgd.step()
    return network, history


if __name__ == "__main__":
    for theirs, ours in zip(train_torchjd()[1], train()[1], strict=True):
        print("TorchJD", numbers(theirs), "cs_kernels", numbers(ours))
