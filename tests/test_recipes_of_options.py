"""Recipes for options of `MultiTaskOptimizer` and its steps, each against a plain torch loop."""

import json
import struct
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from loops import numbers
from plain_training import Gradients, PlainTraining
from recipe_training import (
    MIXED_PHASES,
    PHASES,
    TASKS,
    assert_equal_as_stated,
    loss_of_batch,
    plain_pcgrad,
    plain_training,
    recipe,
    stated,
    toy,
    trained,
)
from torch import nn

import cs_kernels as cs

# TensorBoard causes some warnings.
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class _Clipping(PlainTraining):
    """Clips each task's trunk and head gradients separately, or the whole update."""

    before = False
    max_norm = 0.5

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.clipped: list[bool] = []

    def _clip(self, grads, eps):
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        self.clipped.append(bool(norm + eps > self.max_norm))
        factor = self.max_norm / (norm + eps) if self.clipped[-1] else 1
        return {p: grad * factor for p, grad in grads.items()}

    def gradients(self, task, micro_batches):
        grads = super().gradients(task, micro_batches)
        if not self.before:
            return grads
        trunk = set(self.networks[task].trunk.parameters())
        parts = ({p: g for p, g in grads.items() if (p in trunk) == inside} for inside in (1, 0))
        return {**self._clip(next(parts), 0.0), **self._clip(next(parts), 1e-6)}  # As torch does.

    def _apply(self, update):
        super()._apply(update if self.before else self._clip(update, 1e-6))


@pytest.mark.parametrize("way", ["before", "after", "hook"])
def test_clipping(float64, way):
    module = recipe("clipping")
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "kind": _Clipping}
    if way == "hook":
        (network, _), phases = module.train_with_hook(), PHASES
        plain = plain_training(**options)
    else:
        (network, _), phases = module.train(before=way == "before"), [2] * 12
        plain = plain_pcgrad(**options)
        plain.before = way == "before"

    def loss(step, network, batch, task):
        huge = task == "depth" and step in (3, 7, 11)
        return (100 if huge else 1) * loss_of_batch(network, batch, task)

    batches = toy.make_batches()
    for step, phase in enumerate(phases):
        plain.loss = partial(loss, step)
        plain.step(phase, [batches[step % 3]])
    assert_equal_as_stated(module, network, plain.state())
    assert plain.conflicts > 0
    assert 3 <= sum(plain.clipped) <= len(plain.clipped) - 3  # At least the outliers, but not all.


class _MuonAndAdamW:
    """Muon and AdamW as one optimizer, for a plain loop."""

    def __init__(self, matrices: list[nn.Parameter], parameters: dict[nn.Parameter, None]):
        others = [p for p in parameters if p not in set(matrices)]
        muon = torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")
        self.both = muon, torch.optim.AdamW(others, lr=1e-2)
        self.param_groups = [group for one in self.both for group in one.param_groups]

    def step(self):
        for one in self.both:
            one.step()


def test_several_optimizers(float64, tmp_path):
    module = recipe("several_optimizers")
    torch.manual_seed(0)
    network = module.Network()
    prioritized = {"trunk.1.weight": "trunk.2", "trunk.4.weight": "trunk.5"}
    matrices = [network.get_parameter(name) for name in prioritized]
    plain = PlainTraining(
        network, TASKS, loss_of_batch, partial(_MuonAndAdamW, matrices), prioritized
    )
    of_muon, of_adamw = plain.optimizer.param_groups
    for epoch in range(4):
        # Muon's rate follows half a cosine to 0; AdamW's falls linearly to a tenth.
        of_muon["lr"] = 0.005 * (1 + torch.tensor(epoch * torch.pi / 4).cos().item())
        of_adamw["lr"] = 0.01 * (1 - 0.9 * epoch / 4)
        expected = trained(plain, MIXED_PHASES[3 * epoch : 3 * epoch + 3])
    found, history = module.train()
    assert len(history) == 12
    assert_equal_as_stated(module, found, expected)
    for epochs in range(1, 5):
        found, history = module.train(epochs, tmp_path / "checkpoint")
        assert len(history) == 3
    assert_equal_as_stated(module, found, expected)


