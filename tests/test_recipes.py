"""Each recipe against a plain torch loop, to the tolerance that the recipe's docstring states."""

import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from plain_training import PlainTraining, in_float64, largest_difference
from recipe_training import (
    FOLDER,
    MIXED_PHASES,
    TASKS,
    Steps,
    assert_equal_as_stated,
    loss_of_batch,
    plain_pcgrad,
    plain_training,
    recipe,
    stated,
    steps_of,
    toy,
    trained,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import cs_kernels as cs

# The frameworks themselves cause these warnings.
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:`max_epochs`"),
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
]

NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"toy", "atomic"})


def half_loss(network: nn.Module, batch: toy.Batch, task: str):
    """Half of the loss, for the mean over two micro-batches."""
    return loss_of_batch(network, batch, task) / 2


def trained_in_mixed_precision(
    dtype, *, whole_step: bool = False, steps: Steps | None = None, **options: Any
):
    """Autocast covers the network only, or the loss as well."""

    def loss(network: nn.Module, batch: toy.Batch, task: str):
        images, targets = batch
        with torch.autocast("cpu", dtype, cache_enabled=False):
            prediction = network(images, task)
            if whole_step:
                return toy.loss_of(task, prediction, targets[task])
        return toy.loss_of(task, prediction.float(), targets[task]) / (1 if steps is None else 2)

    return trained(plain_training(loss=loss, **options), steps=steps)


def test_plain_loop(float64, tmp_path):
    module = recipe("plain_loop")
    plain = plain_training()
    expected = trained(plain, MIXED_PHASES)
    network, history = module.train()
    assert len(history) == 12
    assert_equal_as_stated(module, network, expected)
    for epochs in range(1, 5):
        network, history = module.train(epochs, tmp_path / "checkpoint")
        assert len(history) == 3
    assert_equal_as_stated(module, network, expected)
    # Predictions equal those of one network per task.
    images = toy.make_batches(1)[0][0]
    predictions = module.predict(network, images)
    for task, of_task in plain.networks.items():
        prediction = of_task.eval()(images, task)
        assert (predictions[task] - prediction).abs().max() <= stated(module)


