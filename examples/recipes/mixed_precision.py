"""Mixed precision: autocast inside the closure, and a GradScaler for float16.

Parameters and running statistics match those of a plain loop with the same autocast and scaler to
within 1e-6.
"""

import argparse

import torch
from toy import TASKS, Network, loss_of, make_batches, make_network, numbers

import cs_kernels as cs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(epochs: int = 4, dtype: torch.dtype = torch.float16) -> tuple[Network, list]:
    """Trains two epochs of Phase 1, then Phase 2."""
    network = make_network().to(DEVICE)
    cs.nn.convert_task_batchnorm(network.trunk, TASKS)
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    # Bfloat16 has the range of float32 and needs no scaler.
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, enabled=dtype == torch.float16)
    opt = cs.MultiTaskOptimizer(network.trunk, sgd, TASKS, schedule=cs.Switch(2), scaler=scaler)

    history = []
    for epoch in range(epochs):
        opt.start_epoch(epoch)
        for images, targets in make_batches():
            images = images.to(DEVICE)
            targets = {task: target.to(DEVICE) for task, target in targets.items()}

            def loss(task: str) -> torch.Tensor:
                # Not around opt.step: torch caches cast weights until autocast ends, so in Phase 1
                # the second task would use the weights from before the first update.
                with torch.autocast(DEVICE, dtype):
                    prediction = network(images, task)
                return loss_of(task, prediction.float(), targets[task])

            history.append(opt.step(loss))
    return network, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bfloat16", action="store_true")
    dtype = torch.bfloat16 if parser.parse_args().bfloat16 else torch.float16
    for losses in train(dtype=dtype)[1]:
        print(numbers(losses))
