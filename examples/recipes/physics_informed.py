"""A physics-informed network: Adam with surgery first, then L-BFGS on the sum of the losses.

u'' + u = 0 on [0, 6] with u(0) = 0 and u'(0) = 1 has the solution sin x. In float64, the parameters
after Adam match those of a plain loop to within 1e-10.
"""

import torch
from torch import Tensor, nn

import cs_kernels as cs

TASKS = ["equation", "boundary"]


def make_network() -> nn.Module:
    """A network without heads: both losses share all parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(1, 32), nn.Tanh()), *(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1)
    )


def losses_of(network: nn.Module) -> dict[str, Tensor]:
    """The residual of the equation at 64 points, and the two conditions at 0."""
    x = torch.linspace(0, 6, 64)[:, None].requires_grad_()
    u = network(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    conditions = torch.stack([u[0, 0], slope[0, 0] - 1])
    return {"equation": (curvature + u).square().mean(), "boundary": conditions.square().mean()}


def train_with_surgery(network: nn.Module, steps: int = 300) -> list:
    """Trains with Adam, with conflicts between the two gradients removed."""
    adam = torch.optim.Adam(network.parameters(), lr=3e-3)
    opt = cs.MultiTaskOptimizer(network, adam, TASKS, cs.UPGrad())
    history = []
    for _ in range(steps):
        history.append(opt.backward(losses_of(network)))
        adam.step()
    return history


def train_on_the_sum(network: nn.Module, steps: int = 100) -> float:
    """Trains with L-BFGS, whose line search needs the gradient of the function it evaluates."""
    lbfgs = torch.optim.LBFGS(network.parameters(), line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        lbfgs.zero_grad()
        total = sum(losses_of(network).values())
        total.backward()
        return total

    for _ in range(steps):
        total = lbfgs.step(closure)
    return float(total.detach())


def error(network: nn.Module) -> float:
    """The relative L2 error."""
    x = torch.linspace(0, 6, 200)[:, None]
    with torch.no_grad():
        return float((network(x) - x.sin()).norm() / x.sin().norm())


if __name__ == "__main__":
    network = make_network()
    for losses in train_with_surgery(network)[::50]:
        print({task: round(loss.item(), 4) for task, loss in losses.items()})
    print("after Adam", error(network))
    train_on_the_sum(network)
    print("after L-BFGS", error(network))