def test_watched(float64, tmp_path):
    """TensorBoard's files have the numbers of the reports, at every second step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = recipe("watched")
    network, history = module.train(folder=tmp_path)
    assert_equal_as_stated(module, network, trained(plain_training(), MIXED_PHASES))
    events = EventAccumulator(str(tmp_path)).Reload()
    depth = events.Scalars("loss/depth")
    assert [event.step for event in depth] == [0, 2, 4, 6, 8, 10]
    losses = [float(losses["depth"]) for losses in history[::2]]
    assert [event.value for event in depth] == pytest.approx(losses)
    phases = [int(event.value) for event in events.Scalars("phase")]
    assert phases == MIXED_PHASES[::2]
    joint = [2 * n for n, phase in enumerate(phases) if phase == 2]
    for name in ("channel_share/edges", "conflict_share", "removed_norm/depth", "surgery_ms"):
        assert [event.step for event in events.Scalars(name)] == joint
    assert "priority/0" in events.Tags()["histograms"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(dtype, monkeypatch):
    module = recipe("mixed_precision")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    if dtype == torch.float16:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = trained_in_mixed_precision(dtype, **options)
    assert_equal_as_stated(module, module.train(dtype=dtype)[0], expected)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled(float64, backend):
    torch._dynamo.reset()
    module = recipe("compiled")
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    assert_equal_as_stated(module, module.train(backend=counter)[0], trained(plain_training()))
    assert counter.frame_count == len(TASKS)


HALVES = partial(plain_training, loss=half_loss)
PCGRAD_OF_HALVES = partial(plain_pcgrad, loss=half_loss)
DECAYING = partial(plain_training, weight_decay=0.01)
JOINT = {"phases": [2] * 12}
LABELED = [["depth", "edges"], ["edges"], ["depth"]]


@pytest.mark.parametrize(
    ("name", "function", "options", "plain", "how"),
    [
        ("with_fabric", "train", {"accelerator": "cpu"}, plain_training, {}),
        ("from_pcgrad", "train", {}, plain_pcgrad, JOINT),
        ("from_pcgrad", "train_by_hand", {}, plain_pcgrad, JOINT),
        # No micro-batch is lost; each counts as half a batch, even the last one of an epoch.
        ("accumulation", "train", {}, HALVES, {"steps": 6}),
        ("accumulation", "train_unnormalized", {}, PCGRAD_OF_HALVES, JOINT | {"steps": 6}),
        *(("with_accelerate", "train", {"batches": n}, HALVES, {"steps": n}) for n in (6, 5)),
        *(
            ("with_accelerate", "train_unnormalized", {"batches": n}, PCGRAD_OF_HALVES, how)
            for n, how in ((6, JOINT | {"steps": 6}), (5, JOINT | {"steps": 5}))
        ),
        ("partial_labels", "train", {}, DECAYING, {"labeled": LABELED}),
    ],
)
def test_recipes_equal_plain_loops(float64, request, name, function, options, plain, how):
    if name == "with_accelerate":
        request.getfixturevalue("accelerate")
        options = options | {"cpu": True}
    if "steps" in how:
        how = how | {"steps": steps_of(how["steps"], micro_batches=2)}
    module = recipe(name)
    network, history = getattr(module, function)(**options)
    assert_equal_as_stated(module, network, trained(plain(), **how))
    assert name != "partial_labels" or [list(losses) for losses in history] == 4 * LABELED


def test_activation_checkpointing(float64):
    module = recipe("activation_checkpointing")

    def loss(network: nn.Module, batch: toy.Batch, task: str):
        result = loss_of_batch(network, batch, task)
        with torch.no_grad():
            network.trunk(batch[0])  # The recomputation updates statistics again.
        return result

    network, _ = module.train()
    network.trunk = network.trunk.module
    assert_equal_as_stated(module, network, trained(plain_training(loss=loss)))


def test_with_peft(float64):
    """The update is the sum of both gradients; in a conflict, the new one is projected first."""
    module = recipe("with_peft")
    network, history = module.train(epochs=2)
    plain = module.make_network()
    adapters = [p for p in plain.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(adapters, lr=1e-2)
    conflicts = 0
    for losses in history:
        n = len(adam.state) and int(adam.state[adapters[0]]["step"]) % 6
        rows = []
        for task in module.TASKS:
            ids = module.make_batches(task)[n]
            loss = plain(input_ids=ids, labels=ids).loss
            grads = torch.autograd.grad(loss, adapters)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
            torch.testing.assert_close(losses[task], loss.detach())
        old, new = rows
        conflicts += int(old @ new < 0)
        update = old + new - (old @ new).clamp(max=0) / (old @ old) * old
        for p, grad in zip(adapters, update.split([p.numel() for p in adapters]), strict=True):
            p.grad = grad.view_as(p)
        adam.step()
    assert conflicts > 0
    difference = largest_difference(network.state_dict(), plain.state_dict())
    assert difference <= stated(module)


def _without_conflict(rows: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """PCGrad's update of two gradients, and whether they are in conflict."""
    a, b = rows
    product = (a @ b).clamp(max=0)
    return a + b - product / (b @ b) * b - product / (a @ a) * a, bool(product < 0)


def _plain_surgery(shared, losses: Sequence[Tensor]) -> bool:
    """Sets `.grad`: PCGrad's update of `shared`, other sums; returns whether gradients conflict."""
    rows = []
    for loss in losses:
        for p in shared:
            p.grad = None
        loss.backward(retain_graph=True)
        rows.append(torch.cat([p.grad.flatten() for p in shared]))
    update, conflict = _without_conflict(rows)
    for p, grad in zip(shared, update.split([p.numel() for p in shared]), strict=True):
        p.grad = grad.view_as(p)
    return conflict


def test_some_layers(float64):
    module = recipe("some_layers")
    network, _ = module.train()
    plain = toy.make_network(normalized=False)
    adam = torch.optim.Adam(plain.parameters(), lr=1e-2)
    conflicts = 0
    for images, targets in 4 * toy.make_batches():
        adam.zero_grad()
        losses = [toy.loss_of(t, plain(images, t), targets[t]) for t in TASKS]
        conflicts += _plain_surgery([*plain.trunk[3].parameters()], losses)
        adam.step()
    assert conflicts > 0
    assert largest_difference(network.state_dict(), plain.state_dict()) <= stated(module)


