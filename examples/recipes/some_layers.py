"""Surgery on the last shared layer only; the layers before it get the plain sum.

PCGrad then stores K gradients of one layer, not of the whole trunk. In float64, parameters match
those of a plain loop to within 1e-12.
"""

import torch
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs


def train(epochs: int = 4) -> tuple[Network, list]:
    """Passes only the last layer as `trunk`; the optimizer has all parameters."""
    network = make_network(normalized=False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    last = network.trunk[3]  # The second convolution.
    opt = cs.MultiTaskOptimizer(last, adam, TASKS, cs.PCGrad())

    history = []
    for _ in range(epochs):
        for images, targets in make_batches():
            features = network.trunk(images)
            losses = {t: loss_of(t, network.heads[t](features), targets[t]) for t in TASKS}
            history.append(opt.backward(losses))
            adam.step()
    return network, history


if __name__ == "__main__":
    for losses in train()[1]:
        print(numbers(losses))