def _dynamic(means: list[dict[str, float]]):
    """Liu et al. 2019, eq. (7), with a temperature of 1."""
    if len(means) < 2:
        return dict.fromkeys(TASKS, 1.0)
    rates = torch.tensor([means[-1][task] / means[-2][task] for task in TASKS])
    return dict(zip(TASKS, (2 * rates.softmax(0)).tolist(), strict=True))


def _weighted_plainly(name):
    """Trains for five epochs, and records the weight of each loss in each step."""
    network = toy.make_network(normalized=False)
    if name == "uncertainty":
        zeros = {task: torch.zeros(()) for task in TASKS}
        network.log_sigma = nn.ParameterDict(zeros)
    losses: dict[str, list[float]] = {task: [] for task in TASKS}
    weights: list[dict[str, float]] = []
    dynamic: dict[str, float] = {}

    def loss(network, batch, task):
        plain_loss = loss_of_batch(network, batch, task)
        losses[task].append(plain_loss.item())
        if name == "dynamic":
            weights[-1][task] = dynamic[task]
            return dynamic[task] * plain_loss
        precision = (-2 * network.log_sigma[task]).exp() / (2 if task == "depth" else 1)
        weights[-1][task] = precision.item()
        return precision * plain_loss + network.log_sigma[task]

    plain = plain_training(network, loss, prioritized={})
    means: list[dict[str, float]] = []
    for _ in range(5):
        dynamic = _dynamic(means)
        for batch in toy.make_batches():
            weights.append({})
            plain.step(2, [batch])
        means.append({task: sum(of_task[-3:]) / 3 for task, of_task in losses.items()})
    assert plain.conflicts > 0
    return plain, weights


@pytest.mark.parametrize("name", ["dynamic", "uncertainty"])
def test_weightings(float64, name, tmp_path):
    module = recipe("weightings")
    plain, weights = _weighted_plainly(name)
    network, history, opt = module.train(name)
    expected = plain.state()
    if name == "uncertainty":
        for task in TASKS:
            log_sigma = expected.pop(f"log_sigma.{task}")
            difference = opt.weighting.log_sigma[task] - log_sigma
            assert difference.abs() <= stated(module)
    assert_equal_as_stated(module, network, expected)
    # The logged weights.
    assert len(history) == len(weights) == 15
    for (_, logged), of_step in zip(history, weights, strict=True):
        assert {task: weight.item() for task, weight in logged.items()} == pytest.approx(of_step)
    assert weights[-1] != pytest.approx(weights[0], rel=1e-2)
    # Resumed runs.
    for epochs in range(1, 6):
        resumed, parts, opt_resumed = module.train(name, epochs, tmp_path / "checkpoint")
        assert len(parts) == 3
    assert numbers(resumed, opt_resumed) == numbers(network, opt)


def test_features(float64):
    module, plain = recipe("features"), toy.make_network()
    network, _ = module.train()
    adam, conflicts = torch.optim.Adam(plain.parameters(), lr=1e-2), 0
    for images, targets in 4 * toy.make_batches():
        features = plain.trunk(images)
        losses = [toy.loss_of(t, plain.heads[t](features), targets[t]) for t in TASKS]
        a, b = (torch.autograd.grad(x, features, retain_graph=True)[0] for x in losses)
        dot = (a * b).sum().clamp(max=0)
        conflicts += bool(dot < 0)
        adam.zero_grad()
        sum(losses).backward(retain_graph=True, inputs=[*plain.heads.parameters()])
        projected = a + b - dot / b.square().sum() * b - dot / a.square().sum() * a
        features.backward(projected, inputs=[*plain.trunk.parameters()])
        adam.step()
    assert conflicts > 0
    assert_equal_as_stated(module, network, plain.state_dict())


