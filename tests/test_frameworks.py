"""In other people's loops: torch.compile, several optimizers, accelerate, Lightning, DDP, FSDP."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torchvision_operators
from networks import (
    AB,
    BOTH_PHASES,
    TASKS,
    Setup,
    assert_equal,
    flat_grad,
    optimizer_of,
    sgd_of,
    started,
)
from torch import Tensor, nn

import cs_kernels as cs

# The frameworks themselves cause these warnings.
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    """One process as a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trunk(nn.Module):
    """Two convolutions, normalized, and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten(1)


PRIORITIZED = {"layers.0.weight": "layers.1", "layers.3.weight": "layers.4"}


def _trunk(tasks: list[str] = AB) -> Trunk:
    torch.manual_seed(0)
    trunk = Trunk()
    cs.nn.convert_task_batchnorm(trunk, tasks)
    return trunk


# --- torch.compile ------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("way", ["wrapped trunk", "closure alone", "in place"])
@BOTH_PHASES
def test_compiled_trunks(way: str, schedule: cs.Schedule) -> None:
    """One graph a task, from the first compiled step on, and none is broken into pieces."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    x, networks = torch.randn(4, 3, 8, 8), []
    for compiled in (False, True):
        trunk = _trunk()
        network, given = trunk, trunk
        if compiled and way == "in place":
            trunk.compile(backend=counter, fullgraph=True)
        elif compiled:
            network = torch.compile(trunk, backend=counter, fullgraph=True)
            given = network if way == "wrapped trunk" else trunk
        opt = optimizer_of(given, schedule=schedule)
        for step in range(3):
            opt.step(lambda task: network(x).square().mean() + (task == "b"))
            if compiled:
                assert counter.frame_count == (0 if step == 0 else len(AB))
        assert opt.coverage().prioritized == PRIORITIZED
        networks.append(trunk.state_dict())
    torch.testing.assert_close(*networks)


@pytest.mark.compile
@pytest.mark.parametrize("tasks", [3, 12])
def test_more_tasks_than_torch_compiles_graphs_for(tasks: int) -> None:
    """Eight by default, beyond which it would run eagerly, or raise if it must be one graph."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    names = [f"t{n}" for n in range(tasks)]
    trunk = _trunk(names)
    network = torch.compile(trunk, backend=counter, fullgraph=True)
    opt = optimizer_of(network, tasks=names)
    x = torch.randn(4, 3, 8, 8)
    limit = torch._dynamo.config.recompile_limit
    for _ in range(3):
        opt.step(lambda task: network(x).square().mean())
    assert counter.frame_count == tasks
    # To predict: other graphs, of a mode of their own.
    trunk.eval()
    with torch.no_grad():
        for name in names:
            with cs.nn.active_task(trunk, name):
                network(x)
    assert counter.frame_count == 2 * tasks
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.compile
def test_a_layer_that_first_runs_in_a_graph() -> None:
    """The pass of the next task is watched then; the graphs stay whole."""
    torch._dynamo.reset()

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.two = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.both = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            result: Tensor = self.two(x) if self.both else x
            return result

    x = torch.randn(8, 3)
    # A second network of the class runs the graphs of the first, which have no hook.
    for trunk in [cs.nn.convert_task_batchnorm(Growing(), AB) for _ in range(2)]:
        network = torch.compile(trunk, backend="eager", fullgraph=True)
        opt = optimizer_of(network)
        for both, prioritized in ((False, 1), (False, 1), (True, 2), (True, 2)):
            trunk.both = both
            opt.step(lambda task: network(x).square().mean())
            assert len(opt.coverage().prioritized) == prioritized


@pytest.mark.compile
def test_extract_from_a_compiled_trunk() -> None:
    trunk = _trunk()
    network = torch.compile(trunk, backend="eager")
    assert set(cs.nn.extract_task(network, "a").state_dict()) == {
        name.replace(".a.", ".") for name in trunk.state_dict() if ".b." not in name
    }


# --- Several optimizers -------------------------------------------------------------------------


@BOTH_PHASES
def test_several_optimizers(schedule: cs.Schedule) -> None:
    """Muon for matrices, AdamW for the rest: as the two stepped by hand."""
    networks = []
    for several in (False, True):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        cs.nn.convert_task_batchnorm(trunk, AB)
        heads = nn.ModuleDict({task: nn.Linear(8, 1) for task in AB})
        parameters = [*trunk.parameters(), *heads.parameters()]
        muon = torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)
        adamw = torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.01)
        if several:
            given: Any = [muon, adamw]
        else:  # One object that steps both.
            given = adamw
            adamw.register_step_pre_hook(lambda *_, muon=muon: muon.step() and None)
            for group in muon.param_groups:
                adamw.add_param_group({"params": group["params"], "lr": 0.0, "weight_decay": 0.0})
        opt = cs.MultiTaskOptimizer(trunk, given, AB, schedule=schedule)
        x = torch.randn(16, 5)
        for _ in range(3):
            opt.step(lambda task, t=trunk, h=heads, x=x: h[task](t(x)).square().mean())
        networks.append(parameters)
    torch.testing.assert_close(*networks)


def test_several_optimizers_with_a_scaler() -> None:
    setup, whole = (Setup(dtype=torch.float32, optimizer=torch.optim.SGD, lr=0.1) for _ in range(2))
    parameters = setup.parameters()
    setup.optimizer = [torch.optim.SGD(parameters[n::2], lr=0.1) for n in range(2)]
    opt = setup.start(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    one = whole.start()
    for batch in range(2):
        opt.step(setup.closure(batch))
        one.step(whole.closure(batch))
    torch.testing.assert_close(parameters, whole.parameters())


def test_repr() -> None:
    _, opt = started(schedule=cs.Mixed(3))
    assert repr(opt) == (
        "MultiTaskOptimizer(Trunk with 9 shared parameters of 1366 elements, Adam,"
        " tasks=['depth', 'normals', 'edges'], method=ConnectionStrength(),"
        " schedule=Mixed(epochs=3, seed=0, draw='epoch'), weighting=EqualWeights())"
    )


# --- Whoever must run the backward pass ---------------------------------------------------------


class Dense(nn.Module):
    """A trunk for one forward pass, and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({task: nn.Linear(6, 1) for task in AB})

    def losses(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {
            task: (self.heads[task](features) - 3 * n).square().mean() for n, task in enumerate(AB)
        }


def _train(opt: cs.MultiTaskOptimizer, model: Any, sgd: Any, x: Tensor, way: str) -> None:
    for _ in range(3):
        if way == "step":
            opt.step(lambda task: model.losses(x)[task])
        else:
            opt.backward(model.losses(x))
            sgd.step()


def _dense() -> tuple[Dense, torch.optim.SGD]:
    torch.manual_seed(0)
    model = Dense()
    return model, sgd_of(model, lr=0.05)


def _trained_plainly(method: cs.Method, x: Tensor, way: str) -> Dense:
    model, sgd = _dense()
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, copy.deepcopy(method))
    _train(opt, model, sgd, x, way)
    return model