def test_physics_informed(float64):
    """UPGrad's update of two gradients is half of PCGrad's."""
    module = recipe("physics_informed")
    network, plain = module.make_network(), module.make_network()
    module.train_with_surgery(network, 30)
    parameters = [*plain.parameters()]
    adam = torch.optim.Adam(parameters, lr=3e-3)
    conflicts = 0
    for _ in range(30):
        adam.zero_grad()
        conflicts += _plain_surgery(parameters, [*module.losses_of(plain).values()])
        for p in parameters:
            p.grad /= 2
        adam.step()
    assert conflicts > 0
    assert largest_difference(network.state_dict(), plain.state_dict()) <= stated(module)
    before = module.error(network)
    assert module.train_on_the_sum(network, 20) < 1e-3
    assert module.error(network) < before


@pytest.mark.parametrize("resumed", [False, True])
def test_fine_tuning(float64, tmp_path, monkeypatch, resumed):
    """The sixth update has a NaN loss, and is dropped."""
    module = recipe("fine_tuning")
    right = module.loss_of

    def loss_of(network, ids, autocast):
        bad = float("nan") if torch.equal(ids, module.make_batch("new", 11)) else 1.0
        return right(network, ids, autocast) * bad

    monkeypatch.setattr(module, "loss_of", loss_of)
    path = tmp_path / "checkpoint" if resumed else None
    for updates in (4, 7, 12) if resumed else (12,):
        network, history = module.train(updates, path, autocast=False)
    plain = module.make_network()
    parameters = [*plain.parameters()]
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 12)
    conflicts = 0
    for update in range(12):
        rows = []
        for task in module.TASKS:
            ids = [module.make_batch(task, 2 * update + n) for n in range(2)]
            loss = sum(loss_of(plain, of_batch, False) for of_batch in ids) / 2
            grads = torch.autograd.grad(loss, parameters)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
        old, new = rows
        conflicts += int(old @ new < 0)
        total = old + new - (old @ new).clamp(max=0) / (old @ old) * old
        for p, grad in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        if total.isfinite().all():
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adamw.step()
        cosine.step()
    assert conflicts > 6
    assert len(history) == (5 if resumed else 12)
    assert int(adamw.state[parameters[0]]["step"]) == 11
    assert largest_difference(network.state_dict(), plain.state_dict()) <= stated(module)


class _PlainProtection:
    """Projects updates off a protected task's gradient, which every fourth step computes again."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = parameters
        self.kept = None
        self.conflicts = self.passes = 0

    def rows(self, loss: Tensor, step: int | None = None):
        """The gradient of a loss, flat."""
        self.passes += step is not None
        grads = torch.autograd.grad(loss, self.parameters)
        return torch.cat([grad.flatten() for grad in grads])

    def update(self, new: Tensor, old: Tensor | None):
        """Writes a step's update to `.grad`, with or without a new protected gradient."""
        self.kept = self.kept if old is None else old
        product = new @ self.kept
        self.conflicts += int(product < 0)
        update = new - product.clamp(max=0) / (self.kept @ self.kept) * self.kept
        update = update if old is None else update + old
        sizes = [p.numel() for p in self.parameters]
        for p, grad in zip(self.parameters, update.split(sizes), strict=True):
            p.grad = grad.view_as(p)


def test_protect_transformers(float64, accelerate, tmp_path):
    module = recipe("protect_transformers")
    options = {"use_cpu": True, "train_sampling_strategy": "sequential", "max_grad_norm": 0.0}
    network = module.train(str(tmp_path), learning_rate=0.0, **options).model
    trainer = module.train(str(tmp_path), **options)
    adam = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    plain = _PlainProtection([*network.parameters()])

    def loss(ids: Tensor):
        return network(input_ids=ids, labels=ids).loss

    new = module.texts(48, -1).view(6, 2, 4, 16)
    for step in range(12):
        adam.param_groups[0]["lr"] = 1e-2 * (1 - step / 12)
        old = plain.rows(loss(trainer.old[step % 5]), step) if step % 4 == 0 else None
        plain.update(sum(plain.rows(loss(ids) / 2) for ids in new[step % 6]), old)
        adam.step()
    assert plain.passes == 3
    assert plain.conflicts > 0
    assert_equal_as_stated(module, trainer.model, network.state_dict())