class _Watching(PlainTraining):
    """Records what the recipe logs for each parameter."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seen: list[dict[str, float]] = []

    def _joint(self, grads: list[Gradients], tasks: list[str]):
        update = super()._joint(grads, tasks)
        seen: dict[str, float] = {}
        for name, p in self.networks[tasks[0]].trunk.named_parameters():
            flat = [of_task[p].flatten() for of_task in grads]
            plain = sum(of_task[p] for of_task in grads)
            seen[f"removed/{name}"] = ((plain - update[p]).norm() / plain.norm()).item()
            for task, gradient in zip(tasks, flat, strict=True):
                seen[f"gradient_norm/{name}/{task}"] = gradient.norm().item()
            for i, j in combinations(range(len(tasks)), 2):
                cosine = torch.cosine_similarity(flat[i], flat[j], 0)
                seen[f"cosine/{name}/{tasks[i]},{tasks[j]}"] = cosine.item()
        self.seen.append(seen)
        return update


Logged = dict[int, dict[str, float]]
"""Logged numbers, by step."""


def _from_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: Logged = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def _records(data):
    """The records of a W&B file: a LevelDB log after a header."""
    header, block = 7, 32768
    at, record = header, b""
    while at < len(data):
        left = block - at % block
        if left < header:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # After a checksum.
        at += header + length
        record += data[at - length : at]
        if kind in (1, 4):  # A whole record, or the last part of one.
            yield record
            record = b""


def _from_wandb(folder):
    """Reads a W&B file; W&B itself has a reader only in Go."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: Logged = {}
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: item for item in record.history.item}
            values = {name: json.loads(item.value_json) for name, item in items.items()}
            found[values["_step"]] = values
    return found


READERS = {"tensorboard": _from_tensorboard, "wandb": _from_wandb}


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """W&B's process ends with the test, and its caches are in a folder of the test."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    package = pytest.importorskip("wandb")
    yield
    package.teardown()


@pytest.mark.parametrize("logger", ["tensorboard", pytest.param("wandb", marks=pytest.mark.full)])
def test_watched_by_parameter(float64, wandb, logger, tmp_path):
    pytest.importorskip("tensorboard")
    module = recipe("watched_by_parameter")
    network, history = module.train(logger, tmp_path / "runs")
    plain = plain_pcgrad(kind=_Watching)
    assert_equal_as_stated(module, network, trained(plain, [2] * 12))
    logged = READERS[logger](tmp_path / "runs")
    assert sorted(logged) == [0, 2, 4, 6, 8, 10]
    for step, values in logged.items():
        of_parameters = {name: values[name] for name in plain.seen[step]}
        assert len(of_parameters) == 4 * (1 + 2 + 1)
        assert of_parameters == pytest.approx(plain.seen[step], rel=1e-5, abs=1e-7)
        assert values["loss/depth"] == pytest.approx(history[step]["depth"].item())
    assert any(values["removed/0.weight"] > 0 for values in logged.values())


def test_watching_takes_every_kind_of_step():
    """Covers subsets of the tasks, a method by layer, Phase 1, kept weights, frozen parameters."""
    by_parameter = recipe("watched_by_parameter").by_parameter
    tasks = ["a", "b", "c"]

    def watched(method: cs.Method, *labeled: list[str], **options: Any):
        trunk = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        heads = torch.nn.ModuleDict({task: torch.nn.Linear(4, 1) for task in tasks})
        trunk[0].bias.requires_grad_(False)
        sgd = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.1)
        opt = cs.MultiTaskOptimizer(trunk, sgd, tasks, method, **options)
        opt.count_conflicts()
        for some in labeled:
            x = torch.randn(8, 3)
            opt.step(lambda task: heads[task](trunk(x)).square().mean(), tasks=some)
            values = by_parameter(opt)
        assert all(value == value for value in values.values())
        return values

    partial = watched(cs.PCGrad(), tasks, ["a", "c"])
    assert "cosine/0.weight/a,c" in partial
    assert not any("b" in name.split("/")[-1].split(",") for name in partial if "cosine" in name)
    assert not any("0.bias" in name for name in partial)
    assert {"removed/0.weight", "removed/2.bias"} <= partial.keys()
    kept = watched(cs.PCGrad(update_every=3), tasks, tasks)
    assert "removed/0.weight" in kept
    by_layer = watched(cs.PCGrad(groups="layer"), tasks)
    assert "gradient_norm/0.weight/b" in by_layer
    assert not any(name.startswith("removed") for name in by_layer)
    assert watched(cs.PCGrad(), tasks, schedule=cs.Sequential()) == {}