def _assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    parameters = ([*module.parameters()] for module in (ours, theirs))
    torch.testing.assert_close(*parameters, rtol=1e-5, atol=1e-7)


METHODS = pytest.mark.parametrize("method", [cs.PCGrad(), cs.NashMTL(), cs.Sum()], ids=repr)
WAYS = pytest.mark.parametrize("way", ["step", "backward"])


@WAYS
@METHODS
def test_a_backward_that_scales(method: cs.Method, way: str) -> None:
    """The factor is measured: Nash-MTL's update has a norm that does not depend on it."""
    x = torch.randn(7, 5)
    expected = _trained_plainly(method, x, way)
    model, sgd = _dense()

    def backward(loss: Tensor, **options: Any) -> None:
        (1024 * loss).backward(**options)

    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, method, backward=backward)
    sgd.register_step_pre_hook(
        lambda *_: [p.grad.div_(1024) for p in model.parameters() if p.grad is not None] and None
    )
    _train(opt, model, sgd, x, way)
    _assert_alike(model, expected)


@WAYS
@METHODS
def test_accelerate(method: cs.Method, way: str, accelerate: Any) -> None:
    x = torch.randn(7, 5)
    expected = _trained_plainly(method, x, way)
    accelerator = accelerate.Accelerator(cpu=True)
    model, sgd = accelerator.prepare(*_dense())
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, method, backward=accelerator.backward)
    _train(opt, model, sgd, x, way)
    _assert_alike(model, expected)


@WAYS
@METHODS
def test_fabric(method: cs.Method, way: str) -> None:
    torchvision_operators.define()
    lightning = pytest.importorskip("lightning")
    x = torch.randn(7, 5)
    expected = _trained_plainly(method, x, way)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    plain, sgd = _dense()
    model, sgd = fabric.setup(plain, sgd)
    model.mark_forward_method("losses")
    opt = cs.MultiTaskOptimizer(plain.trunk, sgd, AB, method, backward=fabric.backward)
    _train(opt, model, sgd, x, way)
    _assert_alike(plain, expected)


@WAYS
@METHODS
def test_lightning(method: cs.Method, way: str, tmp_path: Any) -> None:
    torchvision_operators.define()
    lightning = pytest.importorskip("lightning")
    x = torch.randn(7, 5)
    expected = _trained_plainly(method, x, way)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model, self.sgd = _dense()
            self.opt: cs.MultiTaskOptimizer | None = None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.sgd

        def on_train_start(self) -> None:
            self.opt = cs.MultiTaskOptimizer(
                self.model.trunk, self.optimizers(), AB, method, backward=self.manual_backward
            )

        def training_step(self, batch: Tensor, number: int) -> None:
            assert self.opt is not None
            if way == "step":
                self.opt.step(lambda task: self.model.losses(batch)[task])
            else:
                self.opt.backward(self.model.losses(batch))
                self.optimizers().step()

    module = Module()
    parts = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(parts, False)}
    trainer = lightning.Trainer(**options, default_root_dir=tmp_path)
    trainer.fit(module, torch.utils.data.DataLoader([x] * 3, batch_size=None))
    assert trainer.global_step == 3
    _assert_alike(module.model, expected)


