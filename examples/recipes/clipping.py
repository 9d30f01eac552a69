"""Gradient clipping: each task's gradient before surgery, or the update after surgery.

Clip before surgery if one task's outliers should not determine the update's direction. Clip after
surgery if the update's length needs a bound: call `clip_grad_norm_` after `opt.backward`, or use a
hook with `opt.step`, which steps the torch optimizer itself.

In float64, parameters and running statistics match those of plain loops to within 1e-12.
"""

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

MAX_NORM = 0.5


def loss_with_outliers(step: int, task: str, prediction: Tensor, target: Tensor) -> Tensor:
    """The loss; in every fourth step, the depth loss is a hundred times as large."""
    factor = 100 if task == "depth" and step % 4 == 3 else 1
    return factor * loss_of(task, prediction, target)


def train(*, before: bool, epochs: int = 4) -> tuple[Network, list]:
    """With `backward`: clips either before or after surgery."""
    network = make_network(normalized=False)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    method = cs.Clipped(cs.PCGrad(), MAX_NORM) if before else cs.PCGrad()
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, method)

    history = []
    for step, (images, targets) in enumerate(epochs * make_batches()):
        features = network.trunk(images)
        predictions = {task: network.heads[task](features) for task in TASKS}
        losses = {t: loss_with_outliers(step, t, predictions[t], targets[t]) for t in TASKS}
        history.append(opt.backward(losses))
        if before:
            # Clipped clips only the trunk's gradients, but the heads' gradients have outliers, too.
            for head in network.heads.values():
                clip_grad_norm_(head.parameters(), MAX_NORM)
        else:
            clip_grad_norm_(network.parameters(), MAX_NORM)
        sgd.step()
    return network, history


def train_with_hook(epochs: int = 4) -> tuple[Network, list]:
    """With `step`: clips the update; in Phase 1, each task's update."""
    network = make_network()
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    def clip(*_: object) -> None:  # Must return None; other results replace `step`'s arguments.
        clip_grad_norm_(network.parameters(), MAX_NORM)

    sgd.register_step_pre_hook(clip)
    # ConnectionStrength, the default, allows clipping only after surgery.
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, schedule=cs.Switch(2))

    history, batches = [], make_batches()
    for step, (images, targets) in enumerate(epochs * batches):
        opt.start_epoch(step // len(batches))
        losses = opt.step(
            lambda task: loss_with_outliers(step, task, network(images, task), targets[task])
        )
        history.append(losses)
    return network, history


if __name__ == "__main__":
    for losses in train(before=True)[1] + train(before=False)[1] + train_with_hook()[1]:
        print(numbers(losses))
