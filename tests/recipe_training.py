"""Shared by the recipes' tests: the toy problem, and plain loops that train it."""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_operators
from plain_training import PlainTraining, largest_difference
from torch import Tensor, nn

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
sys.path.insert(0, str(FOLDER))  # As for a script in this folder.

import toy  # noqa: E402

TASKS = toy.TASKS
PRIORITIZED = {"trunk.0.weight": "trunk.1", "trunk.3.weight": "trunk.4"}
PHASES = [1] * 6 + [2] * 6
"""The phases of Switch(2), in four epochs of three steps."""
MIXED_PHASES = [1, 1, 1, 1, 2, 1, 2, 1, 2, 2, 2, 2]
"""The phases of Mixed(epochs=4, seed=0, draw="step")."""


def recipe(name: str) -> Any:
    framework = re.search("accelerate|deepspeed|fabric|lightning|peft|timm|transformers", name)
    if framework:
        torchvision_operators.define()
        pytest.importorskip(framework[0].replace("fabric", "lightning"))
    if name.endswith("deepspeed"):  # DeepSpeed would compile an operator.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return importlib.import_module(name)


def stated(module: Any, which: int = 0) -> float:
    """A tolerance that the recipe's docstring states."""
    return float(re.findall(r"\bto\s(?:within\s)?(\de-\d+)", module.__doc__)[which])


def assert_equal_as_stated(
    module: Any, found: nn.Module, expected: dict[str, Tensor], which: int = 0
) -> None:
    """Compares states with the docstring's tolerance; the numbers of batches must be equal."""
    tolerance = stated(module, which)
    state = found.state_dict()
    difference = largest_difference(state, expected)
    print(f"{module.__name__}: stated {tolerance:.0e}, largest difference {difference:.1e}")
    assert difference <= tolerance
    for name in state:
        if name.endswith("num_batches_tracked"):
            assert state[name] == expected[name] > 0


def loss_of_batch(network: nn.Module, batch: toy.Batch, task: str) -> Tensor:
    images, targets = batch
    return toy.loss_of(task, network(images, task), targets[task])


def plain_training(
    network: nn.Module | None = None,
    loss: Callable[..., Tensor] = loss_of_batch,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    prioritized: dict[str, str] = PRIORITIZED,
    kind: type[PlainTraining] = PlainTraining,
    **options: Any,
) -> PlainTraining:
    given = toy.make_network() if network is None else network, TASKS, loss, optimizer, prioritized
    return kind(*given, **{"lr": 1e-2, **options})


def plain_pcgrad(**options: Any) -> PlainTraining:
    """PCGrad on a network without normalization."""
    return plain_training(toy.make_network(normalized=False), prioritized={}, **options)


Steps = Sequence[Sequence[toy.Batch]]
"""The micro-batches of each step of an epoch."""


def steps_of(batches: int = 3, micro_batches: int = 1) -> Steps:
    data = toy.make_batches(batches)
    return [data[n : n + micro_batches] for n in range(0, batches, micro_batches)]


def trained(
    plain: PlainTraining,
    phases: Sequence[int] = PHASES,
    steps: Steps | None = None,
    labeled: Sequence[Sequence[str] | None] = (None,),
) -> dict[str, Tensor]:
    """Makes a step for each entry of `phases`; returns the state.

    `labeled` has the tasks of each step, or None for all tasks, and is repeated as needed.
    """
    steps = steps_of() if steps is None else steps
    for n, phase in enumerate(phases):
        plain.step(phase, steps[n % len(steps)], labeled[n % len(labeled)])
    assert plain.conflicts > 0 or 2 not in phases
    return plain.state()