# --- torch's own wrappers -----------------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True])
def test_gradients_in_the_buckets_of_ddp(group: None, views: bool) -> None:
    """One process; with `gradient_as_bucket_view` each pass writes where the last one wrote."""
    networks = []
    for wrapped in (False, True):
        model, sgd = _dense()
        trunk: nn.Module = model.trunk
        if wrapped:
            trunk = nn.parallel.DistributedDataParallel(trunk, gradient_as_bucket_view=views)
        opt = cs.MultiTaskOptimizer(trunk, sgd, AB, cs.PCGrad())
        torch.manual_seed(1)
        x = torch.randn(7, 5)
        for _ in range(3):
            opt.step(lambda task: (model.heads[task](trunk(x)) - 3 * (task == "b")).square().mean())
        networks.append([*model.parameters()])
    assert_equal(*networks)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_hooks_of_fully_shard_are_seen_through(group: None) -> None:
    """On a single layer, and on its normalization: they hand on what they got, as views."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    for sharded in ([0], [1], [0, 1]):
        trunk = _trunk()
        for n in sharded:
            fully_shard(trunk.layers[n], mesh=mesh)
        fully_shard(trunk, mesh=mesh)
        x = torch.randn(4, 3, 8, 8)
        coverage = optimizer_of(trunk).trace(lambda task: trunk(x).square().mean())
        assert coverage.prioritized == PRIORITIZED


@pytest.mark.compile
def test_a_layer_that_runs_in_evaluation_only() -> None:
    """Its first run there neither ends the compiled steps nor enters the report."""
    torch._dynamo.reset()

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.last = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            return x if self.training else self.last(x)

    runs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph(*args)

        return run

    trunk = cs.nn.convert_task_batchnorm(Auxiliary(), AB)
    network = torch.compile(trunk, backend=backend, fullgraph=True)
    opt, x = optimizer_of(network), torch.randn(8, 3)
    for epoch in range(3):
        runs = 0
        for _ in range(2):
            opt.step(lambda task: network(x).square().mean())
        assert runs == (2 if epoch == 0 else 4)
        trunk.eval()
        with torch.no_grad(), cs.nn.active_task(trunk, "a"):
            network(x)
        trunk.train()
    assert set(opt.coverage().prioritized) == {"layers.0.weight"}


@BOTH_PHASES
def test_a_scaler_and_an_optimizer_without_gradients(schedule: cs.Schedule) -> None:
    """An optimizer a head: those of the others have nothing to step."""
    setup = Setup(dtype=torch.float32)
    setup.optimizer = [sgd_of(module) for module in (setup.trunk, *setup.heads.values())]
    opt = setup.start(schedule=schedule, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    other = setup.heads["edges"].weight.detach().clone()
    opt.step(setup.closure(0), tasks=TASKS[:2])
    assert torch.equal(other, setup.heads["edges"].weight)
    opt.step(setup.closure(0))
    assert not torch.equal(other, setup.heads["edges"].weight)


def test_a_backward_that_scales_beside_a_scaler() -> None:
    """Both factors are measured."""
    norms = []
    for factor in (1.0, 1024.0):
        (model, sgd), x = _dense(), torch.randn(7, 5)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

        def note(*_: object) -> None:  # The scaler has divided by its own.
            norms.append(flat_grad(model.trunk).norm() / factor)

        def backward(loss: Tensor, **options: Any) -> None:
            (factor * loss).backward(**options)

        sgd.register_step_pre_hook(note)
        given = model.trunk, sgd, AB, cs.NashMTL()
        opt = cs.MultiTaskOptimizer(*given, scaler=scaler, backward=backward)
        opt.step(lambda task: model.losses(x)[task])
    torch.testing.assert_close(*norms)


def test_accumulation_of_accelerate(accelerate: Any) -> None:
    """Inside `accumulate`, the optimizer's steps do nothing until the last micro-batch."""
    x = torch.randn(8, 5)
    plain, sgd = _dense()
    opt = cs.MultiTaskOptimizer(plain.trunk, sgd, AB, cs.PCGrad())
    for n, part in enumerate(x.chunk(2)):
        opt.backward({t: loss / 2 for t, loss in plain.losses(part).items()}, update=n == 1)
    sgd.step()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, sgd = accelerator.prepare(*_dense())
    opt = cs.MultiTaskOptimizer(model.trunk, sgd, AB, cs.PCGrad(), backward=accelerator.backward)
    for n, part in enumerate(x.chunk(2)):
        with accelerator.accumulate(model):
            if n == 0:
                with pytest.raises(RuntimeError, match="optimizer must make a step now"):
                    opt.step(lambda task: model.losses(x)[task])
            opt.backward(model.losses(part), update=accelerator.sync_gradients)
            sgd.step()
    _assert_alike(model, plain)