def test_protect_transformers_averages_over_tokens(accelerate, tmp_path):
    """The recipe's loss is the Trainer's, even if samples have different numbers of labels."""
    module = recipe("protect_transformers")
    options = {"use_cpu": True, "learning_rate": 0.0, "logging_steps": 1, "max_steps": 1}
    model = module.train(str(tmp_path), **options).model
    arguments = module.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    )
    labeled = [(x, torch.arange(16) < 3 + n % 13) for n, x in enumerate(module.texts(8, -1))]
    samples = [{"input_ids": x, "labels": x.where(has, -100)} for x, has in labeled]
    losses = []
    for kind in (module.Trainer, module.ProtectingTrainer):
        trainer = kind(model, arguments, train_dataset=samples)
        trainer.old = module.texts(20, 1).view(5, 4, 16)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_protect_transformers_resumed(accelerate, tmp_path):
    """Training stops between two updates that compute the old text's gradient."""
    module = recipe("protect_transformers")
    options = {"save_steps": 1, "use_cpu": True}
    straight = module.train(str(tmp_path), **options)
    for step in (6, 7):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed = module.train(str(tmp_path / "resumed"), checkpoint, **options)
        assert largest_difference(resumed.model.state_dict(), straight.model.state_dict()) == 0
        assert resumed.state.log_history[step]["kept_age/old"] == step % 4


def test_add_a_task(float64):
    module = recipe("add_a_task")
    network, history = module.train()
    assert [len(losses) for losses in history] == [2] * 9 + [3] * 9

    def loss(network: nn.Module, batch: toy.Batch, task: str):
        images, targets = batch
        target = -targets["depth"] if task == "normals" else targets[task]
        return toy.loss_of(task, network(images, task), target)

    plain = plain_training(loss=loss)
    for epoch, phase in enumerate([1, 2, 1, 2, 1, 2]):  # As drawn by Mixed(epochs=6, seed=9).
        if epoch == module.ADDED:
            new = plain.add_task("normals", like="depth")
            head = nn.Conv2d(8, 1, 1)
            head.load_state_dict(plain.networks["depth"].heads["depth"].state_dict())
            for of_task in plain.networks.values():
                of_task.heads["normals"] = head
            plain.optimizer.add_param_group({"params": [*new, *head.parameters()]})
        expected = trained(plain, [phase] * 3)
    assert_equal_as_stated(module, network, expected)


def test_export_one_task(float64):
    module = recipe("export_one_task")
    network, _ = module.train()
    network.eval()
    original = toy.make_network().state_dict()
    images = toy.make_batches(1, size=7)[0][0]
    for task in TASKS:
        program = module.export(network, task)
        with cs.nn.active_task(network.trunk, task):
            expected = network(images, task)
        difference = (program.module()(images) - expected).abs().max().item()
        assert difference <= stated(module)
        exported = {f"trunk.{n[2:]}" for n in program.state_dict if n.startswith("0.")}
        assert exported == {name for name in original if name.startswith("trunk.")}
    assert_equal_as_stated(module, network.train(), trained(plain_training(), [1] * 3 + [2] * 3))


def test_from_torchjd(float64):
    pytest.importorskip("torchjd")
    module = recipe("from_torchjd")
    network, _ = module.train()
    theirs, _ = module.train_torchjd()
    assert_equal_as_stated(module, network, theirs.state_dict())
    torchjd = importlib.import_module("torchjd")
    projector = torchjd.linalg.QuadprogProjector(reg_eps=1e-12)
    theirs, _ = module.train_torchjd(aggregator=torchjd.aggregation.UPGrad(projector=projector))
    assert_equal_as_stated(module, network, theirs.state_dict(), 1)
    # With two tasks, UPGrad's update is the mean of PCGrad's projections.
    options = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    expected = trained(plain_pcgrad(reduction="mean", **options), [2] * 12)
    assert largest_difference(network.state_dict(), expected) <= 1e-12


def test_with_timm(float64):
    module = recipe("with_timm")
    network, _, averaged = module.train()
    torch.manual_seed(0)
    names = {"conv1.0": "conv1.1", "conv1.3": "conv1.4", "conv1.6": "bn1"}
    names |= {f"layer1.0.conv{n}": f"layer1.0.bn{n}" for n in (1, 2)}
    plain = plain_training(
        module.Network(),
        optimizer=torch.optim.AdamW,
        prioritized={f"trunk.{a}.weight": f"trunk.{b}" for a, b in names.items()},
    )
    average = {name: value.clone() for name, value in plain.state().items()}
    # A warmup of one epoch, then half a cosine: (1 + cos(pi e / 4)) / 2.
    rates = [1e-3, *(0.005 * (1 + torch.tensor(e * torch.pi / 4).cos().item()) for e in (1, 2, 3))]
    for phase, rate in zip((1, 1, 2, 2), rates, strict=True):
        plain.optimizer.param_groups[0]["lr"] = rate
        for batch in toy.make_batches(2):
            plain.step(phase, [batch])
            for name, value in plain.state().items():
                if value.is_floating_point():
                    average[name] = 0.9 * average[name] + 0.1 * value
                else:
                    average[name] = value.clone()
    assert_equal_as_stated(module, network, plain.state())
    assert_equal_as_stated(module, averaged, average)
    assert plain.conflicts > 0
    images = toy.make_batches(1)[0][0]
    one, other = (module.predict(averaged, images, task) for task in TASKS)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ["with_fabric", "with_accelerate"])
def test_mixed_precision_of_frameworks(accelerate, name):
    module, steps = recipe(name), None
    if name == "with_fabric":
        network, _ = module.train(accelerator="cpu", precision="bf16-mixed")
    else:
        network, _ = module.train(cpu=True, mixed_precision="bf16")
        steps = steps_of(6, micro_batches=2)
    expected = trained_in_mixed_precision(torch.bfloat16, steps=steps)
    assert_equal_as_stated(module, network, expected, 1)


@pytest.fixture
def trainer_options(tmp_path):
    parts = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    return options | dict.fromkeys(parts, False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_lightning_in_mixed_precision(dtype, trainer_options):
    """On the CPU, Lightning supports float16 only through a plugin."""
    module = recipe("with_lightning")
    precision = importlib.import_module("lightning.pytorch.plugins.precision")
    options: dict[str, Any] = {"precision": "bf16-mixed"}
    scalers = [None, None]
    if dtype == torch.float16:
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        plugin = precision.MixedPrecision("16-mixed", "cpu", scaler=scalers[0])
        options = {"plugins": [plugin]}
    expected = trained_in_mixed_precision(dtype, scaler=scalers[1], whole_step=True)
    found, _ = module.train(**options, **trainer_options)
    assert_equal_as_stated(module, found.network, expected, 1)


def test_with_lightning(float64, tmp_path, trainer_options):
    """The history counts batches, and `global_step` optimizer steps: two per batch in Phase 1."""
    module = recipe("with_lightning")
    straight, trainer = module.train(**trainer_options)
    assert len(straight.history) == 12
    assert trainer.global_step == 6 * 2 + 6
    expected = trained(plain_training())
    assert_equal_as_stated(module, straight.network, expected)
    for batches, before in ((3, 0), (9, 3), (12, 9)):
        resume = tmp_path / f"{before}.ckpt" if before else None
        resumed, trainer = module.train(batches, resume, **trainer_options)
        assert len(resumed.history) == batches - before
        trainer.save_checkpoint(tmp_path / f"{batches}.ckpt")
    assert_equal_as_stated(module, resumed.network, expected)
    assert resumed.opt.state_dict()["steps"] == 12
    assert len(module.train(5, **trainer_options)[0].history) == 5


class _Clipped(PlainTraining):
    """Clips the norm over all parameters to 2; the learning rate falls to 0 in six steps."""

    grad_norms: tuple[float, ...] = ()
    """The norms of updates before clipping."""

    def _apply(self, update: dict[nn.Parameter, Tensor]):
        norm = torch.cat([grad.flatten() for grad in update.values()]).norm().item()
        self.optimizer.param_groups[0]["lr"] = 1e-2 * (1 - len(self.grad_norms) / 6)
        self.grad_norms = (*self.grad_norms, norm)
        super()._apply({p: grad * min(1, 2 / (norm + 1e-6)) for p, grad in update.items()})


@pytest.mark.parametrize("bf16", [False, True])
def test_with_transformers(accelerate, request, tmp_path, bf16):
    """Two updates per epoch: the mean over two batches, and the last batch.

    Gradients of BERT's key biases are zero up to rounding, which Adam would amplify in mixed
    precision.
    """
    if not bf16:
        request.getfixturevalue("float64")
    module = recipe("with_transformers")
    options = {"dropout": 0.0, "use_cpu": True, "train_sampling_strategy": "sequential"}
    options |= {"max_grad_norm": 2.0, **({"optim": "sgd"} if bf16 else {})}
    start = module.train(str(tmp_path), learning_rate=0.0, **options).model
    trainer = module.train(str(tmp_path), bf16=bf16, **options)

    def loss(network: nn.Module, micro_batch: Any, task: str):
        inputs, micro_batches = micro_batch
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return network(**inputs)[task] / micro_batches

    optimizer = torch.optim.SGD if bf16 else torch.optim.AdamW
    plain = _Clipped(start, module.TASKS, loss, optimizer, {}, lr=1e-2, weight_decay=0.0)
    texts = torch.utils.data.default_collate(trainer.train_dataset)
    first, second, third = ({k: x[n : n + 8] for k, x in texts.items()} for n in (0, 8, 16))
    for _ in range(3):
        plain.step(2, [(first, 2), (second, 2)])
        plain.step(2, [(third, 1)])
    assert 0 < plain.conflicts < 6
    assert min(plain.grad_norms) < 2 < max(plain.grad_norms)
    assert_equal_as_stated(module, trainer.model, start.state_dict(), int(bf16))
    logs = trainer.state.log_history[:6]
    assert [entry["grad_norm"] for entry in logs] == pytest.approx(plain.grad_norms, rel=1e-5)
    losses = [entry["loss/topic"] + entry["loss/order"] for entry in logs]
    assert [entry["loss"] for entry in logs] == pytest.approx(losses, rel=1e-5)


def test_with_transformers_resumed(accelerate, tmp_path):
    """Training stops in the middle or at the end of an epoch, with dropout and shuffled texts."""
    module = recipe("with_transformers")
    options = {"save_steps": 1, "use_cpu": True}
    straight = module.train(str(tmp_path), **options)
    for step in (3, 4):
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        resumed = module.train(str(tmp_path / "resumed"), checkpoint, **options)
        assert largest_difference(resumed.model.state_dict(), straight.model.state_dict()) == 0
        assert str(resumed.opt.state_dict()) == str(straight.opt.state_dict())
        assert resumed.opt.state_dict()["steps"] == 6
        assert [entry["step"] for entry in resumed.state.log_history] == [1, 2, 3, 4, 5, 6, 6]
    # The Trainer's own evaluation.
    losses = straight.evaluate(straight.train_dataset)
    inputs = torch.utils.data.default_collate(straight.train_dataset)
    assert losses["eval_loss"] == pytest.approx(straight.model(**inputs)["loss"].item())


class _Parts(PlainTraining):
    """Computes each part of a batch separately, as on its own rank."""

    def gradients(self, task: str, micro_batches: Sequence[toy.Batch]):
        """Gradients of the mean loss; running statistics are means over the parts, too."""
        buffers = [*self.networks[task].buffers()]
        before = [buffer.clone() for buffer in buffers]
        total: dict[nn.Parameter, Tensor] = {}
        after = []
        for part in micro_batches:
            for p, grad in super().gradients(task, [part]).items():
                total[p] = total.get(p, 0) + grad / len(micro_batches)
            after.append([buffer.clone() for buffer in buffers])
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        for buffer, values in zip(buffers, zip(*after, strict=True), strict=True):
            buffer.copy_(sum(values) / len(values))
        return total


def _on_a_rank(rank):
    with in_float64():
        network, history = recipe("on_many_ranks").train()
    assert len(history) == 12
    return network.state_dict()


def _trainer_on_a_rank(rank, folder):
    """Makes three updates, and repeats the last two from a checkpoint."""
    options = {"per_device_train_batch_size": 5, "dropout": 0.0, "use_cpu": True}
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, str(value))
        module = recipe("with_transformers")
        straight = module.train(folder, save_steps=1, **options)
        resumed = module.train(folder, f"{folder}/checkpoint-1", **options)
    assert isinstance(straight.model_wrapped, nn.parallel.DistributedDataParallel)
    assert largest_difference(resumed.model.state_dict(), straight.model.state_dict()) == 0
    return straight.model.state_dict()


@pytest.mark.ranks
def test_with_transformers_on_many_ranks(float64, accelerate, pools, tmp_path):
    """Two ranks with two batches of five texts equal one process with two batches of ten."""
    module = recipe("with_transformers")
    options = {"per_device_train_batch_size": 10, "dropout": 0.0, "use_cpu": True}
    expected = module.train(str(tmp_path / "one"), **options).model.state_dict()
    for state in pools(2).run(_trainer_on_a_rank, str(tmp_path / "two")):
        assert largest_difference(state, expected) <= stated(module)


@pytest.mark.ranks
def test_on_many_ranks(float64, pools):
    halves = [slice(rank, None, 2) for rank in range(2)]
    steps = [
        [(images[half], {t: y[half] for t, y in targets.items()}) for half in halves]
        for images, targets in toy.make_batches()
    ]
    expected = trained(plain_training(kind=_Parts), steps=steps)
    for state in pools(2).run(_on_a_rank):
        assert largest_difference(state, expected) <= stated(recipe("on_many_ranks"))


def _protected_on_a_rank(rank):
    with in_float64():
        network, history = recipe("protect_ranks").train()
    assert [*map(len, history)] == [2, 1, 1, 1] * 3
    return get_model_state_dict(network, options=StateDictOptions(full_state_dict=True))


@pytest.mark.ranks
def test_protect_ranks(float64, pools):
    """A head's gradients are never projected; the old head has gradients in one of four steps."""
    module = recipe("protect_ranks")
    network = toy.make_network(normalized=False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-2)
    plain = _PlainProtection([*network.trunk.parameters()])
    for step in range(12):
        images, targets = toy.make_batches()[step % 3]
        adam.zero_grad()
        rows = {}
        for task in module.TASKS[step % 4 > 0 :]:
            loss = toy.loss_of(task, network(images, task), targets[task])
            rows[task] = plain.rows(loss, step)
            loss = toy.loss_of(task, network(images, task), targets[task])
            loss.backward(inputs=[*network.heads[task].parameters()])
        plain.update(rows[module.NEW], rows.get(module.OLD))
        adam.step()
    assert plain.conflicts > 0
    for state in pools(2).run(_protected_on_a_rank):
        assert largest_difference(state, network.state_dict()) <= stated(module)


OPTIONS = {"compiled": ["--backend", "eager"]}
PRINTED = {
    "fine_tuning": r"\{'cosine/old,new': -?\d+\.\d+",
    "physics_informed": r"\{'equation': \d+\.\d+",
    "protect_ranks": r"'edges': \d+\.\d+",
    "protect_transformers": r"'loss/new': '\d+\.\d+",
    "with_peft": r"\{'old': \d+\.\d+",
    "with_transformers": r"'loss/topic': '\d+\.\d+",
    "balanced_transformers": r"'task_weight/topic': '\d+\.\d+",
    "balanced_lightning": r"\d\.\d+",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n == "physics_informed" else ()) for n in NAMES],
)
def test_recipes_are_short_scripts(
    name,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    tmp_path,
):
    recipe(name)
    if "ranks" in name or "deepspeed" in name:  # Sets torchrun's variables.
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        for variable, value in {**address, "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS.get(name, [])])
    path = FOLDER / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 80
    runpy.run_path(str(path), run_name="__main__")
    printed = PRINTED.get(name, r"\{'(?:task_weight/)?depth': \d+\.\d+")
    assert len(re.findall(printed, capsys.readouterr().out)) >= 6
    left = ["runs"] if name.startswith("watched") else []
    assert [path.name for path in tmp_path.iterdir()] == left


def test_a_recipe_in_a_process_of_its_own(tmp_path):
    """The recipe runs from another folder, as for a user."""
    command = [sys.executable, FOLDER / "plain_loop.py", "--checkpoint", "a.pt", "--epochs", "2"]
    environment = {"PYTHONPATH": str(Path(cs.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "timeout": 1200}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\{'depth': \d", done.stdout)) == 6
    assert torch.load(tmp_path / "a.pt")["epoch"] == 2
